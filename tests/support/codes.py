"""Block-wise codes from their definition: a naive code book, and the nearest entry by looking at all."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def book(signed: bool) -> Tensor:
    """The dynamic code book in float64: middles of equal parts of [0.1, 1] in seven decades, 0 and 1."""
    entries = [0.0, 1.0]
    for decade in range(7):
        parts = 2**decade if signed else 2 ** (decade + 1)
        bounds = [0.1 + 0.9 * part / parts for part in range(parts + 1)]
        for low, high in itertools.pairwise(bounds):
            entries.append((low + high) / 2 * 10.0 ** (decade - 6))
            if signed:
                entries.append(-entries[-1])
    return torch.tensor(sorted(entries), dtype=torch.float64)


def nearest(q: Tensor, signed: bool) -> Tensor:
    """The number of the nearest entry to each number, of two that are equally near of the one nearer to 0."""
    entries = book(signed).float().double()
    codes = []
    for part in q.double().reshape(-1).split(1 << 14):
        distance = (part[:, None] - entries).abs()
        near = distance == distance.min(dim=1, keepdim=True).values
        codes.append(torch.where(near, entries.abs(), torch.inf).argmin(dim=1))
    return torch.cat(codes).reshape(q.shape) if codes else q.long()


def encode(x: Tensor, block: int = 256, *, signed: bool = True) -> tuple[Tensor, Tensor]:
    """Codes and scales of blocks along the last dimension, quotients in float64."""
    codes, scales = [], []
    for part in x.double().split(block, dim=-1):
        scale = part.abs().amax(dim=-1, keepdim=True).float()
        codes.append(nearest(torch.where(scale > 0, part / scale.double(), 0.0), signed))
        scales.append(scale)
    return torch.cat(codes, dim=-1).to(torch.uint8), torch.cat(scales, dim=-1)


def decode(codes: Tensor, scales: Tensor, block: int = 256, *, signed: bool = True) -> Tensor:
    """What codes stand for, rounded to float32 as the optimizers' arithmetic reads them; float64."""
    wide = scales.repeat_interleave(block, dim=-1)[..., : codes.shape[-1]]
    return (book(signed).float()[codes.long()] * wide).double()
