"""Times work on a device, and the rates that bound it there."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

GIGA = 1e9
Work = Callable[[], None]


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


def ceilings(clock: Clock, *, small: bool) -> dict[str, float]:
    """Rates that bound a step: products of matrices, a copy, the host's time for a launch."""
    side, elements, device = (256, 1 << 16, clock.device) if small else (8192, 1 << 28, clock.device)
    wide = torch.randn(side, side, device=device)
    half = wide.bfloat16()
    source = torch.empty(elements, device=device)
    target, one = torch.empty_like(source), torch.zeros(1, device=device)

    def best(work: Callable[[], object], which: int) -> float:
        return min(clock.sample(lambda: (work(), None)[1])[which] for _ in range(10))

    return {
        "bfloat16_tflops": 2 * side**3 / best(lambda: torch.mm(half, half), 0) / 1e12,
        "float32_tflops": 2 * side**3 / best(lambda: torch.mm(wide, wide), 0) / 1e12,
        "copy_gb_per_s": 8 * elements / best(lambda: target.copy_(source), 0) / GIGA,
        "launch_us": best(lambda: one.add_(1), 1) * 1e6,
    }


def rates_of(found: dict[str, float]) -> dict[str, float]:
    """The same as `floors.floor_seconds` takes them: operations and bytes a second."""
    return {
        "bfloat16": found["bfloat16_tflops"] * 1e12,
        "float32": found["float32_tflops"] * 1e12,
        "bytes": found["copy_gb_per_s"] * GIGA,
    }
