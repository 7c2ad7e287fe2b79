"""Checkpoints of other packages: torch.optim.AdamW both ways, microsoft/dion by its documented layout."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion

from .snapshot import assert_same
from .table import make_model, run_steps, set_grads

HYPER: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("direction", ["torch to oxidion", "oxidion to torch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_adamw_checkpoint_crosses_over_and_training_goes_on(
    amsgrad: bool, steps: int, direction: str, dtype: torch.dtype
) -> None:
    source_cls, target_cls = torch.optim.AdamW, oxidion.AdamW
    if direction == "oxidion to torch":
        source_cls, target_cls = target_cls, source_cls
    model, other = make_model(dtype), make_model(dtype)
    source = source_cls(model.parameters(), **HYPER, amsgrad=amsgrad)
    target = target_cls(other.parameters(), lr=0.5)
    run_steps(source, model, range(steps))
    other.load_state_dict(model.state_dict())
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    for key, value in {**HYPER, "amsgrad": amsgrad}.items():
        assert target.param_groups[0][key] == value
    run_steps(source, model, range(steps, steps + 3))
    run_steps(target, other, range(steps, steps + 3))
    # Both compute the same formula; only the order of rounded operations differs.
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for left, right in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)
        for key in source.state[right]:
            torch.testing.assert_close(
                target.state[left][key], source.state[right][key], rtol=tolerance, atol=tolerance
            )
    keys = {"step", "exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if amsgrad else set())
    assert set(source.state[next(model.parameters())]) == keys
    assert set(target.state[next(other.parameters())]) == keys


def test_adamw_checkpoint_with_number_steps_loads() -> None:
    model, other = make_model(torch.float64), make_model(torch.float64)
    source, target = (
        torch.optim.AdamW(model.parameters(), **HYPER),
        oxidion.AdamW(other.parameters(), **HYPER),
    )
    run_steps(source, model, range(2))
    saved = copy.deepcopy(source.state_dict())
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    other.load_state_dict(model.state_dict())
    target.load_state_dict(saved)
    run_steps(source, model, range(2, 4))
    run_steps(target, other, range(2, 4))
    for left, right in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
        assert isinstance(target.state[left]["step"], Tensor)
        assert target.state[left]["step"] == 4


def adamw_by_hand(x: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, hyper: dict[str, Any]) -> Tensor:
    """One AdamW step, from its equations."""
    beta1, beta2, lr = hyper["beta1"], hyper["beta2"], hyper["lr"]
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    denominator = (v / (1 - beta2**t)).sqrt() + hyper["epsilon"]
    return x * (1 - lr * hyper["weight_decay"]) - lr * m / (1 - beta1**t) / denominator


def dion_by_hand(
    x: Tensor, g: Tensor, m: Tensor, q: Tensor, hyper: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """One Dion step on one tall matrix, from its equations; returns the new X, M and Q."""
    rows, cols = x.shape
    m = m + g
    p = torch.linalg.qr(m @ q).Q
    r = m.T @ p
    m = m - (1 - hyper["mu"]) * p @ r.T
    q = r / (r.norm(dim=0) + hyper["epsilon"])
    lr = hyper["lr"]
    return x * (1 - lr * hyper["weight_decay"]) - lr * math.sqrt(rows / cols) * p @ q.T, m, q


def foreign_group(algorithm: str, params: list[int], hyper: dict[str, Any], step: int) -> dict[str, Any]:
    """A parameter group as microsoft/dion saves it: ``beta1`` and ``beta2``, no ``betas``."""
    return {**hyper, "algorithm": algorithm, "step": step, "params": params}


def test_dion_checkpoint_of_reference_layout_loads_and_goes_on() -> None:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weight, bias, gain = nn.Parameter(normal(8, 6)), nn.Parameter(normal(8)), nn.Parameter(normal(6))
    momentum, q, m, v, lion_m = normal(8, 6), normal(6, 3), normal(8), normal(8).square(), normal(6)
    hyper = {
        "rank_fraction": 0.5,
        "rank_multiple_of": 1,
        "lr": 0.02,
        "mu": 0.9,
        "beta1": 0.7,
        "beta2": 0.8,
        "weight_decay": 0.1,
        "epsilon": 1e-6,
        "oversample": 1.25,
    }
    algorithms = ("dion", "adamw", "lion")
    saved = {
        "state": {
            0: {"momentum": momentum, "Q": q},
            1: {"momentum": m, "variance": v},
            2: {"momentum": lion_m},
        },
        "param_groups": [foreign_group(name, [index], hyper, 7) for index, name in enumerate(algorithms)],
    }
    held = copy.deepcopy(saved)
    optimizer = oxidion.Dion(
        [
            {"params": [weight], "rank_fraction": 0.5},
            {"params": [bias], "algorithm": "adamw"},
            {"params": [gain], "algorithm": "lion"},
        ]
    )
    optimizer.load_state_dict(saved)
    for group in optimizer.param_groups:
        # The first one of Dion's own group, which Dion has no use for, shows the momentum factor.
        assert tuple(group["betas"]) == (0.9 if group["algorithm"] == "dion" else 0.7, 0.8)
        assert group["step"] == 7
    params = [weight, bias, gain]
    set_grads(params, 0)
    grads = [param.grad for param in params]
    x, m_new, q_new = dion_by_hand(weight.detach(), grads[0], momentum, q, hyper)
    b = adamw_by_hand(bias.detach(), grads[1], m, v, 8, hyper)
    direction = torch.sign(0.7 * lion_m + 0.3 * grads[2])
    z = gain.detach() * (1 - 0.02 * 0.1) - 0.02 * direction
    optimizer.step()
    # float64; the orthonormal factor may differ by signs of columns, which cancel in P Qᵀ.
    for actual, expected in zip(params, (x, b, z), strict=True):
        torch.testing.assert_close(actual.detach(), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(optimizer.state[weight]["momentum"], m_new, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(optimizer.state[weight]["Q"].abs(), q_new.abs(), rtol=1e-9, atol=1e-9)
    assert_same(saved, held, "the saved dict")
    assert [group["step"] for group in optimizer.param_groups] == [8, 8, 8]


@pytest.mark.parametrize("counter", ["missing", "bfloat16", "present"])
def test_muon_checkpoint_of_reference_layout_loads_and_goes_on(counter: str) -> None:
    weight, bias = nn.Parameter(torch.randn(8, 6, dtype=torch.float64)), nn.Parameter(torch.randn(8).double())
    m, v = torch.randn(8).double(), torch.randn(8).double().square()
    hyper = {
        "lr": 0.019999999552965164,
        "mu": 0.9,
        "beta1": 0.7,
        "beta2": 0.8,
        "weight_decay": 0.1,
        "cautious_wd": False,
        "epsilon": 1e-6,
        "nesterov": False,
        "flatten": False,
        "adjust_lr": "spectral_norm",
    }
    scalar = {"momentum": m, "variance": v}
    if counter != "missing":
        scalar["step_dev"] = torch.tensor(
            7.0, dtype=torch.bfloat16 if counter == "bfloat16" else torch.float32
        )
    saved = {
        "state": {0: {"momentum": torch.randn(8, 6).double()}, 1: scalar},
        "param_groups": [foreign_group("muon", [0], hyper, 7), foreign_group("adamw", [1], hyper, 7)],
    }
    optimizer = oxidion.Muon([{"params": [weight]}, {"params": [bias], "algorithm": "adamw"}])
    optimizer.load_state_dict(saved)
    set_grads([weight, bias], 0)
    expected = adamw_by_hand(bias.detach(), bias.grad, m, v, 8, hyper)
    momentum = 0.9 * saved["state"][0]["momentum"] + weight.grad
    optimizer.step()
    torch.testing.assert_close(bias.detach(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(optimizer.state[weight]["momentum"], momentum, rtol=1e-12, atol=1e-12)
    assert optimizer.state[bias]["step_dev"] == 8
    assert optimizer.state[bias]["step_dev"].dtype == torch.float32
