"""Symmetric products by kernels and by the library, timed on a device."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from oxidion._cuda import device as core
from oxidion._cuda import tuning
from oxidion._gpu_check.place import place
from oxidion._oxidion import (
    load_sources,
    symmetric_classes,
    symmetric_product_on_device,
    turn_source_off,
)

ELEMENTS = 1 << 26
"""Most elements of a factor: 128 MiB."""
EMULATED_ELEMENTS = 1 << 16
"""The same where kernels are emulated, which takes a million times as long."""
LAUNCHES = 3


def run(number: str, names: Sequence[str]) -> list[float | None]:
    """Ratios of a device, in a process that uses no other kernels of products than those sources."""
    # A kernel that hangs may keep it from hearing anything else.
    signal.alarm(int(tuning.SECONDS) + 30)
    device = place(number)
    for name in tuning.SOURCES:
        if name not in names:
            turn_source_off(name, "it is not to be timed", device.index or 0)
    load_sources(device.index or 0, 0, list(names))
    return ratios(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of some launches, after one that does not count; the host waits once."""
    work()
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(LAUNCHES):
        work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / LAUNCHES


def ways(device: torch.device, rows: int, depth: int, count: int, adds: bool) -> tuple[float, float]:
    """Seconds of `A Aᵀ`, added to another matrix or not, in bfloat16: by the kernel, and by the library.

    The kernel's are infinite where there is none.
    """
    a = torch.randn(count, rows, depth, device=device, dtype=torch.bfloat16)
    out = torch.empty(count, rows, rows, device=device, dtype=torch.bfloat16)
    addend = torch.zeros_like(out) if adds else None
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    ours = partial(symmetric_product_on_device, device.index or 0, stream, out, a, addend)
    if not ours():
        return float("inf"), 0.0
    turned = a.transpose(-2, -1)
    theirs: Callable[[], Tensor] = (
        partial(torch.bmm, a, turned, out=out)
        if addend is None
        else partial(torch.baddbmm, addend, a, turned, out=out)
    )
    return seconds(ours, device), seconds(theirs, device)


def ratios(device: torch.device) -> list[float | None]:
    """Ratios by class of sizes: the library's time over the kernel's; None for what is too large.

    Many matrices of a size are timed by as many as fit: they fill the device as well.
    """
    core.compute_by("compare")
    most = EMULATED_ELEMENTS if core.is_emulated() else ELEMENTS
    found: list[float | None] = []
    known: dict[tuple[int, int, int, bool], float] = {}
    for rows, depth, count, adds in symmetric_classes():
        if rows * depth > most:
            found.append(None)
            continue
        fitting = min(count, most // (rows * depth))
        sizes = (rows, depth, fitting, adds)
        if sizes not in known:
            ours, theirs = ways(device, *sizes)
            known[sizes] = theirs / ours
        found.append(known[sizes])
    return found
