"""Symmetric products ``X X^T`` of bfloat16 matrices: our kernels against cuBLAS and microsoft/dion's.

Rates count the operations of the whole product, 2 m² n for each matrix, also where one triangle is computed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contender import OURS
from cuda_child import LEFT_OUT, Item, Refused, Row
from cuda_clock import Clock
from cuda_kernels import GROUPS, MMA, SymmetricKernels, is_product, packed
from cuda_race import EMULATED, Place, merge
from eligible import missing

Size = tuple[int, int, int]
#: Matrices, rows and columns of each. The first two decide whether the kernel by warpgroups is kept.
SHAPES: tuple[Size, ...] = (
    *((4, 4096, 4096), (32, 2048, 2048), (48, 768, 768), (24, 768, 3072), (1, 2048, 2048)),
    *((8, 1024, 4096), (1, 4096, 4096), (1, 4096, 11008), (1, 8192, 8192)),
)
SMALL: tuple[Size, ...] = ((2, 96, 160),)
#: A sample repeats the product for so long, so that the ends of a launch do not count.
SAMPLE_SECONDS = 2e-3
MOST_REPEATS = 200
PEER = "microsoft/dion"
CUBLAS = "torch (cuBLAS)"

Multiply = Callable[[Tensor, Tensor], object]


def cublas(x: Tensor, out: Tensor) -> Tensor:
    """By ``torch.mm`` or ``torch.bmm``."""
    if len(x) == 1:
        torch.mm(x[0], x[0].mT, out=out[0])
        return out
    return torch.bmm(x, x.mT, out=out)


@functools.cache
def _kernels(word: str, folder: Path | None) -> SymmetricKernels:
    stream = 0 if word == EMULATED else int(torch.cuda.current_stream().cuda_stream)
    return SymmetricKernels(stream, packed(folder) if folder else None)


def _multiplier(name: str, place: Place, folder: Path | None) -> Multiply:
    """The function of a contender.

    Raises:
        Refused: where there is none.
    """
    if name == CUBLAS:
        return cublas
    if place.word == "cpu":
        raise Refused("needs a CUDA device")
    if name.startswith(OURS):
        return partial(_kernels(place.word, folder).multiply, name.removeprefix(f"{OURS} "))
    if place.word == EMULATED or missing(place.versions.get(PEER, "")):
        raise Refused(place.versions.get(PEER, "needs a CUDA device"))
    line = importlib.import_module("dion.newton_schulz_triton").ns_line_1
    return lambda x, out: line(x, out=out)


def names(folder: Path | None, *, peers: bool) -> dict[str, str]:
    """Contenders with their sources; of ours all that have machine code in the folder, where one is given."""
    ours = list(packed(folder)) if folder else [MMA[0], GROUPS[0]]
    theirs = {"dion ns_line_1": PEER} if peers else {}
    return {CUBLAS: "torch", **{f"{OURS} {name}": OURS for name in ours}, **theirs}


def measured(shape: Size, name: str, samples: int, place: Place, folder: Path | None) -> Row:
    """Seconds of a product of a size, after a look at what is computed."""
    batch, size, depth = shape
    clock, multiply = place.clock, _multiplier(name, place, folder)
    generator = torch.Generator(clock.device).manual_seed(0)
    one = torch.randn(1, size, depth, generator=generator, device=clock.device).bfloat16()
    x = one.repeat(batch, 1, 1)
    out = torch.zeros(batch, size, size, dtype=torch.bfloat16, device=clock.device)
    multiply(x, out)
    clock.synchronize()
    # A library may cut the sums of each tile in another way.
    if not is_product(x[:1], out[:1], is_symmetric=name.startswith(OURS)) or not _are_alike(out):
        return {"status": "wrong result"}
    repeats = _repeats(clock, lambda: (multiply(x, out), None)[1])
    work = partial(_repeat, multiply, x, out, repeats)
    return {"repeats": repeats, "seconds": [clock.sample(work)[0] / repeats for _ in range(samples)]}


def _are_alike(out: Tensor) -> bool:
    """Whether all matrices are the first one within the rounding of bfloat16."""
    return bool((out - out[:1]).abs().max() <= out[:1].abs().max() * 2.0**-7)


def _repeat(multiply: Multiply, x: Tensor, out: Tensor, repeats: int) -> None:
    for _ in range(repeats):
        multiply(x, out)


def _repeats(clock: Clock, work: Callable[[], None]) -> int:
    seconds = min(clock.sample(work)[0] for _ in range(3))
    return max(1, min(MOST_REPEATS, round(SAMPLE_SECONDS / max(seconds, 1e-9))))


def items(
    races: list[dict[str, Any]],
    shapes: Sequence[Size],
    samples: int,
    place: Place,
    *,
    peers: bool,
    folder: Path | None = None,
) -> list[Item]:
    """Measurements of all contenders size by size; cuBLAS is timed before and after the others."""
    made = []
    for shape in shapes:
        batch, size, depth = shape
        race: dict[str, Any] = {"shape": list(shape), "flops": 2.0 * batch * size * size * depth}
        rows: dict[str, Row] = {}
        race["contenders"] = rows
        races.append(race)
        sources = names(folder, peers=peers)
        for name in (*sources, CUBLAS):
            row = rows.setdefault(name, {"source": sources[name], "status": f"{LEFT_OUT}: not reached"})
            count = samples // 2 if name == CUBLAS else samples
            work = partial(measured, shape, name, count, place, folder)
            keep = partial(merge, row)
            made.append(Item("products", name, work, keep, cost=race["flops"]))
    return made
