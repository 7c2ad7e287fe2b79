"""Timing: interleaved rounds, per-round ratios with a bootstrap interval, and the state of the machine."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

Step = Callable[[], None]

#: A sample repeats the step until it takes this long, so that clock resolution and call noise do not matter.
MIN_SAMPLE_SECONDS = 0.02
MAX_INNER = 200
BOOTSTRAP = 2000
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")


@dataclass
class Series:
    """Samples of one contender: seconds per step, two a round (one in each direction of the order)."""

    inner: int
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def rounds(self, clock: str) -> np.ndarray:
        """Mean of the two samples of each round; ``clock`` is ``wall`` or ``cpu``."""
        return np.asarray(getattr(self, clock)).reshape(-1, 2).mean(axis=1)


def series_of(row: dict[str, Any]) -> Series:
    """The series that a row of a result file holds."""
    return Series(row["inner"], row["wall"], row["cpu"])


def clock_of(race: dict[str, Any]) -> str:
    """The clock whose figures are read: CPU time at one thread, wall time at more."""
    return "cpu" if race["threads"] == 1 else "wall"


def contender_rows(result: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
    """Every race that ran, with the name and figures of each contender."""
    for race in result["races"]:
        for name, row in race.get("contenders", {}).items():
            yield race, name, row


def median_ms(row: dict[str, Any], clock: str) -> float:
    """Median milliseconds of a step."""
    return 1e3 * statistics.median(series_of(row).rounds(clock).tolist())


def stepper(optimizers: Sequence[Optimizer], *, compiled: bool) -> Step:
    """A call that steps every optimizer once, with ``torch.compile`` decorators inert unless ``compiled``."""

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    def eager_step() -> None:
        with torch.compiler.set_stance("force_eager"):
            step()

    return step if compiled else eager_step


def timed(step: Step, repeat: int) -> tuple[float, float]:
    """Wall seconds and process CPU seconds of one step, averaged over ``repeat`` consecutive steps."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeat):
        step()
    return (time.perf_counter() - wall) / repeat, (time.process_time() - cpu) / repeat


def calibrate(step: Step) -> int:
    """How many steps make one sample."""
    wall, _ = timed(step, 1)
    return max(1, min(MAX_INNER, round(MIN_SAMPLE_SECONDS / max(wall, 1e-9))))


def in_turns(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Whose turn it is: in every round all in order and then in reverse (ABBA). No garbage is collected."""
    order = [*names]
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            yield from (*order, *reversed(order))
    finally:
        gc.enable()


def interleave(steps: dict[str, Step], rounds: int) -> dict[str, Series]:
    """Time every step in rounds."""
    series = {name: Series(calibrate(step)) for name, step in steps.items()}
    for name in in_turns(steps, rounds):
        wall, cpu = timed(steps[name], series[name].inner)
        series[name].wall.append(wall)
        series[name].cpu.append(cpu)
    return series


def ratio(peer: Series, base: Series, clock: str) -> dict[str, float]:
    """Median over rounds of peer time / base time, with a 95 % bootstrap interval. Above 1 the base wins."""
    ratios = peer.rounds(clock) / base.rounds(clock)
    draws = np.random.default_rng(0).choice(ratios, size=(BOOTSTRAP, ratios.size))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return {"median": float(np.median(ratios)), "low": float(low), "high": float(high)}


def between(text: str, marks: tuple[str, str], tables: str) -> str:
    """A page with the tables between its two marks.

    Raises:
        SystemExit: for a page without them.
    """
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise SystemExit(f"--page: it must hold the lines {marks[0]} and {marks[1]}")
    return f"{before}{begin}\n{tables}{end}{after}"


def load_average() -> float:
    """The one-minute load average, or NaN where the system has none."""
    with contextlib.suppress(OSError):
        return os.getloadavg()[0]
    return float("nan")


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    model, flags = platform.processor(), set[str]()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = (part.strip() for part in line.partition(":"))
            if key == "model name":
                model = value
            elif key == "flags":
                flags = set(value.split())
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
        "system": platform.platform(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def state_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Bytes of the tensors in the optimizers' state."""
    return sum(
        value.numel() * value.element_size()
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
