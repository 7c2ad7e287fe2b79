"""Interleaved timing, ratios of rounds with a bootstrap interval; the machine, and files of results."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

Step = Callable[[], None]

RESULTS = Path(__file__).resolve().parent / "results"
#: Characters of a line of JSON up to which an object is not broken into lines.
LINE = 300
#: A sample repeats the step until it takes this long, so that clock resolution and call noise do not matter.
MIN_SAMPLE_SECONDS = 0.02
MAX_INNER = 200
BOOTSTRAP = 2000
#: Figures of the quality of an update.
QUALITY = ("sigma_max", "orthogonality", "cosine")
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
    """Number of steps that make one sample."""
    wall, _ = timed(step, 1)
    return max(1, min(MAX_INNER, round(MIN_SAMPLE_SECONDS / max(wall, 1e-9))))


def in_turns(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Yields the names in order and then in reverse (ABBA) in every round. No garbage is collected."""
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


def ratio(peer: Series, base: Series, clock: str) -> list[float]:
    """Median over rounds of peer time / base time and its 95 % bootstrap interval. Above 1 the base wins."""
    ratios = peer.rounds(clock) / base.rounds(clock)
    draws = np.random.default_rng(0).choice(ratios, size=(BOOTSTRAP, ratios.size))
    return [float(np.median(ratios)), *np.quantile(np.median(draws, axis=1), (0.025, 0.975)).tolist()]


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Median wall time of a call, after one that is not counted."""
    work()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        samples.append(time.perf_counter() - start)
    return float(np.median(samples))


def said(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def load_average() -> float:
    """The one-minute load average, or NaN where the system has none."""
    with contextlib.suppress(OSError):
        return os.getloadavg()[0]
    return float("nan")


def machine() -> dict[str, Any]:
    """Facts of the machine, and the date."""
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


def facts() -> dict[str, Any]:
    """The machine, versions, threads of torch and load, as results of studies begin."""
    import oxidion

    return {
        "machine": machine(),
        "versions": {"oxidion": oxidion.__version__, "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "load": load_average(),
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


def command(description: str | None, **keys: Any) -> argparse.ArgumentParser:
    """A parser that prints the description as it is, with the folder for the results."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=kind, **keys)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    return parser


def rounded(value: Any) -> Any:
    """The value with eight digits of every number."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(one) for one in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def dumped(value: Any, indent: int = 0) -> str:
    """JSON in which what fits into a line is one."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or (indent and len(line) + indent <= LINE):
        return line
    if isinstance(value, dict):
        inner = [f"{json.dumps(key)}: {dumped(one, indent + 1)}" for key, one in value.items()]
    else:
        inner = [dumped(one, indent + 1) for one in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    pad = "\n" + " " * indent
    return f"{begin}{pad} {f',{pad} '.join(inner)}{pad}{end}" if inner else line


def write(result: dict[str, Any], folder: Path, name: str, *, is_whole: bool = False) -> None:
    """Writes a result as JSON, rounded unless it is to be whole; an interrupted write leaves the old file."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{name}.json.part"
    text = json.dumps(result) if is_whole else dumped(rounded(result))
    part.write_text(text + "\n", encoding="utf-8")
    os.replace(part, folder / f"{name}.json")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, *rows]
    first, *rest = ("| " + " | ".join(row) + " |" for row in lines)
    return "\n".join([first, "|" + "---|" * len(head), *rest])


def between(text: str, name: str, inside: str) -> str:
    """A page with other text between its two marks of a name.

    Raises:
        SystemExit: for a page without them.
    """
    marks = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise SystemExit(f"the page must hold the lines {marks[0]} and {marks[1]}")
    return f"{before}{begin}\n{inside.rstrip()}\n{end}{after}"


def rewrite(page: Path | None, name: str, inside: str) -> None:
    """Puts text between the two marks of a name in the file of a page, where one is given."""
    if page is not None:
        page.write_text(between(page.read_text(encoding="utf-8"), name, inside), encoding="utf-8")


def clock_of(threads: int) -> str:
    """The clock whose figures are read: CPU time at one thread, wall time at more."""
    return "cpu" if threads == 1 else "wall"


def summed_up(series: dict[str, Series], ours: Sequence[str], clock: str) -> dict[str, dict[str, Any]]:
    """Milliseconds of a step of each contender, and its ratios over each of ours, or over the first."""
    bases = [name for name in ours if name in series] or [*series][:1]
    return {
        name: {
            "ms": 1e3 * float(np.median(one.rounds(clock))),
            "ratio": {base: ratio(one, series[base], clock) for base in bases if base != name},
        }
        for name, one in series.items()
    }
