"""Dion where the momentum lacks directions: nearly dependent, rank-deficient, zero, outside the span of Q."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from oxidion._reference.dion import dion_step
from support.asserts import assert_updates_close
from support.dion import assert_orthonormal_factors, dion, every_method
from support.inputs import gaussian, with_singular_values
from support.trajectory import as_float64


@every_method
def test_dion_nearly_dependent_columns_are_orthonormalised(method: dict[str, Any]) -> None:
    # Condition 1e6 of B Q: the squared condition is beyond float32, so a plain Cholesky QR breaks down.
    shape = (64, 16)
    param = nn.Parameter(torch.zeros(shape))
    optimizer = dion(param, weight_decay=0.0, orth_dtype="float32", **method)
    grad = with_singular_values(shape, torch.logspace(0, -5, 16), 1)
    optimizer.state[param]["Q"].copy_(torch.eye(16))
    param.grad = grad.float()
    optimizer.step()
    assert_orthonormal_factors(param.detach() / (-(2.0**-6) * 2.0), optimizer.state[param]["Q"], 2e-3)


@every_method
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["f64", "f32", "bf16"])
@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16)], ids=str)
@pytest.mark.parametrize("kind", ["rows", "duplicates", "one"])
def test_rank_deficient_momentum_never_exceeds_the_nominal_step(
    method: dict[str, Any], dtype: torch.dtype, shape: tuple[int, int], kind: str
) -> None:
    rank, rows, lr = 8, shape[0], 2.0**-3
    param = nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer = dion(param, lr=lr, weight_decay=0.0, rank_fraction=0.5, **method)
    expected, state = param.detach().double(), as_float64(optimizer.state[param])
    nominal = lr * math.sqrt(rank * shape[0] / shape[1])
    for step in range(4):
        grad = gaussian(shape, 1, step)
        if kind == "rows":
            grad[3:] = 0.0
        elif kind == "duplicates":
            grad = grad[:3].repeat(rows // 3 + 1, 1)[:rows]
        else:
            grad = torch.ones(shape, dtype=torch.float64) * (step + 1)
        param.grad = grad.to(dtype)
        before = param.detach().double().clone()
        optimizer.step()
        after = param.detach().double()
        assert bool(after.isfinite().all())
        assert bool(optimizer.state[param]["Q"].isfinite().all())
        # Room for the roundings of P, Q and the parameter.
        room = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 3e-2}[dtype]
        assert (after - before).norm().item() <= nominal * (1 + room), step
        dion_step(expected, param.grad.double(), state, {"lr": lr, "mu": 0.95})
        if dtype == torch.float64:
            assert_updates_close(after, torch.zeros(shape), expected, 1e-6, f"step {step}")
    # The three (or one) live directions did move the parameter.
    assert after.norm().item() >= 0.5 * lr * math.sqrt(shape[0] / shape[1])


@every_method
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["f64", "f32", "bf16"])
def test_dion_zero_momentum_only_decays_and_keeps_q(method: dict[str, Any], dtype: torch.dtype) -> None:
    initial = gaussian((6, 4), 1).to(dtype)
    param = nn.Parameter(initial.clone())
    optimizer = dion(param, lr=0.5, weight_decay=0.5, **method)
    q = optimizer.state[param]["Q"].clone()
    param.grad = torch.zeros_like(param)
    for _ in range(2):
        optimizer.step()
    torch.testing.assert_close(
        param.detach(),
        (0.5625 * initial.double()).to(dtype),
        rtol=2e-2 if dtype == torch.bfloat16 else 1e-6,
        atol=0,
    )
    assert torch.equal(optimizer.state[param]["Q"], q)
    assert not optimizer.state[param]["momentum"].any()
    param.grad = gaussian((6, 4), 2).to(dtype)
    before = param.detach().double() * 0.75
    optimizer.step()
    step = (param.detach().double() - before).norm().item()
    assert math.isclose(step, 0.5 * math.sqrt(1.5) * 2.0, rel_tol=2e-2)


def test_dion_dead_columns_keep_their_q() -> None:
    # B has one column; with Q = I, the columns of P beyond the first are outside B and R is zero there.
    param = nn.Parameter(torch.zeros(5, 3, dtype=torch.float64))
    optimizer = dion(param, lr=1.0, weight_decay=0.0, mu=0.5)
    optimizer.state[param]["Q"].copy_(torch.eye(3))
    param.grad = torch.zeros(5, 3, dtype=torch.float64)
    param.grad[:, 0] = torch.tensor([0.0, 3.0, 0.0, 4.0, 0.0])
    optimizer.step()
    expected = torch.zeros(5, 3, dtype=torch.float64)
    expected[:, 0] = -math.sqrt(5 / 3) * torch.tensor([0.0, 0.6, 0.0, 0.8, 0.0], dtype=torch.float64)
    torch.testing.assert_close(param.detach(), expected, rtol=0, atol=1e-7)
    torch.testing.assert_close(optimizer.state[param]["momentum"], 0.5 * param.grad, rtol=0, atol=1e-12)
    q = optimizer.state[param]["Q"]
    torch.testing.assert_close(q[:, 1:], torch.eye(3, dtype=torch.float64)[:, 1:], rtol=0, atol=0)
    torch.testing.assert_close(q[:, 0].abs(), torch.eye(3, dtype=torch.float64)[:, 0], rtol=0, atol=1e-7)


def test_dion_momentum_outside_the_span_of_q_adds_nothing() -> None:
    param = nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
    optimizer = dion(param, lr=0.5, weight_decay=0.5, rank_fraction=0.3)
    optimizer.state[param]["Q"].copy_(torch.tensor([[1.0], [0.0], [0.0]]))
    param.grad = torch.zeros(4, 3, dtype=torch.float64)
    param.grad[:, 2] = 1.0
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((4, 3), 0.75, dtype=torch.float64))
    assert torch.equal(optimizer.state[param]["momentum"], param.grad)
    assert optimizer.state[param]["Q"].flatten().tolist() == [1.0, 0.0, 0.0]


@every_method
@pytest.mark.parametrize("shape", [(16, 16), (32, 8), (8, 32), (60, 57)], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_dion_gradients_of_low_rank_step_along_nothing_else(
    method: dict[str, Any], shape: tuple[int, int], rank: int
) -> None:
    for seed in range(3):
        param = nn.Parameter(torch.zeros(shape))
        optimizer = dion(param, lr=1.0, weight_decay=0.0, adjust_lr=None, **method)
        for step in range(3):
            left, right = gaussian((shape[0], rank), seed, step), gaussian((rank, shape[1]), seed, step, 1)
            param.grad = (left @ right).float()
            # Rounding of products, enlarged where the first columns of B Q are nearly dependent.
            assert optimizer.verify()[0]["update_error"] <= 1e-3, (seed, step)
            before = param.detach().clone()
            optimizer.step()
            update = (before - param.detach()).double()
            rows = min((step + 1) * rank, *shape)
            assert int(torch.linalg.matrix_rank(update, rtol=1e-3)) <= rows, (seed, step)
