"""Block-wise codes from their definition: naive code books, and the entry for a number by looking at all."""

from __future__ import annotations

import itertools
from functools import cache

import torch
from torch import Tensor


@cache
def book(signed: bool) -> Tensor:
    """The code book in ascending order, float64.

    Of numbers of either sign it is the dynamic one: middles of equal parts of [0.1, 1] in seven decades, 0
    and 1. Of numbers that are not negative it has 32 equal parts of each of the first two powers of two
    below 1, 8 of each of the next 14, 4 of each of those below, and 0.
    """
    entries = [0.0, 1.0]
    if not signed:
        for power in range(1, 37):
            parts = 32 if power <= 2 else 8 if power <= 16 else 4
            entries.extend(2.0**-power * (1 + part / parts) for part in range(parts))
        # The lower half of the last power of two is one too many.
        return torch.tensor([0.0, *sorted(entries)[-255:]], dtype=torch.float64)
    for decade in range(7):
        parts = 2**decade
        bounds = [0.1 + 0.9 * part / parts for part in range(parts + 1)]
        for low, high in itertools.pairwise(bounds):
            entries.append((low + high) / 2 * 10.0 ** (decade - 6))
            entries.append(-entries[-1])
    return torch.tensor(sorted(entries), dtype=torch.float64)


def nearest(q: Tensor) -> Tensor:
    """The codes of numbers of either sign: the nearest entry, of two that are equally near that next to 0."""
    entries = book(True).float().double()
    codes = []
    for part in q.double().reshape(-1).split(1 << 14):
        distance = (part[:, None] - entries).abs()
        near = distance == distance.min(dim=1, keepdim=True).values
        codes.append(torch.where(near, entries.abs(), torch.inf).argmin(dim=1))
    return torch.cat(codes).reshape(q.shape) if codes else q.long()


def between(q: Tensor, random: Tensor | None = None) -> Tensor:
    """The codes of numbers that are not negative: of one of the two entries that a number is between.

    It is the upper one where the number's share of the way and the random number, in steps of 2⁻¹⁶ from
    2⁻¹⁷ on, are 1 or more together; without random numbers half the way is. A positive number gets no 0.
    """
    entries = book(False)
    x = q.double().reshape(-1)
    numbers = torch.full(x.shape, 1 << 15) if random is None else random.reshape(-1)
    codes = []
    for part, number in zip(x.split(1 << 14), numbers.split(1 << 14), strict=True):
        below = (part[:, None] >= entries).sum(dim=1).sub(1).clamp(1, 254)
        low, high = entries[below], entries[below + 1]
        chance = (number.double() + 0.5) * 2.0**-16
        up = (part - low) / (high - low) + chance >= 1.0
        codes.append(torch.where(part > 0, below + up.long(), 0))
    return torch.cat(codes).reshape(q.shape) if codes else q.long()


def find(q: Tensor, signed: bool, random: Tensor | None = None) -> Tensor:
    """The codes of numbers that are at most 1."""
    return nearest(q) if signed else between(q, random)


def encode(
    x: Tensor, block: int = 256, *, signed: bool = True, random: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and scales of blocks along the last dimension, in float32 as the core scales."""
    found, scales = [], []
    numbers = [None] * -(-x.shape[-1] // block) if random is None else random.split(block, dim=-1)
    for part, number in zip(x.float().split(block, dim=-1), numbers, strict=False):
        scale = part.abs().amax(dim=-1, keepdim=True)
        power = torch.where(scale < 2.0**-60, 2.0**64, torch.where(scale > 2.0**60, 2.0**-64, 1.0))
        q = (part * power) * (1.0 / (scale * power))
        lost = (scale == 0) | ~scale.isfinite()
        found.append(find(torch.where(lost, 0.0, q), signed, number))
        scales.append(scale)
    return torch.cat(found, dim=-1).to(torch.uint8), torch.cat(scales, dim=-1)


def decode(codes: Tensor, scales: Tensor, block: int = 256, *, signed: bool = True) -> Tensor:
    """What codes stand for, rounded to float32 as the optimizers' arithmetic reads them; float64."""
    wide = scales.repeat_interleave(block, dim=-1)[..., : codes.shape[-1]]
    return (book(signed).float()[codes.long()] * wide).double()
