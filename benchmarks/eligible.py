"""Which contenders a race does without: what is not installed, and what would take for ever."""

from __future__ import annotations

import functools
import statistics
import time

import torch

from contender import OURS, Contender
from contenders import NOT_INSTALLED
from floors import OPERATIONS
from workloads import MUON, RELATIVES, Workload

#: Seconds of a step beyond which a peer is left out where torch emulates bfloat16.
PATIENCE = 5.0
#: torch emulates bfloat16 where its products take this many times as long as those in float32.
EMULATED = 10.0
#: Side of the products that tell: 0.2 s in emulated bfloat16.
SIDE = 512


def reason(entry: Contender, version: str, workload: Workload) -> str:
    """Why a contender is not run on a workload on CPUs, empty where it is."""
    return absent(entry, version, workload) or emulated(entry, workload)


def absent(entry: Contender, version: str, workload: Workload) -> str:
    """The part of it that is the same on every device."""
    if missing(version):
        return version
    if len(workload.matrices) + len(workload.others) > entry.max_tensors:
        return f"not run: more than {entry.max_tensors} tensors"
    return ""


def missing(version: str) -> bool:
    """Whether the version of a source says that there is none."""
    return version == NOT_INSTALLED or version.startswith("import failed")


def emulated(entry: Contender, workload: Workload) -> str:
    """That a peer multiplies in bfloat16 where torch has no instructions for it, and what a step would take.

    The peers of these families bring their matrices to bfloat16; each product costs two operations for every
    one of the floor's, which counts symmetric ones half.
    """
    if entry.source == OURS or entry.family not in (MUON, *RELATIVES):
        return ""
    single, half = rate(torch.float32), rate(torch.bfloat16)
    seconds = 2 * sum(OPERATIONS[entry.family](shape) for shape in workload.matrices) / half
    if half * EMULATED > single or seconds < PATIENCE:
        return ""
    return (
        f"not run: torch multiplies bfloat16 at {half / 1e9:.1f} GFLOP/s here, "
        f"float32 at {single / 1e9:.0f}: a step would take {seconds:.0f} s or more"
    )


@functools.cache
def rate(dtype: torch.dtype) -> float:
    """Operations a second of torch's products of this type at the number of threads at the first call."""
    left, right = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(2))
    return 2 * SIDE**3 / seconds_of(functools.partial(torch.mm, left, right), 3)


def seconds_of(work: functools.partial[torch.Tensor], repeats: int) -> float:
    """Median wall time of a call, after one that is not counted."""
    work()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)
