"""Lion: recorded and hand-computed steps, the sign of zero, low-precision state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import oxidion
from support.appendix import assert_near, two_steps
from support.asserts import error_in_ulps
from support.inputs import gaussian

MOMENTUM = ((-0.0025, 0.12, -0.035), (0.12375, 0.02625, 0.1175))


@pytest.mark.parametrize(
    ("cautious", "expected"),
    [
        (False, ((0.49105, -1.1791, 2.1592), (1.27115, 0.244025, -0.934075))),
        (True, ((0.495, -1.2, 2.2), (1.27115, 0.2465, -0.95))),
    ],
)
def test_lion_recorded_two_steps_are_reproduced(cautious: bool, expected: object) -> None:
    param, state = two_steps(oxidion.Lion, betas=(0.9, 0.95), cautious_wd=cautious)
    assert_near(param, expected, 1e-6)
    assert_near(state["exp_avg"], MOMENTUM, 1e-6)


@pytest.mark.parametrize("cls", [oxidion.Muon, oxidion.Dion], ids=lambda cls: cls.__name__)
def test_lion_group_of_a_matrix_class_equals_the_lion_class(cls: type) -> None:
    ends = []
    for owner, keys in ((oxidion.Lion, {}), (cls, {"algorithm": "lion"})):
        param = nn.Parameter(gaussian((9, 4), 1))
        optimizer: Any = owner([{"params": [param], **keys}], lr=0.125, weight_decay=0.25, betas=(0.8, 0.9))
        for step in range(3):
            param.grad = gaussian((9, 4), 2, step)
            optimizer.step()
        ends.append(param.detach())
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-14)


def test_lion_two_steps_by_hand() -> None:
    param = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer: Any = oxidion.Lion([param], lr=0.1, betas=(0.5, 0.75), weight_decay=0.5)
    param.grad = torch.tensor([4.0, -8.0, 0.0], dtype=torch.float64)
    optimizer.step()
    # X * 0.95 - 0.1 * sign(0.5 g); m = 0.25 g
    torch.testing.assert_close(
        param.detach(), torch.tensor([0.85, -1.8, 2.85], dtype=torch.float64), rtol=0, atol=1e-14
    )
    param.grad = torch.tensor([-2.0, 1.0, -1.0], dtype=torch.float64)
    optimizer.step()
    # b1 m + (1 - b1) g = [-0.5, -0.5, -0.5]; m = 0.75 [1, -2, 0] + 0.25 g
    torch.testing.assert_close(
        param.detach(), torch.tensor([0.9075, -1.61, 2.8075], dtype=torch.float64), rtol=0, atol=1e-14
    )
    expected = torch.tensor([0.25, -1.25, -0.25], dtype=torch.float64)
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lion_zero_interpolation_moves_nothing(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=dtype))
    param.grad = torch.tensor([0.0, -0.0, 3.0], dtype=dtype)
    oxidion.Lion([param], lr=0.25).step()
    assert param.detach().tolist() == [1.0, -2.0, 0.25]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cautious", [False, True], ids=["plain", "cautious"])
def test_lion_non_finite_gradients_move_as_torch_sign_does(dtype: torch.dtype, cautious: bool) -> None:
    numbers = [float("inf"), -float("inf"), float("nan"), 2.0, -2.0, 0.0]
    grad = torch.tensor(numbers * 7, dtype=dtype)
    param = nn.Parameter(torch.full_like(grad, 1.0))
    optimizer: Any = oxidion.Lion([param], lr=0.25, weight_decay=0.5, cautious_wd=cautious)
    expected = param.detach().clone()
    for _ in range(2):
        param.grad = grad.clone()
        optimizer.step()
        decays = (expected * grad.nan_to_num(0.0) >= 0) if cautious else torch.ones_like(grad)
        expected = expected * (1 - 0.125 * decays) - 0.25 * torch.sign(grad)
    torch.testing.assert_close(param.detach(), expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert torch.equal(optimizer.state[param]["exp_avg"].isfinite(), grad.isfinite())


def test_lion_cautious_zero_update_still_decays() -> None:
    param = nn.Parameter(torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64))
    param.grad = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    oxidion.Lion([param], lr=0.5, weight_decay=0.5, cautious_wd=True).step()
    # Decay where X U >= 0: the first two.
    torch.testing.assert_close(
        param.detach(), torch.tensor([0.75, 0.25, -1.5], dtype=torch.float64), rtol=0, atol=0
    )


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_lion_state_dtype_is_kept_and_rounded_once(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    param = nn.Parameter(gaussian((40, 3), 5, scale=0.1).to(dtype))
    optimizer: Any = oxidion.Lion([param], lr=2.0**-6, betas=(0.9, 0.99), state_dtype=state_dtype)
    param.grad = gaussian((40, 3), 6).to(dtype)
    before = param.detach().double()
    optimizer.step()
    momentum = optimizer.state[param]["exp_avg"]
    assert momentum.dtype == state_dtype
    assert error_in_ulps(momentum, 0.01 * param.grad.double()) <= 1.0
    assert error_in_ulps(param.detach(), before - 2.0**-6 * param.grad.double().sign(), before) <= 1.0
