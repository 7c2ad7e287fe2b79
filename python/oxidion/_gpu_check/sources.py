"""Sources of kernels compared with libtorch on a device, one after the other: the child of the self-check."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from oxidion._cuda import self_check
from oxidion._cuda.self_check import GROUPS, MARK, SOURCES, Verdict
from oxidion._gpu_check import parts
from oxidion._gpu_check.place import place
from oxidion._oxidion import hide_sources, load_sources, turn_source_off

WITH = {
    "sums.cu": ("totals.cu",),
    "totals.cu": ("sums.cu",),
    "factors.cu": ("totals.cu",),
    "rows.cu": ("totals.cu",),
    "quantized.cu": ("updates.cu",),
    "quantized_sums.cu": ("sums.cu", "totals.cu"),
    "gram.cu": ("cholesky.cu",),
    "cholesky.cu": ("gram.cu",),
    "symmetric_wgmma.cu": ("symmetric_mma.cu",),
}
"""Sources without which another one is never launched."""

WARM = 16
"""Rows of the matrices by which libraries are loaded."""


def settings_of(source: str) -> list[str]:
    """Names of the settings whose steps launch kernels of a source."""
    return [name for name in parts.KERNELS if source in name.split()]


def checked(source: str, device: torch.device) -> Verdict:
    """The verdict on a source: the largest difference of all settings, and the first that is too large."""
    started, worst, reason = time.monotonic(), 0.0, ""
    for name in settings_of(source):
        off, wrong = parts.compared(name, device, "compare")
        worst, reason = max(worst, off), reason or (wrong and f"{name.split()[-1]}: {wrong}")
    seconds = round(time.monotonic() - started, 3)
    return Verdict("fail" if reason else "pass", reason, worst, seconds)


def warm_up(device: torch.device) -> None:
    """Calls once what comparisons ask of libtorch: loading cuBLAS and cuSOLVER takes seconds on a device.

    One that fails is left to the comparisons, which know the source that they are about.
    """
    ways: list[Callable[[Tensor], object]] = [
        lambda a: torch.linalg.qr(a, "r"),
        *(torch.linalg.qr, torch.linalg.cholesky_ex, torch.linalg.eigh),
        lambda a: torch.linalg.solve_triangular(a, a, upper=True),
        lambda a: torch.linalg.svd(a, full_matrices=False),
    ]
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        one = torch.eye(WARM, dtype=dtype, device=device)
        many = one.expand(2, WARM, WARM).clone()
        works: list[Callable[[], object]] = [
            partial(torch.mm, one, one),
            partial(torch.bmm, many, many),
            partial(torch.addmm, one, one, one),
            partial(torch.baddbmm, many, many, many),
        ]
        if dtype in (torch.float32, torch.float64):  # decompositions have no form in 16 bits
            works += [partial(way, a) for way in ways for a in (one, many)]
        for work in works:
            with suppress(RuntimeError):
                work()
    if device.type == "cuda":
        with suppress(RuntimeError):
            torch.cuda.synchronize(device)


def say(**facts: Any) -> None:
    """Says a line to the parent."""
    sys.stdout.write(MARK + json.dumps(facts) + "\n")
    sys.stdout.flush()


def run(number: str, names: Sequence[str], proven: Sequence[str]) -> None:
    """Checks sources in a process that uses no others than those and what is proven.

    Says "begin" before each and its verdict after it: who listens knows where it ended. After an error of the
    device, which nothing can be done on any more, it ends.
    """
    # A kernel that hangs may keep it from hearing anything else.
    signal.alarm(int(self_check.STARTING + self_check.in_all()) + 30)
    device = place(number)
    ordinal = device.index or 0
    usable = [name for name in SOURCES if name in {*names, *proven}]
    for name in SOURCES:
        if name not in usable:
            turn_source_off(name, "it is not to be checked", ordinal)
    load_sources(ordinal, 0, [name for name in usable if name != GROUPS[0]])
    passed = set(proven)
    warm_up(device)
    say(ready=True)  # time is taken from here on
    for name in names:
        shown = {name, *passed, *WITH.get(name, ())}
        hide_sources(ordinal, [other for other in usable if other not in shown])
        if name == GROUPS[0]:  # not before: it takes products from the one that is checked without it
            load_sources(ordinal, 0, [name])
        say(begin=name)
        try:
            verdict = checked(name, device)
        except Exception as error:  # whatever it is says something about the source
            result = "unknown" if isinstance(error, torch.OutOfMemoryError) else "fail"
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            say(source=name, **asdict(Verdict(result, reason, float("inf"))))
            os._exit(1)
        if verdict.result == "fail":
            turn_source_off(name, verdict.reason, ordinal)
        else:
            passed.add(name)
        say(source=name, **asdict(verdict))
