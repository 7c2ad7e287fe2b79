"""Gradients that are not finite, or too large or small to be squared: no other parameter is touched.

A bad gradient may spoil its own parameter, never another one, and nothing crashes. Zeros and numbers
too small to be squared leave finite parameters. Good parameters end as if all gradients were good.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from support.cases import ONLY_OF_MATRICES

from .draw import Draw
from .steps import drawn_case

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
KINDS = ("inf", "nan", "largest", "smallest", "zeros", "huge")


def bad(draw: Draw, kind: str, like: Tensor) -> Tensor:
    """A gradient of a kind of `KINDS`."""
    info = torch.finfo(like.dtype)
    grad = draw.normal(like.shape).to(like.dtype)
    if kind in ("inf", "nan"):
        if grad.numel():
            grad.view(-1)[draw.randrange(grad.numel())] = {"inf": -math.inf, "nan": math.nan}[kind]
        return grad
    sign = grad.sign()
    if kind == "huge":
        return (grad.clamp(-1, 1) * math.sqrt(info.max)).to(like.dtype)
    return sign * {"largest": info.max, "smallest": info.smallest_normal * info.eps, "zeros": 0.0}[kind]


def stepped(row: Any, start: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
    """The parameters after these steps."""
    params = [nn.Parameter(param.clone()) for param in start]
    optimizer = row.build(params)
    for one in grads:
        for param, grad in zip(params, one, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return [param.detach() for param in params]


def case(draw: Draw) -> None:
    """Compares steps with one bad gradient with the same steps with a good one instead."""
    row, _ = drawn_case(draw)
    dtype = draw.choice(DTYPES)
    start = [draw.normal(shape, 0.1).to(dtype) for shape in row.shapes]
    victim = draw.randrange(len(start))
    kind = draw.choice(KINDS)
    good = [[draw.normal(param.shape).to(dtype) for param in start] for _ in range(draw.randint(1, 2))]
    spoilt = [[*one] for one in good]
    for one in spoilt:
        one[victim] = bad(draw, kind, start[victim])
    expected, found = stepped(row, start, good), stepped(row, start, spoilt)
    shared = row.kwargs.get("max_grad_norm") is not None  # of all gradients together
    algorithm = row.algorithms[victim]
    where = f"{row.name} {algorithm} {dtype} {kind} in {row.shapes[victim]} of {row.shapes} with {row.kwargs}"
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        if at != victim and not shared:
            same = equal(one, other) or close_enough(one, other, algorithm)
            assert same, f"{where}: parameter {at} of shape {row.shapes[at]} changed with it"
    if kind in ("zeros", "smallest"):
        assert found[victim].isfinite().all(), f"{where}: not finite"


def equal(one: Tensor, other: Tensor) -> bool:
    """The same numbers in the same places; NaN, to which settings may lead by themselves, equals NaN."""
    return bool(torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True))


def close_enough(one: Tensor, other: Tensor, algorithm: str) -> bool:
    """Equal but for the order of sums, where matrices are multiplied side by side."""
    if algorithm not in (*ONLY_OF_MATRICES, "soap") or not one.isfinite().all():
        return False
    return bool(torch.allclose(one.double(), other.double(), rtol=8 * torch.finfo(one.dtype).eps, atol=1e-6))
