"""Dion where gradients have fewer dimensions than Q has columns: a step stays within what they span."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oxidion import DionMixedPrecisionConfig
from oxidion._reference.dion import dion_step, own_directions
from support.dion import dion
from support.inputs import gaussian

Shape = tuple[int, int]

# A made-up direction has length 1. Rounding is far below, enlarged where columns of B Q lean on each other.
LEAK = {torch.float64: 1e-6, torch.float32: 0.05}
ERROR = {torch.float64: 1e-9, torch.float32: 5e-3}
exact = pytest.mark.parametrize("dtype", LEAK, ids=str)

GRADIENTS: dict[str, Callable[[Shape, int, int], Tensor]] = {
    "same": lambda shape, rank, step: product(shape, rank, 0, 0) * 0.5**step,
    "rows-change": lambda shape, rank, step: product(shape, rank, 0, step),
    "columns-change": lambda shape, rank, step: product(shape, rank, step, 0),
    "both-change": lambda shape, rank, step: product(shape, rank, step, step),
    "copies-of-rows": lambda shape, rank, step: gaussian((rank, shape[1]), 3, step).repeat(
        shape[0] // rank + 1, 1
    )[: shape[0]],
    "some-rows": lambda shape, rank, step: (
        gaussian(shape, 4, step) * (torch.arange(shape[0]) < rank).double().unsqueeze(1)
    ),
    "some-columns": lambda shape, rank, step: gaussian(shape, 5, step) * (torch.arange(shape[1]) < rank),
}
every_kind = pytest.mark.parametrize("kind", GRADIENTS)


def product(shape: Shape, rank: int, left: int, right: int) -> Tensor:
    """A matrix of this rank; those of the same numbers have the same columns and rows."""
    return gaussian((shape[0], rank), 1, left) @ gaussian((rank, shape[1]), 2, right)


def span(x: Tensor) -> Tensor:
    """An orthonormal basis of the columns."""
    left, values, _ = torch.linalg.svd(x, full_matrices=False)
    return left[:, values > 1e-10 * values[0]]


def outside(update: Tensor, seen: list[Tensor]) -> float:
    """The largest singular value of what an update has outside of the columns and rows of these gradients."""
    left, right = span(torch.cat(seen, 1)), span(torch.cat(seen, 0).mT)
    rest = update - left @ (left.mT @ update @ right) @ right.mT
    return torch.linalg.matrix_norm(rest, 2).item()


def zero(shape: Shape, dtype: torch.dtype, **kwargs: object) -> tuple[nn.Parameter, Any]:
    """A parameter of zeros, and Dion with steps of length 1 over it."""
    param = nn.Parameter(torch.zeros(shape, dtype=dtype))
    return param, dion(param, lr=1.0, weight_decay=0.0, adjust_lr=None, **kwargs)


@exact
@every_kind
@pytest.mark.parametrize("shape", [(16, 8), (8, 16), (7, 7)], ids=str)
def test_updates_stay_within_gradients_of_every_lower_rank(
    dtype: torch.dtype, kind: str, shape: Shape
) -> None:
    for rank in range(1, min(shape)):
        for keys in ({}, {"rank_fraction": 0.5}, {"rank_fraction": 0.25}, {"power_iters": 2}):
            param, optimizer = zero(shape, dtype, **keys)
            seen: list[Tensor] = []
            for step in range(3):
                grad = GRADIENTS[kind](shape, rank, step)
                seen.append(grad)
                param.grad = grad.to(dtype)
                with torch.no_grad():
                    param.zero_()
                assert optimizer.verify()[0]["update_error"] <= ERROR[dtype], (rank, keys, step)
                optimizer.step()
                update = param.detach().double()
                assert outside(update, seen) <= LEAK[dtype], (rank, keys, step)
                # Something is stepped along: the first step is of length 1 at least along one direction.
                assert step > 0 or torch.linalg.matrix_norm(update, 2) > 0.9, (rank, keys)


@exact
@pytest.mark.parametrize("scale", [1e-5, 1e10, 1e30])
def test_the_scale_of_gradients_of_low_rank_does_not_matter(dtype: torch.dtype, scale: float) -> None:
    for rank in (1, 3, 7):
        param, optimizer = zero((16, 12), dtype)
        seen: list[Tensor] = []
        for step in range(3):
            seen.append(GRADIENTS["rows-change"](param.shape, rank, step))
            param.grad = (seen[-1] * scale).to(dtype)
            with torch.no_grad():
                param.zero_()
            optimizer.step()
            assert outside(param.detach().double(), seen) <= LEAK[dtype], (rank, step)


@pytest.mark.parametrize(
    ("dtype", "keys"),
    [
        (torch.bfloat16, {}),
        (
            torch.float32,
            {"mixed_precision_config": DionMixedPrecisionConfig(momentum_dtype=torch.bfloat16)},
        ),
        (torch.float64, {"mixed_precision_config": DionMixedPrecisionConfig(momentum_dtype=torch.float32)}),
        (torch.float32, {"orth_dtype": "bfloat16"}),
    ],
    ids=["bfloat16", "bfloat16-momentum", "float32-momentum", "bfloat16-products"],
)
@pytest.mark.parametrize("kind", ["copies-of-rows", "some-rows", "some-columns"])
def test_rounding_of_narrow_storage_is_not_stepped_along(
    dtype: torch.dtype, keys: dict[str, Any], kind: str
) -> None:
    for shape in ((16, 8), (8, 16), (24, 24)):
        for rank in (1, 2, 4):
            param, optimizer = zero(shape, dtype, **keys)
            seen: list[Tensor] = []
            for step in range(2):
                # Of the same rank when it is rounded.
                seen.append(GRADIENTS[kind](shape, rank, step).bfloat16().double())
                param.grad = seen[-1].to(dtype)
                with torch.no_grad():
                    param.zero_()
                optimizer.step()
                update = param.detach().double()
                assert outside(update, seen) <= 0.3, (shape, rank, step)
                assert torch.linalg.matrix_norm(update, 2) > 0.5, (shape, rank, step)


@pytest.mark.parametrize("keys", [{}, {"orth_dtype": "bfloat16"}], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(96, 160), (160, 96)], ids=str)
def test_short_directions_of_a_momentum_are_stepped_along(keys: dict[str, Any], shape: Shape) -> None:
    # In the second step all columns of B Q are nearly parallel, and lie within 1/100 of the longest.
    left, right = (torch.linalg.qr(gaussian((side, 96), side))[0] for side in shape)
    momentum = (left / torch.arange(1, 97) @ right.mT).float()
    param, optimizer = zero(shape, torch.float32, rank_fraction=1 / 3, **keys)
    for step in range(3):
        param.grad = momentum.clone()
        optimizer.state[param]["momentum"].zero_()
        with torch.no_grad():
            param.zero_()
        optimizer.step()
        assert torch.linalg.matrix_rank(param.detach().double(), rtol=0.02) == 32, step


def test_missing_direction_of_the_last_layer_gets_no_update() -> None:
    # Columns of the gradient of a cross entropy add up to zero.
    for classes, width in ((8, 32), (10, 64), (32, 128)):
        param, optimizer = zero((classes, width), torch.float32)
        start = gaussian((classes, width), 1, scale=width**-0.5).float()
        inputs, labels = gaussian((256, width), 2).float(), torch.arange(256) % classes
        weight = start.clone().requires_grad_()
        nn.functional.cross_entropy(inputs @ weight.T, labels).backward()
        param.grad = weight.grad
        assert optimizer.verify()[0]["update_error"] <= 1e-3
        optimizer.step()
        assert param.detach().double().mean(0).norm() * classes**0.5 <= 1e-3
        assert torch.linalg.matrix_rank(param.detach().double(), rtol=1e-3) == classes - 1


@pytest.mark.parametrize("rows", [3, 7])
def test_reference_keeps_directions_around_exact_zeros(rows: int) -> None:
    # Exact zeros in the triangular factor, in front of a column that has a direction of its own.
    product = torch.zeros(rows, 4, dtype=torch.float64)[:, : min(4, rows)]
    product[0] = 2.0
    product[1, -1] = 1.0
    basis = own_directions(product, 2.0**-52, 2.0**-54)
    assert basis.any(dim=0).tolist() == [True, *[False] * (product.shape[1] - 2), True]
    torch.testing.assert_close(basis[:, 0].abs(), torch.eye(rows, dtype=torch.float64)[0])
    torch.testing.assert_close(basis[:, -1].abs(), torch.eye(rows, dtype=torch.float64)[1])


def test_reference_takes_a_step_of_rank_one_for_equal_rows() -> None:
    for seed in range(20):
        param = torch.zeros(12, 8, dtype=torch.float64)
        grad = gaussian((1, 8), seed).expand(12, 8)
        state = {"Q": gaussian((8, 8), seed, 1)}
        dion_step(param, grad, state, {"lr": 1.0, "mu": 0.95})
        values = torch.linalg.svdvals(param)
        assert values[0] > 0.5
        assert values[1] < 1e-9
