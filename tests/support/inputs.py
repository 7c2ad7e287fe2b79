"""Reproducible parameters and gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Shape = tuple[int, ...]


def generator_of(*seed: int) -> torch.Generator:
    """A private generator whose stream depends on every number given."""
    mixed = 0
    for number in seed:
        mixed = (mixed * 1_000_003 + number + 1) % (2**63 - 1)
    return torch.Generator().manual_seed(mixed)


def gaussian(shape: Sequence[int], *seed: int, scale: float = 1.0) -> Tensor:
    """Normal float64 tensor."""
    return scale * torch.randn(tuple(shape), generator=generator_of(*seed), dtype=torch.float64)


def with_singular_values(shape: Sequence[int], values: Tensor, *seed: int) -> Tensor:
    """Random float64 matrices [..., m, n] with the given singular values; those not given are zero."""
    *batch, m, n = shape
    k = values.numel()
    left = torch.linalg.qr(gaussian((*batch, m, k), *seed, 1))[0]
    right = torch.linalg.qr(gaussian((*batch, n, k), *seed, 2))[0]
    return (left * values.double()) @ right.mT


def well_conditioned(shape: Sequence[int], *seed: int, flatten: bool = False) -> Tensor:
    """Random float64 tensor whose matrices have singular values of 1 to 2.

    Matrices are the last two dimensions, or with ``flatten`` the one of [d0, rest]. Vectors are normal.
    """
    shape = tuple(shape)
    if len(shape) < 2 or 0 in shape:
        return gaussian(shape, *seed)
    view = (shape[0], math.prod(shape[1:])) if flatten else shape
    values = torch.linspace(1.0, 2.0, min(view[-2:]))
    return with_singular_values(view, values, *seed).reshape(shape)


def gradients(shapes: Sequence[Shape], steps: int, seed: int, *, flatten: bool = False) -> list[list[Tensor]]:
    """Float64 gradients [step][parameter] that shrink by 0.4 from step to step.

    Matrices get a fixed well-conditioned tensor plus a tenth of noise, vectors a new normal one at each step.
    """

    def draw(step: int, index: int, shape: Shape) -> Tensor:
        noise = gaussian(shape, seed, step, index)
        if len(shape) >= 2:
            noise = base[index] + noise * 0.1 / math.sqrt(shape[0] or 1)
        return 0.4**step * noise

    base = [well_conditioned(shape, seed, index, flatten=flatten) for index, shape in enumerate(shapes)]
    return [[draw(step, index, shape) for index, shape in enumerate(shapes)] for step in range(steps)]
