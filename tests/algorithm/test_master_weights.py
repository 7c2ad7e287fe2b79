"""float32 weights of bfloat16 parameters: the steps of a float32 run, bit by bit, at two more bytes."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oxidion
from support.cases import ALL_CASES, Case, case_named
from support.inputs import gaussian

STEPS = 50
EXACT: dict[str, Any] = {"state_dtype": torch.float32}


def joined(param: Tensor, remainder: Tensor) -> Tensor:
    """The weight by its definition: the high half of its bits is the parameter's, less one where that was rounded up."""
    high = param.detach().contiguous().view(torch.int16).numpy().astype(np.uint16).astype(np.uint32)
    low = remainder.numpy()
    bits = ((high - (low < 0)) << 16).astype(np.uint32) | low.astype(np.uint16)
    return torch.from_numpy(np.atleast_1d(bits).view(np.float32).copy()).reshape(param.shape)


def nearest(weight: Tensor) -> Tensor:
    """The bfloat16 numbers nearest to finite weights; of two that are equally near the one of larger magnitude."""
    bits = weight.detach().contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def weights_of(optimizer: Any, params: Sequence[Tensor]) -> list[Tensor]:
    return [joined(param, optimizer.state[param]["master_remainder"]) for param in params]


def same(one: Tensor, other: Tensor) -> bool:
    """Equal bits."""
    return one.dtype == other.dtype and torch.equal(
        one.detach().contiguous().flatten().view(torch.uint8), other.detach().contiguous().flatten().view(torch.uint8)
    )


def twins(shapes: Sequence[tuple[int, ...]], seed: int = 3) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """bfloat16 parameters, and float32 ones of the same values."""
    starts = [gaussian(shape, seed, at, scale=0.1).bfloat16() for at, shape in enumerate(shapes)]
    return [nn.Parameter(start.clone()) for start in starts], [nn.Parameter(start.float()) for start in starts]


def gradients(params: Sequence[Tensor], step: int) -> list[Tensor]:
    """bfloat16 gradients, which do not depend on the weights."""
    return [gaussian(tuple(p.shape), 11, step, at).bfloat16() for at, p in enumerate(params)]


def step(optimizer: Any, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(param.dtype)
    optimizer.step()


def assert_equal_runs(half: Any, halves: Sequence[Tensor], full: Any, fulls: Sequence[Tensor], what: str) -> None:
    """The weights of both runs and their states have equal bits, and parameters are the roundings of weights."""
    for at, (param, weight, other) in enumerate(
        zip(halves, weights_of(half, halves), fulls, strict=True)
    ):
        assert same(weight, other), f"{what}: weight {at}"
        if bool(other.isfinite().all()):
            assert same(param, nearest(other)), f"{what}: parameter {at}"
        own, theirs = half.state[param], full.state[other]
        assert own.keys() - {"master_remainder"} == theirs.keys()
        for key, value in theirs.items():
            assert same(own[key], value), f"{what}: state {key} of {at}"


def run_both(case: Case, steps: int, **more: Any) -> None:
    halves, fulls = twins(case.shapes)
    half = case.build(halves, master_weights=True, **EXACT, **more)
    full = case.build(fulls, **EXACT, **more)
    for number in range(steps):
        grads = gradients(halves, number)
        step(half, halves, grads)
        step(full, fulls, grads)
    assert_equal_runs(half, halves, full, fulls, str(case))
    moved = [not torch.equal(p, start) for p, start in zip(halves, twins(case.shapes)[0], strict=True) if p.numel()]
    assert any(moved)


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_run_equals_that_of_float32_weights(case: Case) -> None:
    run_both(case, STEPS)
