"""Random choices of a case: the same seed, target and number make the same ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from support.inputs import Shape, gaussian, well_conditioned

TINY, HUGE = 1e-120, 1e120
"""Scales in float64 whose squares are neither zero nor infinite."""

CONTENTS = ("ordinary", "scaled", "zeros", "rows", "mixed", "tiny", "huge", "denormal", "inf", "nan")
"""What gradients hold; from "denormal" on squares may leave the numbers of their type."""


class Draw(Random):
    """Random numbers of one case."""

    def __init__(self, seed: int, target: str, number: int) -> None:
        super().__init__(f"{seed}/{target}/{number}")
        self.number = number
        self.tensors = self.getrandbits(40)
        torch.manual_seed(self.tensors)

    def log(self, low: float, high: float) -> float:
        """A log-uniform number."""
        return float(math.exp(self.uniform(math.log(low), math.log(high))))

    def often(self, share: float) -> bool:
        """True in that share of the cases."""
        return self.random() < share

    def size(self, most: int = 20) -> int:
        """A length, more often a small one."""
        return self.randint(1, self.randint(1, most))

    def matrix(self, dims: Sequence[int] = (2, 2, 2, 3, 4), most: int = 20) -> Shape:
        """A shape of at least two dimensions."""
        count = self.choice(dims)
        return (*(self.size(4) for _ in range(count - 2)), self.size(most), self.size(most))

    def shape(self) -> Shape:
        """Any shape: of no dimension, of one, of several, some without elements."""
        if self.often(0.1):
            return self.choice([(), (0,), (1,), (0, 4), (3, 0), (2, 0, 3), (1, 1, 1, 1)])
        return (self.size(70),) if self.often(0.3) else self.matrix()

    def normal(self, shape: Sequence[int], scale: float = 1.0) -> Tensor:
        """A normal float64 tensor."""
        self.tensors += 1
        return gaussian(shape, self.tensors, scale=scale)

    def content(self, kind: str, shape: Shape, *, flatten: bool = False) -> Tensor:
        """A float64 gradient of a kind of `CONTENTS`."""
        self.tensors += 1
        plain = well_conditioned(shape, self.tensors, flatten=flatten)
        if kind == "ordinary":
            return plain
        if kind == "scaled":
            return plain * self.log(1e-4, 1e4)
        if kind == "zeros":
            return torch.zeros_like(plain)
        if kind == "rows":
            keep = torch.rand(plain.shape[:1]) < 0.5 if plain.ndim else torch.tensor(1.0)
            return plain * keep.double().view(-1, *[1] * (plain.ndim - 1)) if plain.ndim else plain
        if kind == "mixed":
            return plain * 10.0 ** (torch.rand(plain.shape, dtype=torch.float64) * 12 - 8)
        if kind in ("tiny", "huge", "denormal"):
            return plain * {"tiny": TINY, "huge": HUGE, "denormal": 1e-310}[kind]
        bad = {"inf": math.inf, "nan": math.nan}[kind]
        if plain.numel():
            plain.view(-1)[self.randrange(plain.numel())] = bad * self.choice([-1, 1])
        return plain

    def laid_out(self, values: Tensor) -> Tensor:
        """The same values in memory of any strides: transposed, sliced, with gaps, at any offset."""
        dims = list(range(values.ndim))
        self.shuffle(dims)
        back = [dims.index(dim) for dim in range(values.ndim)]
        permuted = values.permute(dims)
        gaps = [self.choice([1, 1, 1, 2, 3]) for _ in dims]
        start = [self.choice([0, 0, 1, 5]) for _ in dims]
        whole = torch.full(
            [s + n * g for s, n, g in zip(start, permuted.shape, gaps, strict=True)], 7.0, dtype=values.dtype
        )
        place = whole[tuple(slice(s, None, g) for s, g in zip(start, gaps, strict=True))]
        place = place[tuple(slice(n) for n in permuted.shape)]
        return place.copy_(permuted).permute(back)

    def some(self, options: dict[str, Sequence[Any]], share: float = 0.3) -> dict[str, Any]:
        """A few of these keys, each with one of its values."""
        return {key: self.choice(values) for key, values in options.items() if self.often(share)}
