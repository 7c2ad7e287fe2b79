"""Block-wise quantization from its definition: naive code books, and entries found by full search."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

SMALLEST = 2.0**-23
"""The smallest magnitude of numbers of either sign."""


@cache
def magnitudes(signed: bool) -> Tensor:
    """The entries from 0 to 1 in ascending order, float64.

    Each power of two below 1 is divided into equal parts. Signed: 32 in the first two, 16 in the next one, 8
    in the next one, 2 in the last nineteen. Unsigned: 32 in the first two, 8 in the next 14, 4 in the others.
    """
    counts = [32] * 2 + ([16] + [8] + [2] * 19 if signed else [8] * 14 + [4] * 20)
    entries = [1.0]
    for power, parts in enumerate(counts, 1):
        entries.extend(2.0**-power * (1 + part / parts) for part in range(parts))
    # Of numbers that are not negative, the lower half of the last power of two is one too many.
    return torch.tensor([0.0, *sorted(entries)[-(127 if signed else 255) :]], dtype=torch.float64)


@cache
def book(signed: bool) -> Tensor:
    """The entries by code, float64: of numbers of either sign 127 is 0, and 255 is not used."""
    found = magnitudes(signed)
    return torch.cat([-found.flip(0)[:-1], found, found[-1:]]) if signed else found


def between(x: Tensor, random: Tensor, signed: bool) -> Tensor:
    """The numbers of entries of magnitudes: for each that of one of the two that it is between.

    It is the upper one where the magnitude's share of the way and the random number, in steps of 2⁻¹⁶ from
    2⁻¹⁷ on, are 1 or more together. Of numbers that are not negative a positive one gets no 0; of those of
    either sign the steps begin at 0 below the smallest entry, in float32.
    """
    entries, found = magnitudes(signed), []
    for part, number in zip(x.split(1 << 14), random.split(1 << 14), strict=True):
        below = (part[:, None] >= entries).sum(dim=1).sub(1).clamp(1, len(entries) - 2)
        low, high = entries[below], entries[below + 1]
        up = (part - low) / (high - low) + (number.double() + 0.5) * 2.0**-16 >= 1.0
        one = below + up.long()
        if signed:
            tiny = part.float() * 2.0**39 + number.float() >= 65536.0
            one = torch.where(part >= SMALLEST, one, tiny.long())
        found.append(torch.where(part > 0, one, 0))
    return torch.cat(found) if found else x.long()


def find(q: Tensor, signed: bool, random: Tensor | None = None) -> Tensor:
    """Quantizes numbers of at most 1 in size; without random numbers it rounds to nearest."""
    x = q.double().reshape(-1)
    numbers = torch.full(x.shape, 1 << 15) if random is None else random.reshape(-1)
    found = between(x.abs() if signed else x, numbers, signed)
    quantized = 127 + torch.where(x < 0, -found, found) if signed else found
    return quantized.reshape(q.shape)


def encode(
    x: Tensor, block: int = 256, *, signed: bool = True, random: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantized values and scales of blocks along the last dimension, in float32 as the core scales."""
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


def decode(quantized: Tensor, scales: Tensor, block: int = 256, *, signed: bool = True) -> Tensor:
    """Dequantized values, rounded to float32 as the optimizers' arithmetic reads them; float64."""
    wide = scales.repeat_interleave(block, dim=-1)[..., : quantized.shape[-1]]
    return (book(signed).float()[quantized.long()] * wide).double()
