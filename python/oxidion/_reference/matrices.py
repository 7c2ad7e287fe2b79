"""Parameters read as matrices, naively: views of the same memory, one for each matrix.

Used by the float64 references only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Group = Mapping[str, Any]


def split(group: Group, length: int) -> list[int] | None:
    """The sizes of the blocks that a dimension of ``length`` is cut into; None when it is not."""
    if group.get("split_sizes"):
        return [int(size) for size in group["split_sizes"]]
    heads = int(group.get("num_heads") or 1)
    return [length // heads] * heads if heads > 1 else None


def split_dim(group: Group) -> int:
    """The dimension that is cut into blocks."""
    return int(group.get("split_dim") or 0)


def interleaved(group: Group) -> int:
    """The number of matrices whose rows alternate."""
    return int(group.get("interleaved") or 1)


def is_split(group: Group) -> bool:
    """True where parameters are split into blocks."""
    heads = int(group.get("num_heads") or 1)
    return bool(group.get("split_sizes")) or heads > 1 or interleaved(group) > 1


def counts_interleaved(x: Tensor, group: Group) -> bool:
    """True where the dimension before the last counts matrices whose rows alternate."""
    return x.ndim > 2 and x.shape[-2] == interleaved(group) > 1


def stack(x: Tensor) -> list[Tensor]:
    """The matrices over the last two dimensions."""
    if x.ndim < 2:
        raise ValueError(f"a matrix is needed, got shape {tuple(x.shape)}")
    return [x] if x.ndim == 2 else [matrix for part in x for matrix in stack(part)]


def split_interleaved(x: Tensor, group: Group) -> list[Tensor]:
    """The matrices over the last two dimensions, cut into those whose rows alternate (``interleaved``)."""
    if counts_interleaved(x, group):
        return stack(x.transpose(-3, -2))
    count = interleaved(group)
    return [matrix[first::count] for matrix in stack(x) for first in range(count)]


def matrices(x: Tensor, group: Group) -> list[Tensor]:
    """The matrices that a group reads a tensor of the parameter's shape as.

    One ``[d0, rest]`` matrix (``flatten``), otherwise the matrices over the last two dimensions, those of
    every ``interleaved``-th row, cut into blocks of rows or columns (``split_sizes``, ``num_heads``,
    ``split_dim``).
    """
    if x.ndim < 2:
        raise ValueError(f"a matrix is needed, got shape {tuple(x.shape)}")
    if group.get("flatten", False) and x.ndim > 2:
        return [x.view(x.shape[0], math.prod(x.shape[1:]))]
    dim, parts = split_dim(group), split_interleaved(x, group)
    sizes = split(group, parts[0].shape[dim]) if parts else None
    return parts if sizes is None else [block for m in parts for block in torch.split(m, sizes, dim)]


def fans(matrix: Tensor, group: Group) -> tuple[int, int]:
    """Outputs and inputs of one of `matrices`: rows and columns, or columns and rows."""
    rows, cols = matrix.shape
    return (cols, rows) if group.get("fan_in_fan_out", False) else (rows, cols)


def neurons(v: Tensor, group: Group) -> list[Tensor]:
    """The part of a state ``[..., rows, 1]`` that belongs to each of `matrices`.

    With blocks of columns, each has a column of its own.
    """
    if group.get("flatten", False):
        return [v]
    parts, by_column = split_interleaved(v, group), split_dim(group) == 1
    sizes = split(group, parts[0].shape[0]) if parts else None
    if sizes is None:
        return parts
    cut = (1, 1) if by_column else (sizes, 0)
    return [block for m in parts for block in torch.split(m, *cut)]


def bases(q: Tensor, group: Group, shapes: Sequence[tuple[int, int]], transposed: bool) -> list[Tensor]:
    """The part of Dion's Q that belongs to each of `matrices`, as wide as Q is.

    Blocks that cut the short side share the rows of one matrix, others have a matrix each.
    """
    if is_split(group):
        if (split_dim(group) == 0) == transposed:
            parts = split_interleaved(q, group)
            per_matrix = len(shapes) // len(parts)
            sizes = [rows if transposed else cols for rows, cols in shapes[:per_matrix]]
            return [block for m in parts for block in torch.split(m, sizes, dim=0)]
        return stack(q)
    return [q.view(math.prod(q.shape[:-1]), q.shape[-1])] if group.get("flatten", False) else stack(q)
