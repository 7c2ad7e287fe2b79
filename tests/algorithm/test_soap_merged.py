"""SOAP whose dimensions are merged: the matrix that a parameter becomes, and one factor for all of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from support.asserts import assert_updates_close
from support.inputs import gaussian

B1, B2, LR, EPS = 0.9, 0.8, 2.0**-5, 1e-8
SETTINGS: dict[str, Any] = {"lr": LR, "betas": (B1, B2), "eps": EPS, "precondition_frequency": 2}


def soap(shape: tuple[int, ...], limit: int, steps: int, **kwargs: Any) -> tuple[nn.Parameter, Any]:
    """A parameter after some steps, and its optimizer."""
    param = nn.Parameter(gaussian((math.prod(shape),), 1).view(shape))
    optimizer = oxidion.SOAP([param], max_precondition_dim=limit, **{**SETTINGS, **kwargs})
    for step in range(steps):
        param.grad = gaussian((math.prod(shape),), 2, step).view(shape)
        optimizer.step()
    return param, optimizer


@pytest.mark.parametrize(
    ("shape", "limit", "merged"),
    [
        ((3, 4, 4, 3), 12, (12, 12)),
        ((2, 3, 2, 5), 12, (12, 5)),
        ((8, 3, 3), 9, (8, 9)),
        ((12, 8), 20, (12, 8)),
        ((1, 6, 5), 6, (6, 5)),
    ],
)
@pytest.mark.parametrize("sides", ["both", "short", "unsharded"])
def test_steps_are_those_of_the_matrix(
    shape: tuple[int, ...], limit: int, merged: tuple[int, int], sides: str
) -> None:
    param, optimizer = soap(shape, limit, 7, merge_dims=True, sides=sides)
    matrix, plain = soap(merged, limit, 7, sides=sides)
    assert torch.equal(param.detach().reshape(merged), matrix.detach())
    own, other = optimizer.state[param], plain.state[matrix]
    assert own.keys() == other.keys()
    for key, value in other.items():
        assert own[key].numel() == value.numel()
        assert torch.equal(own[key].reshape(value.shape), value), key


@pytest.mark.parametrize(
    ("shape", "limit", "factor"),
    [((5, 4), 24, 20), ((2, 3), 6, 6), ((4, 3, 2), 24, 24), ((3, 1), 3, 3), ((8, 3, 3, 3), 10000, 216)],
)
@pytest.mark.parametrize("sides", ["both", "short", "unsharded"])
def test_one_dimension_has_one_factor(shape: tuple[int, ...], limit: int, factor: int, sides: str) -> None:
    param, optimizer = soap(shape, limit, 1, merge_dims=True, sides=sides)
    state = optimizer.state[param]
    assert state["L"].shape == state["Q_L"].shape == (*shape, factor)
    assert not {"R", "Q_R"} & state.keys()
    grad = gaussian((factor,), 2, 0)
    torch.testing.assert_close(state["L"].reshape(factor, factor), (1.0 - B2) * grad.outer(grad))
    assert optimizer.explain()[0]["view"] == f"merged to {factor}"


def full_matrix_adam(x: Tensor, q: Tensor, factor: Tensor, steps: int) -> Tensor:
    """The steps behind the first: Adam in the basis of one factor, which waits for twice its length."""
    n = x.numel()
    m, v = torch.zeros(n).double(), torch.zeros(n).double()
    for t in range(1, steps):
        g = gaussian((n,), 2, t)
        m = B1 * m + (1.0 - B1) * g
        v = B2 * v + (1.0 - B2) * (q.T @ g).square()
        u = q @ ((q.T @ m) / (v.sqrt() + EPS))
        x = x - LR * math.sqrt(1.0 - B2**t) / (1.0 - B1**t) * u
        x = x - LR * 0.01 * x
        factor = B2 * factor + (1.0 - B2) * g.outer(g)
        if t % 2 == 0 and t + 1 >= 2 * n:
            order = torch.argsort(-(q.T @ factor @ q).diagonal(), stable=True)
            new = torch.empty_like(q)
            new[:, order] = torch.linalg.qr(factor @ q[:, order])[0]
            q = new
    return x


@pytest.mark.parametrize(("shape", "limit"), [((2, 3), 6), ((5, 4), 24)])
def test_one_factor_follows_the_equations(shape: tuple[int, ...], limit: int) -> None:
    size = math.prod(shape)
    steps = 2 * size + 6
    first, optimizer = soap(shape, limit, 1, merge_dims=True)
    state = optimizer.state[first]
    # The first gradient determines one direction of the basis; the others are random.
    q = state["Q_L"].reshape(size, size).clone()
    torch.testing.assert_close(q.T @ q, torch.eye(size).double(), rtol=0, atol=1e-12)
    expected = full_matrix_adam(first.detach().reshape(-1), q, state["L"].reshape(size, size), steps)
    param, _ = soap(shape, limit, steps, merge_dims=True)
    assert_updates_close(param.reshape(-1), first.reshape(-1), expected, 1e-9)


def test_longer_dimensions_stay_and_more_than_two_are_refused() -> None:
    param, optimizer = soap((5, 4), 3, 2, merge_dims=True)
    assert not {"L", "R"} & optimizer.state[param].keys()
    with pytest.raises(ValueError, match=r"makes 3 dimensions of shape \[5, 4, 6\].*flatten=True"):
        soap((5, 4, 6), 10, 1, merge_dims=True)


@pytest.mark.parametrize("keys", [{"flatten": True}, {"num_heads": 2}, {"split_sizes": (2, 2)}])
def test_other_views_are_excluded(keys: dict[str, Any]) -> None:
    param = nn.Parameter(gaussian((4, 6), 1))
    with pytest.raises(ValueError, match=r"merge_dims excludes flatten, num_heads and split_sizes"):
        oxidion.SOAP([{"params": [param], **keys}], merge_dims=True).init_state()


def test_vectors_and_the_default_are_as_without_it() -> None:
    for shape in ((7,), ()):
        assert torch.equal(soap(shape, 100, 4, merge_dims=True)[0], soap(shape, 100, 4)[0])
    stack, _ = soap((3, 4, 5), 100, 4, merge_dims=False)
    assert torch.equal(stack, soap((3, 4, 5), 100, 4)[0])
    assert not torch.equal(stack, soap((3, 4, 5), 100, 4, merge_dims=True)[0])
