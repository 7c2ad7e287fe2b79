"""Dion with an orthonormal right factor (arXiv:2605.16341): its formulas, and momentum of lower rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from support.asserts import assert_tensors_close, assert_updates_close
from support.dion import dion, every_method
from support.inputs import gaussian

LR, MU, DECAY = 2.0**-4, 0.75, 2.0**-3
ORTHONORMAL: dict[str, Any] = {"right_factor": "orthonormal", "lr": LR, "mu": MU, "weight_decay": DECAY}
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}
every_shape = pytest.mark.parametrize("shape", [(24, 10), (10, 24), (12, 12)], ids=str)


def positive_qr(x: Tensor) -> Tensor:
    """The Q factor whose triangular one has a positive diagonal."""
    q, r = torch.linalg.qr(x)
    return q * r.diagonal().sign()


@dataclass
class Naive:
    """The algorithm of the paper in float64, of full rank: ``x`` is [m, n] with m >= n."""

    x: Tensor
    m: Tensor
    q: Tensor
    scale: float

    def step(self, grad: Tensor) -> None:
        """One step with the momentum, the factors and the weight as the equations have them."""
        b = self.m + grad
        p = positive_qr(b @ self.q)
        r = b.mT @ p
        self.m = b - (1.0 - MU) * p @ r.mT
        self.q = positive_qr(r)
        self.x = (1.0 - LR * DECAY) * self.x - LR * self.scale * p @ self.q.mT


@every_shape
@pytest.mark.parametrize("fraction", [0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_steps_follow_the_equations(shape: tuple[int, int], fraction: float, dtype: torch.dtype) -> None:
    # Small compared with an update, so that the rounding of weights does not matter.
    initial = (gaussian(shape, 1) / 64.0).to(dtype)
    param = nn.Parameter(initial.clone())
    optimizer = dion(param, rank_fraction=fraction, **ORTHONORMAL)
    wide = shape[0] < shape[1]
    turned = (lambda x: x.mT) if wide else (lambda x: x)
    q = optimizer.state[param]["Q"].double().clone()
    naive = Naive(
        turned(initial.double()),
        torch.zeros(turned(initial).shape).double(),
        q,
        math.sqrt(shape[0] / shape[1]),
    )
    for step in range(4):
        grad = gaussian(shape, 2, step).to(dtype)
        param.grad = grad
        optimizer.step()
        naive.step(turned(grad.double()))
        assert_updates_close(param, initial, turned(naive.x), ROUNDING[dtype], f"step {step}")
    # P and Q have no sign of their own for a column: the product has, which the update is.
    new = optimizer.state[param]["Q"].double()
    signs = (new * naive.q).sum(dim=0).sign()
    assert_tensors_close(new * signs, naive.q, 4 * ROUNDING[dtype])
    assert_tensors_close(turned(optimizer.state[param]["momentum"].double()), naive.m, 2 * ROUNDING[dtype])


@every_method
@every_shape
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_q_has_orthonormal_columns_whatever_the_method(
    method: dict[str, Any], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    param = nn.Parameter(gaussian(shape, 1).to(dtype))
    optimizer = dion(param, rank_fraction=0.5, **ORTHONORMAL, **method)
    for step in range(3):
        param.grad = gaussian(shape, 2, step).to(dtype)
        optimizer.step()
    q = optimizer.state[param]["Q"].double()
    torch.testing.assert_close(q.mT @ q, torch.eye(q.shape[1]).double(), rtol=0, atol=ROUNDING[dtype])


@every_method
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_momentum_of_lower_rank_moves_along_its_own_directions(
    method: dict[str, Any], dtype: torch.dtype, fraction: float
) -> None:
    shape, rank = (20, 12), 3
    left, right = (positive_qr(gaussian((n, rank), seed)) for n, seed in zip(shape, (1, 2), strict=True))
    param = nn.Parameter(torch.zeros(shape, dtype=dtype))
    settings = {**ORTHONORMAL, "weight_decay": 0.0}
    optimizer = dion(param, rank_fraction=fraction, **settings, **method)
    old = optimizer.state[param]["Q"].double().clone()
    for step in range(3):
        grad = left @ gaussian((rank, rank), 3, step) @ right.mT
        param.grad = grad.to(dtype)
        before = param.detach().double().clone()
        optimizer.step()
        update = (before - param.detach().double()) / (LR * math.sqrt(shape[0] / shape[1]))
        # Three directions, each with singular value 1: the polar factor within the span, not more.
        values = torch.linalg.svdvals(update)
        expected = torch.tensor([1.0] * rank + [0.0] * (shape[1] - rank)).double()
        torch.testing.assert_close(values, expected, rtol=0, atol=1e3 * ROUNDING[dtype])
        # The first columns see the directions; the others are what they were, less what these have of them.
        q = optimizer.state[param]["Q"].double()
        live = q[:, :rank]
        torch.testing.assert_close(live @ live.mT, right @ right.mT, rtol=0, atol=1e3 * ROUNDING[dtype])
        rest = old[:, rank:] - right @ (right.mT @ old[:, rank:])
        torch.testing.assert_close(q[:, rank:], rest / rest.norm(dim=0), rtol=0, atol=1e3 * ROUNDING[dtype])


def test_zero_gradient_keeps_q_and_a_non_finite_one_shows() -> None:
    params = [nn.Parameter(gaussian((8, 5), seed)) for seed in (1, 2)]
    optimizer: Any = oxidion.Dion(params, **ORTHONORMAL)
    optimizer.init_state()
    before = [optimizer.state[p]["Q"].clone() for p in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert all(torch.equal(optimizer.state[p]["Q"], q) for p, q in zip(params, before, strict=True))
    torch.testing.assert_close(params[0].detach(), gaussian((8, 5), 1) * (1 - LR * DECAY), rtol=1e-15, atol=0)
    params[0].grad = torch.full_like(params[0], math.nan)
    params[1].grad = gaussian((8, 5), 3)
    optimizer.step()
    assert bool(params[0].isnan().all() and optimizer.state[params[0]]["Q"].isnan().all())
    assert bool(params[1].isfinite().all())


def train(**kwargs: Any) -> tuple[Tensor, Any]:
    """Three steps of one parameter."""
    param = nn.Parameter(gaussian((16, 12), 1))
    optimizer = dion(param, rank_fraction=0.5, **kwargs)
    for step in range(3):
        param.grad = gaussian((16, 12), 2, step)
        optimizer.step()
    return param.detach(), optimizer


def test_column_is_the_default_and_orthonormal_another_update() -> None:
    default, explicit = train()[0], train(right_factor="column")[0]
    assert torch.equal(default, explicit)
    assert (train(right_factor="orthonormal")[0] - default).norm() > 1e-3 * default.norm()


def test_checkpoints_have_the_key_and_older_ones_mean_column() -> None:
    kept = train(right_factor="orthonormal")[1].state_dict()
    assert kept["param_groups"][0]["right_factor"] == "orthonormal"
    optimizer = train()[1]
    optimizer.load_state_dict(kept)
    assert optimizer.param_groups[0]["right_factor"] == "orthonormal"
    older = train()[1].state_dict()
    del older["param_groups"][0]["right_factor"]
    optimizer = train()[1]
    optimizer.load_state_dict(older)
    assert optimizer.param_groups[0]["right_factor"] == "column"


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_states_follow_wide_ones(bits: int, dtype: torch.dtype) -> None:
    ends = []
    for kind, settings in ((dtype, {"state_bits": bits}), (torch.float64, {})):
        param = nn.Parameter(torch.zeros((64, 80), dtype=kind))
        optimizer = dion(param, rank_fraction=0.25, **{**ORTHONORMAL, "weight_decay": 0.0}, **settings)
        # Of rank 16, as Q, with equal singular values: else rounding would choose what is left out.
        left, right = positive_qr(gaussian((64, 16), 2)), positive_qr(gaussian((80, 16), 3))
        optimizer.state[param]["Q"].copy_(left.bfloat16())
        for step in range(2):
            grad = (left * (1.0 + step)) @ right.mT
            param.grad = grad.to(dtype).to(kind)
            optimizer.step()
        ends.append(param.detach().double())
    assert_tensors_close(ends[0], ends[1], 0.05 if bits == 8 or dtype == torch.bfloat16 else 1e-5)


def test_flops_have_the_factorization() -> None:
    param = nn.Parameter(torch.zeros(96, 64))
    flops = {
        kind: oxidion.Dion([param], rank_fraction=0.25, right_factor=kind).explain()[0]["flops"]
        for kind in ("column", "orthonormal")
    }
    assert flops["orthonormal"] - flops["column"] == 4 * 64 * 16**2
