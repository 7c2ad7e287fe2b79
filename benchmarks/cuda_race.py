"""Times work on a device: rates, the steps of one contender at a time, and the rows of a race.

Only one contender's states are in memory; gradients and parameters are made on the device. Ours is timed
before and after the peers, and both medians are kept: rounds in turns would need the states of all at once.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch._dynamo  # which each child would import with its first optimizer, in 2 s

from contenders import LR, OURS, Contender, absent
from cuda_child import Item, Refused, Row
from harness import Step, state_bytes, stepper
from quality import largest_singular_value, scale
from workloads import Tensors, Workload, gradients, make_tensors

EMULATED = "emulated"
WARM_STEPS = 3
SECONDS = 0.6
"""Time after which no more samples of a measurement are taken, two at least."""
COMPILE_SECONDS = 600.0
MAX_SINGULAR = 2
"""Shapes of a workload, the largest ones, whose singular value is taken."""
SERIES = ("device", "host", "seconds")
GIGA = 1e9
Work = Callable[[], object]


class Clock:
    """Times a call by events on the stream, and by the host's clock until the call comes back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        """Waits for what was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def sample(self, work: Work) -> tuple[float, float]:
        """Seconds on the device and on the host."""
        self.synchronize()
        if self.device.type != "cuda":
            start = time.perf_counter()
            work()
            spent = time.perf_counter() - start
            return spent, spent
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        start = time.perf_counter()
        work()
        host = time.perf_counter() - start
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3, host


def tflops(clock: Clock, side: int, dtype: torch.dtype, precision: str = "highest") -> float:
    """Rate of square products by torch, in ``10^12`` operations a second; "high" takes float32 as TF32."""
    a, before = torch.randn(side, side, device=clock.device).to(dtype), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        return 2 * side**3 / best(clock, lambda: torch.mm(a, a), 0) / 1e12
    finally:
        torch.set_float32_matmul_precision(before)


def copy_rate(clock: Clock, elements: int) -> float:
    """Bytes a second that a copy of float32 reads and writes, in ``10^9``."""
    source = torch.empty(elements, device=clock.device)
    target = torch.empty_like(source)
    return 8 * elements / best(clock, lambda: target.copy_(source), 0) / GIGA


def launch_us(clock: Clock) -> float:
    """Microseconds of the host for one launch by torch."""
    one = torch.zeros(1, device=clock.device)
    return best(clock, lambda: one.add_(1), 1) * 1e6


def best(clock: Clock, work: Callable[[], object], which: int) -> float:
    """Least seconds of ten, on the device (0) or on the host (1)."""
    return min(clock.sample(work)[which] for _ in range(10))


def rates_of(found: dict[str, float]) -> dict[str, float]:
    """Returns them as `floors.floor_seconds` takes them: operations and bytes a second, NaN if unknown."""
    return {
        "bfloat16": found.get("bfloat16_tflops", math.nan) * 1e12,
        "float32": found.get("float32_tflops", math.nan) * 1e12,
        "bytes": found.get("copy_gb_per_s", math.nan) * GIGA,
    }


@dataclass(frozen=True)
class Place:
    """Where contenders are timed.

    Attributes:
        word: "cuda", "cpu", or "emulated": memory of the host counts as that of a device then.
        versions: Of the sources of contenders; one that is not named here is tried.
    """

    word: str
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def clock(self) -> Clock:
        """Times work there."""
        return Clock(torch.device("cpu" if self.word == EMULATED else self.word))

    def prepare(self) -> None:
        """Makes the device ready, in a child that collects garbage in `recover` alone, of its own objects.

        Raises:
            RuntimeError: where torch finds no GPU.
        """
        gc.disable()
        gc.freeze()
        if self.word == "cpu":
            return
        if self.word != EMULATED and not torch.cuda.is_available():
            raise RuntimeError("torch finds no GPU")
        from oxidion._gpu_check.place import place

        # It turns off what a check has found to be wrong.
        place(EMULATED if self.word == EMULATED else str(self.clock.device.index or 0))
        if self.word != EMULATED:
            torch.mm(*[torch.ones(64, 64, device=self.clock.device)] * 2)
            self.recover()

    def recover(self) -> None:
        """Frees the memory of a measurement; raises where the device has an error."""
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Timing:
    """How a contender is timed.

    Attributes:
        samples: Most samples.
        seconds: Time after which no more are taken, two at least.
        dtype: Of parameters and gradients.
        precision: Of float32 products of torch; "high" is TF32.
        is_singular: Whether the largest singular value of the update is taken too.
    """

    samples: int = 4
    seconds: float = SECONDS
    dtype: torch.dtype = torch.float32
    precision: str = "highest"
    is_singular: bool = False


def measured(entry: Contender, workload: Workload, place: Place, timing: Timing) -> Row:
    """Seconds of steps on the device and on the host.

    Raises:
        Refused: for a contender that is not installed, or not for such a list.
    """
    if refused := absent(entry, place.versions.get(entry.source, ""), workload):
        raise Refused(refused)
    clock = place.clock
    torch.set_float32_matmul_precision(timing.precision)
    tensors = make_tensors(gradients(workload, clock.device, timing.dtype))
    optimizers = list(entry.build(tensors))
    step = stepper(optimizers, compiled=entry.compiled or entry.source in (OURS, "torch"))
    first = max(clock.sample(step))
    started = time.perf_counter()
    for _ in range(WARM_STEPS - 1):
        spent = max(clock.sample(step))
        if spent > timing.seconds:
            break
    pairs: list[tuple[float, float]] = []
    while len(pairs) < timing.samples:
        pairs += [clock.sample(step), clock.sample(step)]
        if time.perf_counter() - started > timing.seconds:
            break
    row: Row = {"busy": time.perf_counter() - started, "first_s": first}
    row["state_bytes"] = state_bytes(optimizers)
    row["device"], row["host"] = (list(column) for column in zip(*pairs, strict=True))
    if entry.source == OURS and place.word != "cpu":
        with suppress(Exception):  # times do not depend on it
            row["kernels"] = dict(optimizers[0].explain().kernels)  # type: ignore[attr-defined]
    if timing.is_singular:
        row["quality"] = {"sigma_max": _singular(entry, tensors, step)}
    return row


def _singular(entry: Contender, tensors: Tensors, step: Step) -> float:
    """Largest singular value of the updates of some shapes: weights of zeros become these times a scale."""
    chosen = {tuple(param.shape): param for param in tensors.matrices}
    largest = sorted(chosen.values(), key=lambda param: -param.numel())[:MAX_SINGULAR]
    with torch.no_grad():
        for param in largest:
            param.zero_()
    step()
    torch.set_float32_matmul_precision("highest")
    updates = (param.detach() / (LR * scale(entry.source, tuple(param.shape))) for param in largest)
    # NaN is the largest.
    return max(map(largest_singular_value, updates), key=lambda sigma: (sigma != sigma, sigma))


def items(
    races: list[dict[str, Any]],
    workload: Workload,
    entries: Sequence[Contender],
    place: Place,
    timing: Timing,
    *,
    family: str = "",
    group: str = "",
    judge: Callable[[Contender], Row] | None = None,
    **settings: Any,
) -> list[Item]:
    """One measurement for each contender, and another one of the first where it has peers.

    Args:
        races: Gets the race, in which the rows are kept.
        workload: What is stepped over.
        entries: Contenders, ours first.
        place: Where.
        timing: How.
        family: Label of the race; that of the first contender if not given.
        group: Measurements of a group share a child; by default those of a race do.
        judge: More of a row, after the time has been taken.
        settings: More of each item.
    """
    family = family or entries[0].family
    made, order = [], [(entry, timing.samples) for entry in entries]
    if len(entries) > 1:  # half of the samples before and half after the others, both of them even
        before = timing.samples // 4 * 2 + 2 * (timing.samples % 4 > 0)
        order = [(entries[0], before), *order[1:], (entries[0], max(2, timing.samples - before))]
    for index, (entry, samples) in enumerate(order):
        own, judge_now = replace(timing, samples=samples), judge if index < len(entries) else None
        work = partial(_row, entry, workload, place, own, judge_now)
        limits = {"limit": COMPILE_SECONDS, "fault": "not compiled"} if entry.compiled else {}
        made.append(
            Item(
                group=group or f"{workload.name} {family}",
                subject=f"{entry.name} {family} {group}",
                work=work,
                keep=partial(_keep, races, workload, family, entry),
                cost=float(workload.numel),
                **{**limits, **settings},
            )
        )
    return made


def _row(
    entry: Contender,
    workload: Workload,
    place: Place,
    timing: Timing,
    judge: Callable[[Contender], Row] | None,
) -> Row:
    row = measured(entry, workload, place, timing)
    place.recover()
    return {**row, **judge(entry)} if judge else row


def _keep(races: list[dict[str, Any]], workload: Workload, family: str, entry: Contender, row: Row) -> None:
    where = {"workload": workload.name, "family": family}
    race = next((race for race in races if where.items() <= race.items()), None)
    if race is None:
        race = {**where, "numel": workload.numel, "contenders": {}}
        races.append(race)
    merge(race["contenders"].setdefault(entry.name, {"source": entry.source, "note": entry.note}), row)


def merge(known: Row, row: Row) -> None:
    """Adds a result to a row; where it has one already, the samples follow, with the median of either."""
    if known.get("status") != "ok":
        known.update(row)
        return
    if row["status"] != "ok":
        known["again"] = row["status"]
        return
    for name in SERIES:
        if name in row:
            known[f"{name}_medians"] = [statistics.median(known[name]), statistics.median(row[name])]
            known[name] = known[name] + row[name]
