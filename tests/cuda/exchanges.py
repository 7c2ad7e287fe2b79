"""Launches of the kernels that pack and unpack messages."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .jobs import TYPES

THREADS, PIECE = 256, 4096
MOST = {"few": 32, "many": 682}


@dataclass(frozen=True)
class Copy:
    """Rows and columns to copy, and where: first elements and distances of the rows within two tensors."""

    source: Tensor
    target: Tensor
    rows: int
    cols: int
    start: int = 0
    to_start: int = 0
    stride: int = 0
    to_stride: int = 0

    def areas(self) -> tuple[Tensor, Tensor]:
        """Source and target as matrices."""
        shape = (self.rows, self.cols)
        return (
            self.source.as_strided(shape, (self.stride or self.cols, 1), self.start),
            self.target.as_strided(shape, (self.to_stride or self.cols, 1), self.to_start),
        )


class Rectangle(ctypes.Structure):
    """Mirror of ``Rectangle``."""

    _fields_ = (
        ("from_", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
        ("from_step", ctypes.c_longlong),
        ("to_step", ctypes.c_longlong),
        ("rows", ctypes.c_uint),
        ("units", ctypes.c_uint),
        ("end", ctypes.c_uint),
        ("width", ctypes.c_uint),
    )


class Messages(ctypes.Structure):
    """Mirror of ``Messages``."""

    _fields_ = (
        ("first", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
        ("pitch", ctypes.c_longlong),
        ("length", ctypes.c_longlong),
        ("factor", ctypes.c_double),
        ("count", ctypes.c_int),
        ("from_type", ctypes.c_ubyte),
        ("to_type", ctypes.c_ubyte),
    )


def width_of(number: int) -> int:
    """The widest unit that a number of bytes is a multiple of."""
    return min(16, number & -number) if number else 16


def _rectangles(copy: Copy) -> list[Rectangle]:
    """As ``exchange.rs`` makes them."""
    source, target = copy.areas()
    each = source.element_size()
    rows, cols = source.shape
    if source.stride(0) == cols == target.stride(0):
        rows, cols = 1, rows * cols
    steps = [source.stride(0) * each, target.stride(0) * each] if rows > 1 else [0, 0]
    first, to = source.data_ptr(), target.data_ptr()
    width, row = width_of(first | to | steps[0] | steps[1]), cols * each
    whole, made = row // width * width, []
    for start, length in ((0, whole), (whole, row - whole)):
        if length:
            own = min(width, width_of(length))
            made.append(Rectangle(first + start, to + start, *steps, rows, length // own, 0, own))
    return made


def table(most: int, copies: Sequence[Copy]) -> tuple[ctypes.Structure, int]:
    """The parameter of a launch, and its blocks."""
    fields = (("count", ctypes.c_int), ("each", Rectangle * most))
    made = type("Rectangles", (ctypes.Structure,), {"_fields_": fields})()
    all_of_them = [rectangle for copy in copies for rectangle in _rectangles(copy)]
    made.count, end = len(all_of_them), 0
    for number, rectangle in enumerate(all_of_them):
        end += -(-rectangle.rows * rectangle.units // PIECE)
        rectangle.end = end
        made.each[number] = rectangle
    return made, end


def messages(whole: Tensor, pitch: int, count: int, factor: float, to: Tensor) -> tuple[Messages, int]:
    """The parameter of a sum, and its blocks."""
    kinds = TYPES[whole.dtype], TYPES[to.dtype]
    made = Messages(whole.data_ptr(), to.data_ptr(), pitch, len(to), factor, count, *kinds)
    return made, -(-len(to) // PIECE)
