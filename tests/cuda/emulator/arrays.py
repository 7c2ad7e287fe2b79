"""Arrays with guards around them: reading outside gives NaN, writing outside is seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GUARD = 256  # elements before and behind; keeps the alignment of the first matrix


@dataclass(frozen=True)
class Guarded:
    """Matrices [B, rows, cols] inside a larger array of NaN."""

    whole: Tensor
    matrices: Tensor

    @classmethod
    def empty(
        cls, batch: int, rows: int, cols: int, dtype: torch.dtype, *, row_stride: int, shift: int = 0
    ) -> Guarded:
        """Matrices of NaN. ``shift`` is the number of elements that the first one is off its alignment."""
        whole = torch.full((2 * GUARD + shift + batch * rows * row_stride,), float("nan"), dtype=dtype)
        strides = (rows * row_stride, row_stride, 1)
        return cls(whole, whole.as_strided((batch, rows, cols), strides, GUARD + shift))

    @classmethod
    def filled(cls, values: Tensor, dtype: torch.dtype, *, row_stride: int, shift: int = 0) -> Guarded:
        """A guarded copy of [B, rows, cols]."""
        batch, rows, cols = values.shape
        array = cls.empty(batch, rows, cols, dtype, row_stride=row_stride, shift=shift)
        array.matrices.copy_(values)
        return array

    def outside_is_untouched(self) -> bool:
        """Whether everything around the matrices is still NaN."""
        size, strides, start = self.matrices.shape, self.matrices.stride(), self.matrices.storage_offset()
        copy = self.whole.clone()
        copy.as_strided(size, strides, start).fill_(float("nan"))
        return bool(copy.isnan().all())
