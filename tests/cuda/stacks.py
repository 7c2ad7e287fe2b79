"""Launches of passes over stacks of matrices, their sums, and what the passes do, in float64."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .emulator.library import Emulated
from .jobs import THREADS, TYPES, Scalars

DOWN, VECTOR, MOST = 16, 4, {"few": 16, "many": 177, "wide": 16}


class Moments(ctypes.Structure):
    """Mirror of ``Moments``."""

    _fields_ = (("row", ctypes.c_void_p), ("col", ctypes.c_void_p), ("all", ctypes.c_void_p))


class StackJob(ctypes.Structure):
    """Mirror of ``StackJob``."""

    _fields_ = (
        ("operand", ctypes.c_void_p * 3),
        ("moments", Moments * 2),
        ("live", ctypes.c_void_p),
        ("partial", ctypes.c_void_p * 3),
        ("sums", ctypes.c_void_p * 4),
        ("stack", ctypes.c_longlong),
        ("rows", ctypes.c_longlong),
        ("cols", ctypes.c_longlong),
        ("ends", ctypes.c_uint * 3),
        ("type", ctypes.c_ubyte * 3),
        ("moments_type", ctypes.c_ubyte * 2),
        ("lanes", ctypes.c_ubyte),
    )


@dataclass
class Stack:
    """Operands ``[stack, rows, cols]``, second moments (R, C, S or C), live factors, sums if wanted."""

    operands: list[Tensor]
    moments: list[tuple[Tensor | None, Tensor, Tensor | None]] = field(default_factory=list)
    live: Tensor | None = None
    summed: bool = False

    def __post_init__(self) -> None:
        stack, rows, cols = self.operands[0].shape
        shapes = ((stack, rows), (stack, cols), (stack,), (1,))
        self.sums = [torch.full(shape, float("nan"), dtype=torch.float64) for shape in shapes]
        if not self.summed:
            self.sums[:3] = [torch.empty(0, dtype=torch.float64)] * 3


def launch(
    rows: Emulated, totals: Emulated, name: str, form: str, jobs: Sequence[Stack], scalars: Sequence[float]
) -> None:
    """Runs a pass over all stacks, and what adds up its sums."""
    fields = (("scalars", Scalars), ("count", ctypes.c_int), ("job", StackJob * MOST[form]))
    made = type("Stacks", (ctypes.Structure,), {"_fields_": fields})()
    assert ctypes.sizeof(made) <= 32764
    made.scalars.value[: len(scalars)] = scalars
    made.count, ends, kept = len(jobs), [0, 0, 0], []
    for job, what in zip(made.job, jobs, strict=False):
        stack, height, width = what.operands[0].shape
        for n, operand in enumerate(what.operands):
            job.operand[n], job.type[n] = operand.data_ptr(), TYPES[operand.dtype]
        for s, (row, col, all_) in enumerate(what.moments):
            addresses = [None if x is None else x.data_ptr() for x in (row, col, all_)]
            job.moments[s], job.moments_type[s] = Moments(*addresses), TYPES[col.dtype]
        job.live = None if what.live is None else what.live.data_ptr()
        lanes = next((lanes for lanes in (8, 16) if lanes * VECTOR >= width), 32)
        down, across = -(-height // (DOWN * THREADS // lanes)), -(-width // (VECTOR * lanes))
        job.stack, job.rows, job.cols, job.lanes = stack, height, width, lanes
        tiles = stack * down * across
        sizes = (stack * across * height, stack * down * width, 2 * tiles)
        for n, size in enumerate(sizes):
            if what.summed or n == 2:
                kept.append(torch.full((size,), float("nan"), dtype=torch.float64))
                job.partial[n] = kept[-1].data_ptr()
        for n, sums in enumerate(what.sums):
            job.sums[n] = sums.data_ptr() if len(sums) else None
        strips = -(-stack * (height + width) // THREADS) if what.summed else 0
        blocks = (tiles, strips, 1 + (stack if what.summed else 0))
        ends = [end + own for end, own in zip(ends, blocks, strict=True)]
        job.ends = (ctypes.c_uint * 3)(*ends)
    size = "many" if form == "many" else "few"
    kernels = ((rows, f"{name}_{form}"), (totals, f"add_strips_{size}"), (totals, f"add_tiles_{size}"))
    for (source, kernel), blocks in zip(kernels, ends, strict=True):
        if blocks:
            source.launch(kernel, made, blocks=blocks, threads=THREADS, shared_bytes=0, readable=[])


def scale(moments: tuple[Tensor | None, Tensor, Tensor | None], shape: torch.Size) -> Tensor:
    """1 / sqrt(V) of every element."""
    row, col, all_ = (None if x is None else x.double() for x in moments)
    assert col is not None
    if row is None or all_ is None:
        return col.rsqrt().expand(shape)
    return row.rsqrt()[:, :, None] * col.rsqrt()[:, None, :] * all_.sqrt()[:, None, None]
