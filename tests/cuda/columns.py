"""Launches of the passes over the columns of thin matrices."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .emulator.library import Emulated
from .jobs import THREADS, TYPES, Rate

COLUMNS, ROWS, MOST_MATRICES = 32, 256, 128


class ColumnJob(ctypes.Structure):
    """Mirror of ``ColumnJob``."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("scaled", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        ("q_stride", ctypes.c_longlong),
        ("rows", ctypes.c_int),
        ("cols", ctypes.c_int),
        ("own", ctypes.c_int * 2),
        ("end", ctypes.c_uint),
        ("type", ctypes.c_ubyte * 3),
    )


class ColumnJobs(ctypes.Structure):
    """Mirror of ``ColumnJobs``."""

    _fields_ = (
        ("unit", Rate),
        ("epsilon", ctypes.c_double),
        ("factor", ctypes.c_double),
        ("count", ctypes.c_int),
        ("job", ColumnJob * MOST_MATRICES),
    )


@dataclass
class Matrix:
    """A matrix with what a pass reads and writes; ``q`` has the columns from ``first`` on."""

    x: Tensor
    sums: Tensor
    scaled: Tensor | None = None
    q: Tensor | None = None
    first: int = 0


def parts(matrix: Matrix) -> int:
    """Blocks that take a part of the rows and columns each."""
    rows, cols = matrix.x.shape
    return -(-rows // ROWS) * -(-cols // COLUMNS)


def launch(
    kernels: Emulated,
    name: str,
    matrices: Sequence[Matrix],
    partial: Sequence[Tensor] = (),
    *,
    epsilon: float = 0.0,
    factor: float = 1.0,
    unit: Tensor | None = None,
    seed: int = 0,
) -> None:
    """Runs one pass over all matrices."""
    jobs, end = ColumnJobs(Rate.of(unit), epsilon, factor, len(matrices)), 0
    for number, (job, matrix) in enumerate(zip(jobs.job, matrices, strict=False)):
        x, scaled, q = matrix.x, matrix.scaled, matrix.q
        job.rows, job.cols = x.shape
        job.x, job.sums = x.data_ptr(), matrix.sums.data_ptr()
        job.partial = partial[number].data_ptr() if partial else None
        job.scaled = None if scaled is None else scaled.data_ptr()
        types = [TYPES[t.dtype] for t in (x, x if scaled is None else scaled, x if q is None else q)]
        job.type = (ctypes.c_ubyte * 3)(*types)
        if q is not None:
            job.q, job.q_stride = q.data_ptr(), q.stride(0)
            job.own = (ctypes.c_int * 2)(matrix.first, matrix.first + q.shape[1])
        end += -(-x.shape[1] // THREADS) if name == "column_totals" else parts(matrix)
        job.end = end
    kernels.launch(name, jobs, blocks=end, threads=THREADS, shared_bytes=0, readable=[], seed=seed)


def sum_squares(
    kernels: Emulated, form: str, matrices: Sequence[Matrix], factor: float = 1.0, seed: int = 0
) -> None:
    """Both kernels that make the sums of columns."""
    # Room behind for what a faulty kernel writes.
    pieces = [-(-len(matrix.x) // ROWS) + 16 for matrix in matrices]
    partial = [
        torch.full((count, matrix.x.shape[1]), float("nan"), dtype=torch.float64)
        for count, matrix in zip(pieces, matrices, strict=True)
    ]
    launch(kernels, f"column_squares_{form}", matrices, partial, factor=factor, seed=seed)
    launch(kernels, "column_totals", matrices, partial, seed=seed)
