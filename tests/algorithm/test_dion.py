"""Dion: recorded and hand-computed steps, rank of Q, orthonormalisation, degenerate momentum, precisions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import oxidion
from oxidion._reference.dion import dion_step
from support.appendix import assert_near, two_steps
from support.asserts import assert_tensors_close, assert_updates_close, error_in_ulps
from support.dion import assert_orthonormal_factors, dion, every_method
from support.inputs import gaussian, well_conditioned, with_singular_values
from support.trajectory import as_float64

every_power = pytest.mark.parametrize("power_iters", [1, 2, 3])


@every_method
def test_dion_recorded_rank_one_steps_are_reproduced(method: dict[str, Any]) -> None:
    param, state = two_steps(
        oxidion.Dion, rank_fraction=0.5, q=[[0.25], [0.5]], orth_dtype="float32", **method
    )
    assert_near(param, ((0.496819, -0.978528, 1.969761), (1.383056, 0.222934, -0.865659)), 3e-6)
    assert_near(state["momentum"], ((0.013617, 2.502981, -0.731506), (2.326591, 0.458613, 2.250555)), 3e-6)
    q = state["Q"]
    assert_near(q * q[1].sign(), ((-0.084175,), (0.996451,)), 3e-6)


@every_method
def test_dion_recorded_full_rank_steps_are_reproduced(method: dict[str, Any]) -> None:
    param, state = two_steps(oxidion.Dion, q=[[0.25, 0.5], [0.75, 1.0]], orth_dtype="float32", **method)
    assert_near(param, ((0.455749, -1.123054, 2.009455), (1.399937, 0.245671, -0.871017)), 1e-5)
    assert_near(state["momentum"], ((-0.0475, 2.28, -0.665), (2.35125, 0.49875, 2.2325)), 1e-5)
    q = state["Q"]
    assert_near(q * q[1].sign(), ((-0.134769, 0.984183), (0.990877, 0.177153)), 1e-5)


@every_method
@pytest.mark.parametrize("transposed", [False, True], ids=["tall", "wide"])
def test_dion_diagonal_gradient_by_hand(method: dict[str, Any], transposed: bool) -> None:
    # B = [[3, 0], [0, 4], [0, 0]] and Q = I: P = [e1, e2], R = diag(3, 4), new Q = I, update = P.
    grad = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    direction = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    if transposed:
        grad, direction = grad.mT, direction.mT
    initial = torch.full_like(grad, 2.0)
    param = nn.Parameter(initial.clone())
    optimizer = dion(param, lr=0.5, weight_decay=0.5, mu=0.75, **method)
    optimizer.state[param]["Q"].copy_(torch.eye(2))
    param.grad = grad.clone()
    optimizer.step()
    factor = math.sqrt(2 / 3 if transposed else 3 / 2)
    torch.testing.assert_close(param.detach(), 0.75 * initial - 0.5 * factor * direction, rtol=0, atol=1e-8)
    torch.testing.assert_close(optimizer.state[param]["momentum"], 0.75 * grad, rtol=0, atol=1e-12)
    q = optimizer.state[param]["Q"]
    torch.testing.assert_close(q.abs(), torch.eye(2, dtype=torch.float64), rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("rows", "cols", "fraction", "multiple", "rank"),
    [
        (100, 40, 0.1, 1, 4),
        (100, 30, 0.07, 1, 3),
        (192, 768, 0.25, 1, 48),
        (30, 10, 0.33, 4, 4),
        (5, 5, 0.01, 8, 5),
        (100, 100, 0.07, 1, 8),  # 0.07 * 100 = 7.000000000000001 in float64
        (40, 100, 0.1, 1, 4),
        (7, 1, 0.5, 1, 1),
        (1, 7, 1, 1, 1),
        (12, 9, 1.0, 2, 9),
        (12, 9, 0.5, 4, 8),
        (0, 5, 0.5, 1, 0),
    ],
)
def test_dion_q_has_the_rank_of_the_rule(
    rows: int, cols: int, fraction: float, multiple: int, rank: int
) -> None:
    param = nn.Parameter(torch.zeros(rows, cols))
    optimizer = dion(param, rank_fraction=fraction, rank_multiple_of=multiple)
    assert optimizer.state[param]["Q"].shape == (min(rows, cols), rank)
    assert optimizer.state[param]["momentum"].shape == (rows, cols)


def test_dion_initial_q_is_normal_and_differs_between_parameters() -> None:
    params = [nn.Parameter(torch.zeros(200, 100)) for _ in range(2)]
    optimizer: Any = oxidion.Dion(params)
    optimizer.init_state()
    first, second = (optimizer.state[param]["Q"] for param in params)
    for q in (first, second):
        # 10,000 samples: 4 standard errors of mean, variance and fourth moment.
        assert abs(q.mean().item()) < 0.04
        assert abs(q.var().item() - 1.0) < 0.057
        assert abs((q**4).mean().item() - 3.0) < 0.4
    assert abs((first * second).mean().item()) < 0.04


@every_method
@every_power
@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16)], ids=str)
@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_dion_every_method_and_power_gives_orthonormal_factors(
    method: dict[str, Any], power_iters: int, shape: tuple[int, int], fraction: float
) -> None:
    for dtype, atol in ((torch.float64, 1e-7), (torch.float32, 2e-5)):
        param = nn.Parameter(torch.zeros(shape, dtype=dtype))
        optimizer = dion(
            param,
            rank_fraction=fraction,
            power_iters=power_iters,
            epsilon=0.0,
            orth_dtype=str(dtype)[6:],
            **method,
        )
        q0 = optimizer.state[param]["Q"]
        q0.copy_(well_conditioned(q0.shape, 5))
        state, expected = {"Q": q0.double().clone()}, torch.zeros(shape, dtype=torch.float64)
        group = {
            "lr": 2.0**-6,
            "weight_decay": 2.0**-3,
            "mu": 0.95,
            "epsilon": 0.0,
            "power_iters": power_iters,
        }
        for step in range(2):
            before = param.detach().clone()
            param.grad = well_conditioned(shape, 6, step).to(dtype)
            optimizer.step()
            dion_step(expected, param.grad.double(), state, group)
            assert_updates_close(
                param, torch.zeros(shape), expected, 1e-10 if dtype == torch.float64 else 1e-5
            )
            update = (before.double() * (1 - 2.0**-9) - param.detach().double()) / 2.0**-6
            update = update / math.sqrt(shape[0] / shape[1])
            q = optimizer.state[param]["Q"]
            assert_orthonormal_factors(update if shape[0] >= shape[1] else update.mT, q, atol)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16, None], ids=str)
def test_dion_mixed_precision_config_keeps_every_dtype(low: torch.dtype | None) -> None:
    config = oxidion.DionMixedPrecisionConfig(momentum_dtype=low, Q_dtype=low, variance_dtype=low)
    groups: list[dict[str, Any]] = [
        {"params": [nn.Parameter(gaussian((24, 16), 1).float())], "algorithm": "dion"},
        {"params": [nn.Parameter(gaussian((24, 16), 2).float())], "algorithm": "adamw"},
        {"params": [nn.Parameter(gaussian((24, 16), 3).float())], "algorithm": "lion"},
    ]
    lr = 2.0**-4
    optimizer: Any = oxidion.Dion(
        groups,
        lr=lr,
        weight_decay=0.0,
        rank_fraction=0.25,
        mixed_precision_config=config,
        orth_dtype="float32",
    )
    optimizer.init_state()
    matrix, adam, lion = params = [group["params"][0] for group in groups]
    expected_dtype = low or torch.float32
    for step in range(3):
        states = [as_float64(optimizer.state[param]) for param in params]
        before = [param.detach().double().clone() for param in params]
        for param in params:
            param.grad = gaussian(param.shape, 4, step).float()
        optimizer.step()
        for param in params:
            held = {key: value.dtype for key, value in optimizer.state[param].items()}
            assert (
                set(held)
                == {matrix: {"momentum", "Q"}, adam: {"momentum", "variance", "step"}, lion: {"momentum"}}[
                    param
                ]
            )
            assert held == {key: torch.float32 if key == "step" else expected_dtype for key in held}
        unit = 2.0**-6 if low is torch.bfloat16 else 2.0**-9 if low is torch.float16 else 1e-5
        exact = before[0].clone()
        dion_step(exact, matrix.grad.double(), states[0], {"lr": lr, "mu": 0.95})
        assert_updates_close(matrix, before[0], exact, 2 * unit, "dion")
        momentum = 0.9 * states[1]["momentum"] + 0.1 * adam.grad.double()
        variance = 0.95 * states[1]["variance"] + 0.05 * adam.grad.double() ** 2
        # In float32 the factors 1 - beta and g * g are rounded too.
        ulps = 3.0 if low is None else 1.0
        assert error_in_ulps(optimizer.state[adam]["momentum"], momentum, states[1]["momentum"]) <= ulps
        assert error_in_ulps(optimizer.state[adam]["variance"], variance) <= ulps
        hat = (momentum / (1 - 0.9 ** (step + 1))) / (variance / (1 - 0.95 ** (step + 1))).sqrt()
        assert_tensors_close((adam.detach().double() - before[1]) / -lr, hat, unit, "adamw")
        sign = (0.9 * states[2]["momentum"] + 0.1 * lion.grad.double()).sign()
        torch.testing.assert_close((lion.detach().double() - before[2]) / -lr, sign, rtol=0, atol=1e-5)


def test_dion_power_iterations_capture_more_of_the_momentum() -> None:
    grad = with_singular_values((40, 30), torch.logspace(0, -2, 30), 3)
    left = []
    for power_iters in (1, 2, 4):
        param = nn.Parameter(torch.zeros(40, 30, dtype=torch.float64))
        optimizer = dion(param, rank_fraction=0.2, mu=0.0, power_iters=power_iters)
        param.grad = grad.clone()
        optimizer.step()
        left.append(optimizer.state[param]["momentum"].norm().item())
    best = torch.linalg.svdvals(grad)[6:].norm().item()
    assert left[0] > 1.02 * left[1] > 1.0 * left[2] >= 0.999 * best
    assert left[2] <= 1.1 * best


@pytest.mark.parametrize("momentum", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(96, 64), (64, 96)], ids=str)
def test_dion_bfloat16_products_leave_a_wider_momentum_exact(
    momentum: torch.dtype, shape: tuple[int, int]
) -> None:
    config = oxidion.DionMixedPrecisionConfig(momentum_dtype=momentum)
    param = nn.Parameter(gaussian(shape, 1).float())
    optimizer = dion(
        param, rank_fraction=0.25, orth_dtype="bfloat16", mixed_precision_config=config, weight_decay=0.5
    )
    for step in range(4):
        state, before = as_float64(optimizer.state[param]), param.detach().double().clone()
        param.grad = gaussian(shape, 2, step).float()
        optimizer.step()
        exact = before.clone()
        dion_step(exact, param.grad.double(), state, {"lr": 2.0**-6, "mu": 0.95, "weight_decay": 0.5})
        assert_updates_close(param, before, exact, 2e-2, f"step {step}")
        held = optimizer.state[param]["momentum"]
        # Only the 5 % that are taken out go through bfloat16, not the momentum itself.
        limit = 4e-4 if momentum == torch.float32 else 6e-3
        assert (held.double() - state["momentum"]).norm() <= limit * state["momentum"].norm(), step


def test_dion_refuses_float16_products_and_names_the_choices() -> None:
    with pytest.raises(
        ValueError, match="orth_dtype must be one of 'auto', 'bfloat16', 'tf32', 'float32', 'float64'"
    ):
        oxidion.Dion([torch.nn.Parameter(torch.zeros(4, 4))], orth_dtype="float16")
