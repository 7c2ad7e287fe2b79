"""The shortest time that a step can take on a machine of given rates: operations, then memory traffic.

benchmarks/results/performance.md has the operations and bytes of each family. Symmetric products count
half. Bytes are those of an element in float32 that no pass can do without: parameter read and written 8,
gradient read 4, each state read and written 8. A value that a norm or mean of the whole parameter has to
come before is read once more. The rates of this machine are measured here too, and tell which peers would
take for ever.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from contenders import OURS, Contender, absent
from harness import seconds_of
from workloads import RELATIVES, Shape, Workload

#: Bytes an element of a matrix.
BYTES: dict[str, float] = {
    **dict.fromkeys(("muon", "normuon"), 24),
    **dict.fromkeys(("dion2 1/4", "nordion2 1/4"), 20 + 12 / 4),
    **dict.fromkeys(("dion r=1/4", "dion r=1/16"), 32),
    **{"adamw": 28, "lion": 20, "lamb": 40, "adafactor": 24, "came": 32, "adamw 8-bit": 16},
    "galore r=128": 12,
}
#: Of the other parameters, where it is not AdamW's.
OTHERS = {"lion": 20, "lamb": 40, "adafactor": 32, "came": 36}
#: Bytes of an element of GaLore's moments, which are (r, n).
MOMENTS = 4
GALORE_RANK = 128
#: Seconds of a step beyond which a peer is left out where torch emulates bfloat16.
PATIENCE = 5.0
#: torch emulates bfloat16 where its products take this many times as long as those in float32.
EMULATED = 10.0
#: Sides of products: in `rate` (0.2 s in emulated bfloat16), in `rates`, and of an iteration, in the cache.
SMALL_SIDE, SIDE, OWN_SIDE = 512, 2048, 1024
ELEMENTS, REPEATS = 1 << 25, 7


def floor_seconds(workload: Workload, family: str, rates: dict[str, Any]) -> float | None:
    """Seconds of one step, None for a family without a formula. Vectors next to matrices are AdamW's."""
    if family not in BYTES:
        return None
    traffic = sum(BYTES[family] * math.prod(shape) for shape in workload.matrices)
    traffic += sum(OTHERS.get(family, BYTES["adamw"]) * math.prod(shape) for shape in workload.others)
    if family == "galore r=128":
        traffic += sum(MOMENTS * min(GALORE_RANK, *shape) * max(shape) for shape in workload.matrices)
    operations = sum(OPERATIONS[family](shape) for shape in workload.matrices if family in OPERATIONS)
    iterated = family in ("muon", "normuon", "dion2 1/4", "nordion2 1/4")
    rate = max(rates["float32"], rates["bfloat16"]) if iterated else rates["float32"]
    return operations / rate + traffic / float(rates["bytes"])


def _polynomial(shape: Shape) -> float:
    m, n = min(shape), max(shape)
    return min(15 * m * m * n + 5 * m**3, 9 * m * m * n + 11 * m**3)


def _dion(share: float) -> Callable[[Shape], float]:
    def operations(shape: Shape) -> float:
        m, n = min(shape), max(shape)
        rank = max(1, round(share * m))
        return 8 * m * n * rank + 2 * n * rank**2 + rank**3 / 3

    return operations


OPERATIONS: dict[str, Callable[[Shape], float]] = {
    "muon": _polynomial,
    "normuon": _polynomial,
    "dion2 1/4": lambda shape: _polynomial((math.ceil(min(shape) / 4), max(shape))),
    "nordion2 1/4": lambda shape: _polynomial((math.ceil(shape[0] / 4), shape[1])),
    "dion r=1/4": _dion(1 / 4),
    "dion r=1/16": _dion(1 / 16),
    "galore r=128": lambda shape: 4 * math.prod(shape) * min(GALORE_RANK, *shape),
}


@functools.cache
def rate(dtype: torch.dtype) -> float:
    """Operations a second of torch's products of this type at the number of threads at the first call."""
    left, right = (torch.randn(SMALL_SIDE, SMALL_SIDE).to(dtype) for _ in range(2))
    return 2 * SMALL_SIDE**3 / seconds_of(functools.partial(torch.mm, left, right), 3)


def rates(threads: int) -> dict[str, Any]:
    """Operations a second of products in float32 and bfloat16, bytes a second of `a + b -> c` in memory.

    Products are those of torch or of this package's iterations, whichever are faster.
    """
    from oxidion.functional import newton_schulz

    torch.set_num_threads(threads)
    found: dict[str, Any] = {"threads": threads}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        if rate(dtype) * EMULATED < rate(torch.float32):
            found[name] = rate(dtype)  # a larger product takes minutes
            continue
        left, right = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(2))
        out = torch.empty(SIDE, SIDE, dtype=dtype)
        multiply = functools.partial(torch.mm, left, right, out=out)
        iterate = functools.partial(newton_schulz, torch.randn(OWN_SIDE, OWN_SIDE).to(dtype), steps=5)
        own = OPERATIONS["muon"]((OWN_SIDE, OWN_SIDE)) / seconds_of(iterate, REPEATS)
        found[name] = max(2 * SIDE**3 / seconds_of(multiply, REPEATS), own)
    one, two = (torch.ones(ELEMENTS) for _ in range(2))
    add = functools.partial(torch.add, one, two, out=torch.zeros(ELEMENTS))
    return {**found, "bytes": 12 * ELEMENTS / seconds_of(add, REPEATS)}


def reason(entry: Contender, version: str, workload: Workload) -> str:
    """Reason for which a contender is not run on a workload on CPUs, empty where it is."""
    return absent(entry, version, workload) or emulated(entry, workload)


def emulated(entry: Contender, workload: Workload) -> str:
    """That a peer multiplies in bfloat16 where torch has no instructions for it, and the time of a step.

    The peers of these families bring their matrices to bfloat16; each product costs two operations for every
    one of the floor's, which counts symmetric ones half.
    """
    if entry.source == OURS or entry.family not in ("muon", *RELATIVES):
        return ""
    single, half = rate(torch.float32), rate(torch.bfloat16)
    seconds = 2 * sum(OPERATIONS[entry.family](shape) for shape in workload.matrices) / half
    if half * EMULATED > single or seconds < PATIENCE:
        return ""
    return (
        f"not run: torch multiplies bfloat16 at {half / 1e9:.1f} GFLOP/s here, "
        f"float32 at {single / 1e9:.0f}: a step would take {seconds:.0f} s or more"
    )
