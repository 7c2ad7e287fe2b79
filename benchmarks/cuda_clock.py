"""Times work on a device, and the rates that bound it there."""

from __future__ import annotations

import math
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
    return min(clock.sample(lambda: (work(), None)[1])[which] for _ in range(10))


def ceilings(clock: Clock, *, small: bool) -> dict[str, float]:
    """Rates that bound a step: products of matrices, a copy, the host's time for a launch."""
    side, elements = (256, 1 << 16) if small else (8192, 1 << 28)
    return {
        "bfloat16_tflops": tflops(clock, side, torch.bfloat16),
        "float32_tflops": tflops(clock, side, torch.float32),
        "copy_gb_per_s": copy_rate(clock, elements),
        "launch_us": launch_us(clock),
    }


def rates_of(found: dict[str, float]) -> dict[str, float]:
    """Returns them as `floors.floor_seconds` takes them: operations and bytes a second, NaN if unknown."""
    return {
        "bfloat16": found.get("bfloat16_tflops", math.nan) * 1e12,
        "float32": found.get("float32_tflops", math.nan) * 1e12,
        "bytes": found.get("copy_gb_per_s", math.nan) * GIGA,
    }
