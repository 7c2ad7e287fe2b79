"""Launches of kernels that work on rows or columns of many matrices at once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .emulator.library import Emulated
from .jobs import THREADS, TYPES, Rate

MOST, LONG, LINES_OF_A_TEAM, WARP = 128, 2048, 4, 32
GUARD = 8


class Chosen(ctypes.Structure):
    """Mirror of ``Chosen``."""

    _fields_ = (("numbers", ctypes.c_void_p), ("most", ctypes.c_int), ("first", ctypes.c_int))

    @classmethod
    def of(cls, numbers: Tensor | None, first: int = -1) -> Chosen:
        """All slices, or those with these numbers."""
        return cls() if numbers is None else cls(numbers.data_ptr(), numbers.numel(), first)


class SumOf(ctypes.Structure):
    """Mirror of ``SumOf``."""

    _fields_ = (("absolute", ctypes.c_int),)


class SumJob(ctypes.Structure):
    """Mirror of ``SumJob``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("matrix", "sums", "partial")),
        ("stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "cols")),
        ("end", ctypes.c_uint),
        ("type", ctypes.c_ubyte),
    )


class ChoiceOf(ctypes.Structure):
    """Mirror of ``ChoiceOf``."""

    _fields_ = (("wanted", ctypes.c_int),)


class ChoiceJob(ctypes.Structure):
    """Mirror of ``ChoiceJob``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scores", "chosen")),
        *((name, ctypes.c_int) for name in ("count", "room")),
        ("end", ctypes.c_uint),
    )


class SliceMove(ctypes.Structure):
    """Mirror of ``SliceMove``."""

    _fields_ = (
        ("unit", Rate),
        *((name, ctypes.c_double) for name in ("rate", "decay", "keep")),
        *((name, ctypes.c_int) for name in ("cautious", "columns", "give_back")),
    )


class SliceJob(ctypes.Structure):
    """Mirror of ``SliceJob``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("matrix", "update")),
        ("chosen", Chosen),
        *((name, ctypes.c_longlong) for name in ("stride", "update_stride")),
        *((name, ctypes.c_int) for name in ("rows", "cols", "update_rows", "update_cols")),
        ("end", ctypes.c_uint),
        *((name, ctypes.c_ubyte) for name in ("type", "update_type")),
    )


def type_of(x: Tensor) -> int:
    """The number of a tensor's type."""
    return TYPES[x.dtype]


def blocks_of(lines: int, length: int) -> int:
    """Number of blocks for ``lines`` lines of this length."""
    return -(-lines // (LINES_OF_A_TEAM * (1 if length >= LONG else THREADS // WARP)))


def launch(
    kernels: Emulated,
    kernel: str,
    head: ctypes.Structure,
    jobs: Sequence[tuple[ctypes.Structure, int]],
    seed: int = 0,
) -> None:
    """Launches a kernel on jobs, each with the number of its blocks."""
    kind = type(jobs[0][0])
    fields = (("head", type(head)), ("count", ctypes.c_int), ("job", kind * MOST))
    table = type("Lines", (ctypes.Structure,), {"_fields_": fields})()
    table.head, table.count, end = head, len(jobs), 0
    for at, (job, blocks) in enumerate(jobs):
        end += blocks
        job.end = end
        table.job[at] = job
    assert ctypes.sizeof(table) <= 32764
    kernels.launch(kernel, table, blocks=end, threads=THREADS, shared_bytes=0, readable=[], seed=seed)


def inside(values: Tensor, dtype: torch.dtype, shift: int = 0) -> tuple[Tensor, Tensor]:
    """A copy of a matrix with NaN around it, ``shift`` elements off the start of rows, and the whole."""
    rows, cols = values.shape
    whole = torch.full((rows + 2, cols + GUARD + shift), float("nan"), dtype=dtype)
    matrix = whole[1 : rows + 1, shift : shift + cols]
    return matrix.copy_(values), whole


def untouched(matrix: Tensor, whole: Tensor) -> bool:
    """Whether everything around a matrix is still NaN."""
    return int(whole.isnan().sum()) - int(matrix.isnan().sum()) == whole.numel() - matrix.numel()


class NormalScale(ctypes.Structure):
    """Mirror of ``NormalScale``."""

    _fields_ = (("factor", ctypes.c_float),)


class NormalJob(ctypes.Structure):
    """Mirror of ``NormalJob``."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("stream", ctypes.c_uint * 4),
        ("first", ctypes.c_ulonglong),
        ("count", ctypes.c_longlong),
        ("end", ctypes.c_uint),
        ("type", ctypes.c_ubyte),
    )
