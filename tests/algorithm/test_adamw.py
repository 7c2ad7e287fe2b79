"""AdamW: recorded and hand-computed steps, torch.optim.AdamW, bias correction, low-precision state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import oxidion
from support.appendix import assert_near, two_steps
from support.asserts import assert_tensors_close, assert_updates_close, error_in_ulps
from support.inputs import gaussian
from support.trajectory import role_names, role_state

MOMENTS = {
    "momentum": ((-0.01, 0.23, -0.065), (0.245, 0.055, 0.22)),
    "variance": ((0.0975, 0.2025, 0.050625), (0.211875, 0.061875, 0.44)),
}


@pytest.mark.parametrize(
    ("cautious", "expected"),
    [
        (False, ((0.396313, -1.163097, 2.106677), (1.283677, 0.307688, -0.888581))),
        (True, ((0.400263, -1.183997, 2.147476), (1.283677, 0.310163, -0.904506))),
    ],
)
@pytest.mark.parametrize("cls", [oxidion.AdamW, oxidion.Muon, oxidion.Dion], ids=lambda cls: cls.__name__)
def test_adamw_recorded_two_steps_are_reproduced(cls: type, cautious: bool, expected: object) -> None:
    param, state = two_steps(cls, keys={"algorithm": "adamw", "cautious_wd": cautious}, betas=(0.9, 0.95))
    assert_near(param, expected, 2e-6)
    roles = role_names(cls)
    named = {roles.get(key, key): value for key, value in state.items()}
    for key, value in MOMENTS.items():
        assert_near(named[key], value, 2e-6)


def test_adamw_first_step_by_hand_is_one_lr_after_decay() -> None:
    param = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    param.grad = torch.tensor([0.5, 4.0, 0.0], dtype=torch.float64)
    optimizer: Any = oxidion.AdamW([param], lr=0.1, weight_decay=0.5, eps=0.0)
    param.grad[2] = 1e-3
    optimizer.step()
    # X * (1 - 0.1 * 0.5) - 0.1 * g / |g|
    expected = torch.tensor([0.85, -2.0, 2.75], dtype=torch.float64)
    torch.testing.assert_close(param.detach(), expected, rtol=0, atol=1e-14)
    state = optimizer.state[param]
    torch.testing.assert_close(state["exp_avg"], 0.1 * param.grad, rtol=1e-14, atol=0)
    torch.testing.assert_close(state["exp_avg_sq"], 0.001 * param.grad**2, rtol=1e-12, atol=0)
    assert state["step"].dtype == torch.float32
    assert state["step"].item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"amsgrad": True},
        {"maximize": True},
        {"weight_decay": 0.0},
        {"betas": (0.0, 0.5)},
        {"lr": 0.3, "eps": 1e-3, "weight_decay": 0.2, "amsgrad": True, "maximize": True},
    ],
    ids=lambda kwargs: "-".join(kwargs) or "default",
)
def test_adamw_torch_class_gives_the_same_trajectory(dtype: torch.dtype, kwargs: dict[str, Any]) -> None:
    shapes = [(7, 5), (33,), (), (2, 3, 4), (1031,)]
    initial = [gaussian(shape, 3, index, scale=0.1).to(dtype) for index, shape in enumerate(shapes)]
    ours, theirs = ([nn.Parameter(value.clone()) for value in initial] for _ in range(2))
    arguments = {"lr": 2.0**-6, **kwargs}
    optimizers: list[Any] = [oxidion.AdamW(ours, **arguments), torch.optim.AdamW(theirs, **arguments)]
    for step in range(5):
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            for index, param in enumerate(params):
                param.grad = gaussian(param.shape, 4, step, index).to(dtype)
            optimizer.step()
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for actual, expected, start in zip(ours, theirs, initial, strict=True):
        assert_updates_close(actual, start, expected, tolerance)
        ours_state, theirs_state = (
            opt.state[p] for opt, p in zip(optimizers, (actual, expected), strict=True)
        )
        assert set(ours_state) == set(theirs_state)
        for key, value in theirs_state.items():
            assert_tensors_close(ours_state[key], value.to(ours_state[key].dtype), tolerance, key)


def test_adamw_bfloat16_counter_passes_256() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer: Any = oxidion.AdamW([param], lr=0.0)
    param.grad = torch.ones_like(param)
    for _ in range(260):
        optimizer.step()
    assert role_state(optimizer, param)["step"].item() == 260.0


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_adamw_state_dtype_is_kept_and_rounded_once(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    param = nn.Parameter(gaussian((40, 3), 5, scale=0.1).to(dtype))
    optimizer: Any = oxidion.AdamW([param], lr=2.0**-6, state_dtype=state_dtype)
    param.grad = gaussian((40, 3), 6).to(dtype)
    grad = param.grad.double()
    before = param.detach().double()
    optimizer.step()
    state = optimizer.state[param]
    for key, exact in {"exp_avg": 0.1 * grad, "exp_avg_sq": 0.001 * grad**2}.items():
        assert state[key].dtype == state_dtype
        # In float32 the factors 1 - beta and g * g are rounded too.
        assert error_in_ulps(state[key], exact) <= (3.0 if state_dtype == torch.float32 else 1.0)
    expected = before * (1.0 - 2.0**-6 * 1e-2) - 2.0**-6 * grad.sign() / (1.0 + 1e-8 / grad.abs())
    # The update may be taken from the rounded moments: 2^-8 of it, besides the rounding of the parameter.
    slack = 2.0**-6 * 2.0**-8 if state_dtype == torch.bfloat16 else 0.0
    ulp = torch.finfo(dtype).eps * before.abs().clamp(min=2.0**-6)
    assert bool(((param.detach().double() - expected).abs() <= 3.0 * ulp + slack).all())
