"""The time of a step on a machine, from the schedule of its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oxidion._core.table import Table
from oxidion._planning.hardware import LAUNCH, Hardware
from oxidion._planning.traffic import sent, summed

COMPARED = 80
"""Bytes that ranks compare along an axis before a step."""
UTILIZATION = 0.4
"""Share of the published rate that the rest of a training step reaches."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of the busiest rank.

    Attributes:
        hardware: name.
        total: of the step.
        compute: of its instructions.
        communication: of its collectives, hidden and exposed.
        exposed: of communication during which nothing is computed.
        mean_compute: of the instructions of the mean rank.
        axes: of the collectives by axis.
        training: of the rest of a training step; None where the number of tokens is not given.
        measured: whether rates of the hardware were measured.
    """

    hardware: str
    total: float
    compute: float
    communication: float
    exposed: float
    mean_compute: float
    axes: dict[str, float]
    training: float | None = None
    measured: bool = False

    @property
    def share(self) -> float | None:
        """The optimizer's share of a training step."""
        return None if self.training is None else self.total / (self.total + self.training)


def step_time(plan: Any, hardware: Hardware, products: str, strides: Mapping[str, int]) -> StepTime:
    """Runs through the schedule of a plan with two clocks: that of the device, and one for each axis.

    An instruction takes ``FLOPs / rate + bytes / bandwidth + 10 µs``: products do not hide other loops over
    memory. A collective begins when it is issued and the one before it on its axis has ended; a wait that
    comes before its end exposes the rest. Where collectives are not hidden, the device takes part in them,
    and in the ranks' comparison before the step.

    Args:
        plan: of one rank.
        hardware: the machine.
        products: dtype of the products of matrices.
        strides: distance of neighbours by axis, in ranks.
    """
    costs: list[tuple[float, float, float]] = plan.costs()
    _, whole, most, mean = plan.work()
    rate, bandwidth = hardware.product_rate(products), hardware.bandwidth

    def duration(k: int, wanted: float) -> float:
        local, owned, moved = costs[k]
        # The rank whose plan it is may own more or less than the one that is asked for.
        own = owned * wanted / whole if whole else wanted / len(costs)
        return (local + own) / rate + moved / bandwidth + LAUNCH

    def busiest(k: int) -> float:
        # Devices that take turns on a processor leave their turns to the busiest one when they are done.
        return max(duration(k, most) / hardware.share, duration(k, mean))

    transfers = plan.transfers
    times = [_collective(transfer, hardware, strides) for transfer in transfers]
    now, exposed, compute, mean_compute = 0.0, 0.0, 0.0, 0.0
    free: dict[str, float] = {}
    ends: dict[int, float] = {}
    if not hardware.hides:
        # The ranks' comparison before the step, for which the host waits.
        now = exposed = _comparison(plan.transfers, hardware, strides)
    for code, k in plan.schedule:
        if code == 0:
            taken = busiest(k)
            now, compute = now + taken, compute + taken
            mean_compute += duration(k, mean)
        elif code == 1:
            axis = transfers[k]["axis"]
            ends[k] = free[axis] = max(now, free.get(axis, 0.0)) + times[k]
            if not hardware.hides:
                now, exposed = now + times[k], exposed + times[k]
        else:
            late = max(ends[k] - now, 0.0)
            now, exposed = now + late, exposed + late
    axes: dict[str, float] = {}
    for transfer, time in zip(transfers, times, strict=True):
        axes[transfer["axis"]] = axes.get(transfer["axis"], 0.0) + time
    return StepTime(
        hardware.name, now, compute, sum(times), exposed, mean_compute, axes, measured=hardware.measured
    )


def _collective(transfer: Mapping[str, Any], hardware: Hardware, strides: Mapping[str, int]) -> float:
    """Seconds of one transfer; none where it is only for projections that are due."""
    if transfer["when_due"] or transfer["kind"] == "nothing":
        return 0.0
    ranks: Sequence[int] = transfer["ranks"]
    stride = strides.get(transfer["axis"]) or (ranks[1] - ranks[0] if len(ranks) > 1 else 1)
    return hardware.collective(transfer["kind"], sent(transfer), len(ranks), max(stride, 1), transfer["axis"])


def _comparison(
    transfers: Sequence[Mapping[str, Any]], hardware: Hardware, strides: Mapping[str, int]
) -> float:
    """Seconds in which the ranks of all axes compare what they are about to do."""
    sizes = {transfer["axis"]: len(transfer["ranks"]) for transfer in transfers}
    return sum(
        hardware.collective("all_reduce", summed(COMPARED, ranks), ranks, strides.get(axis) or 1, axis)
        for axis, ranks in sizes.items()
    )


def training_time(hardware: Hardware, active: int, tokens: int, world: int, dtype: str) -> float:
    """Seconds of forward and backward passes: 6 FLOPs an element and token, at 40 % of the published rate."""
    rate = hardware.flops.get(dtype, hardware.flops["float32"]) * UTILIZATION
    return 6.0 * active * tokens / world / rate


def report(time: StepTime) -> str:
    """A table of times."""
    rows = [
        {"time": "optimizer step", "seconds": human(time.total)},
        {"time": "compute, busiest rank", "seconds": human(time.compute)},
        {"time": "compute, mean rank", "seconds": human(time.mean_compute)},
        {"time": "communication", "seconds": human(time.communication)},
        {"time": "communication that is exposed", "seconds": human(time.exposed)},
        *({"time": f"communication on {axis}", "seconds": human(value)} for axis, value in time.axes.items()),
    ]
    if time.share is not None and time.training is not None:
        rows.append({"time": "forward and backward", "seconds": human(time.training)})
        rows.append({"time": "share of a training step", "seconds": f"{100 * time.share:.2f} %"})
    basis = "from measured rates; the step was not run" if time.measured else "nothing was measured"
    return f"estimated for {time.hardware}; {basis}\n{Table(rows)}"


def human(seconds: float) -> str:
    """Seconds with a prefix."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds:.3g} s"
