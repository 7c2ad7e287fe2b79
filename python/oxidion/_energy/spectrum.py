"""Squares of singular values of a parameter's matrices, and what a rank captures of them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

LARGEST = 16384
"""Short side of the largest matrix that is decomposed: its Gram matrix in float64 has 2 GiB."""
ROUNDING = 1e-12
"""Part of the energy that the decomposition may miss."""
AT_ONCE = 1 << 22
"""Elements that are converted to float64 at a time."""


@dataclass(frozen=True)
class Spectrum:
    """Shares of the energy of a parameter, the sum of all squares, that the largest singular values hold.

    Attributes:
        captured: for each short side among the matrices, the sums of the squares of the 1, 2, ... largest
            singular values of each, added up over the matrices, as shares of the energy of the parameter.
    """

    captured: Mapping[int, Tensor]

    def energy(self, fraction: Fraction) -> float:
        """The share that rank ⌈fraction · short side⌉ captures in every matrix."""
        return math.fsum(
            float(sums[min(side, max(1, math.ceil(fraction * side))) - 1])
            for side, sums in self.captured.items()
        )

    def needed(self, energy: float) -> Fraction:
        """The smallest rank fraction that captures at least this share, but for `ROUNDING`."""
        steps = sorted({Fraction(rank, side) for side in self.captured for rank in range(1, side + 1)})
        at = bisect_left(steps, energy - ROUNDING, key=self.energy)
        return steps[min(at, len(steps) - 1)]


def spectrum(tensor: Tensor, settings: Mapping[str, Any]) -> Spectrum | str:
    """Decomposes the matrices that a group reads a tensor as.

    The eigenvalues of the Gram matrix of the short side, in float64, are the squares; their shares are exact
    to about 1e-12.

    Args:
        tensor: of two or more dimensions.
        settings: of the group: ``flatten``, ``interleaved``, ``num_heads``, ``split_sizes`` and
            ``split_dim``.

    Returns:
        The spectrum, or the reason why there is none.

    Raises:
        ValueError: for settings that do not fit the tensor.
    """
    if not tensor.numel():
        return "empty"
    if tensor.element_size() < 2:
        tensor = tensor.float()  # what float8 has no arithmetic for
    stacks = matrices(tensor, settings)
    side = max(min(stack.shape[-2:]) for stack in stacks)
    if side > LARGEST:
        return f"a short side of more than {LARGEST}"
    largest = float(tensor.abs().amax())
    if not math.isfinite(largest):
        return "not finite"
    if largest == 0.0:
        return "zero"
    squares: dict[int, Tensor] = {}
    for stack in stacks:
        for matrix in torch.split(stack, max(1, AT_ONCE // (stack.shape[-2] * stack.shape[-1]))):
            found = torch.linalg.eigvalsh(_gram(matrix, largest)).clamp_(min=0.0).flip(-1).sum(0)
            before = squares.get(len(found))
            squares[len(found)] = found if before is None else before + found
    total = sum(float(each.sum()) for each in squares.values())
    return Spectrum({side: each.cumsum(0) / total for side, each in squares.items()})


def _gram(stack: Tensor, largest: float) -> Tensor:
    """Products of the short sides in float64 of matrices ``[count, rows, columns]``, scaled."""
    if stack.shape[-2] > stack.shape[-1]:
        stack = stack.mT
    rows = stack.shape[-2]
    made = torch.zeros(len(stack), rows, rows, dtype=torch.float64)
    for part in torch.split(stack, max(1, AT_ONCE // (len(stack) * rows)), dim=-1):
        wide = part.double() / largest
        made.baddbmm_(wide, wide.mT)
    return made


def matrices(tensor: Tensor, settings: Mapping[str, Any]) -> list[Tensor]:
    """Stacks ``[count, rows, columns]`` of the matrices that a group reads a tensor as.

    Raises:
        ValueError: for settings that do not fit the tensor.
    """
    if settings.get("flatten") is True and tensor.ndim > 2:
        return [tensor.reshape(1, tensor.shape[0], -1)]
    stack = _split_interleaved(tensor, settings.get("interleaved") or 1)
    heads, sizes = settings.get("num_heads") or 1, settings.get("split_sizes")
    dim = settings.get("split_dim") or 0
    if dim not in (0, 1):
        raise ValueError(f"split_dim must be 0 or 1, got {dim!r}")
    length = stack.shape[dim + 1]
    if not sizes:
        if type(heads) is not int or heads < 1 or length % heads:
            raise ValueError(f"num_heads={heads!r} does not divide {length} of {tuple(tensor.shape)}")
        sizes = [length // heads] * heads
    if (
        not isinstance(sizes, (list, tuple))
        or not all(type(n) is int and n > 0 for n in sizes)
        or sum(sizes) != length
    ):
        raise ValueError(f"split_sizes={sizes!r} does not split {length} of {tuple(tensor.shape)}")
    return list(torch.split(stack, list(sizes), dim=dim + 1))


def _split_interleaved(tensor: Tensor, count: Any) -> Tensor:
    """Returns the ``count`` matrices whose rows alternate, stacked: ``[matrices, rows, columns]``.

    Raises:
        ValueError: for a count that does not divide the rows.
    """
    rows, cols = tensor.shape[-2:]
    if tensor.ndim > 2 and rows == count > 1:
        return tensor.transpose(-3, -2).reshape(-1, tensor.shape[-3], cols)
    if type(count) is not int or count < 1 or rows % count:
        raise ValueError(f"interleaved={count!r} does not divide {rows} rows of {tuple(tensor.shape)}")
    return tensor.reshape(-1, rows // count, count, cols).transpose(1, 2).reshape(-1, rows // count, cols)
