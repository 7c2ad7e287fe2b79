"""New bases of GaLore and polar factors on a device, whatever the matrices are.

Like ``test_device_cases.py`` also run on the emulated device.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import oxidion
from support.cases import EMULATED
from support.inputs import gaussian

from .device_steps import DEVICE

pytestmark = [] if EMULATED else pytest.mark.cuda
SVDS = ("gram", "exact", "random")


def made(**settings: Any) -> tuple[torch.nn.Parameter, Any]:
    """A matrix with a new projection in every step, after one step and with the gradient of the next."""
    param = torch.nn.Parameter(gaussian((70, 60), 1).float().to(DEVICE))
    optimizer = oxidion.GaLoreAdamW([param], rank=4, update_proj_gap=1, state_bits=32, **settings)
    param.grad = gaussian((70, 60), 2).float().to(DEVICE)
    optimizer.step()
    return param, optimizer


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("svd", SVDS)
def test_new_bases_are_orthonormal(svd: str, rotate: bool) -> None:
    param, optimizer = made(svd=svd, rotate_moments=rotate)
    old = optimizer.state[param]["proj"].clone()
    param.grad = gaussian((70, 60), 3).float().to(DEVICE)
    optimizer.step()
    new = optimizer.state[param]["proj"]
    assert not torch.equal(new, old)
    assert (new.mT @ new - torch.eye(4, device=DEVICE)).abs().max() < 1e-5


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("svd", SVDS)
def test_what_is_not_finite_keeps_the_projection(
    svd: str, rotate: bool, caplog: pytest.LogCaptureFixture
) -> None:
    param, optimizer = made(svd=svd, rotate_moments=rotate)
    held = {key: value.clone() for key, value in optimizer.state[param].items()}
    # One column of the gradient is not projected on: its rows are those of the moments.
    grad = gaussian((70, 60), 3).float()
    grad[5, 7] = float("nan")
    param.grad = grad.to(DEVICE)
    with caplog.at_level(logging.WARNING, logger="oxidion.galore"):
        optimizer.step()
    state = optimizer.state[param]
    assert torch.equal(state["proj"], held["proj"])
    # Adam of the other rows goes on in the old projection.
    rows = [row for row in range(70) if row != 5]
    low = grad[rows].to(DEVICE) @ held["proj"]
    expected = held["exp_avg"][rows] + 0.1 * (low - held["exp_avg"][rows])
    assert torch.allclose(state["exp_avg"][rows], expected, rtol=1e-5, atol=1e-6)
    if not EMULATED:
        torch.cuda.synchronize()
    with caplog.at_level(logging.WARNING, logger="oxidion.galore"):
        param.grad = gaussian((70, 60), 4).float().to(DEVICE)
        optimizer.step()
    assert [record.levelname for record in caplog.records if record.name == "oxidion.galore"] == ["WARNING"]
    assert not torch.equal(optimizer.state[param]["proj"], held["proj"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("svd", SVDS)
def test_directions_that_are_not_there_are_zero(svd: str, dtype: torch.dtype) -> None:
    params = [torch.nn.Parameter(torch.zeros(70, 60, dtype=dtype, device=DEVICE)) for _ in range(2)]
    optimizer = oxidion.GaLoreAdamW(params, rank=4, svd=svd)
    for param, value in zip(params, (1.0, 0.0), strict=True):
        param.grad = torch.full_like(param, value)
    optimizer.step()
    ones, none = (optimizer.state[param]["proj"].cpu().double() for param in params)
    assert (ones[:, 0] - 60**-0.5).abs().max() < 1e-6
    assert not ones[:, 1:].any()
    assert not none.any()


def polar_factor(x: Tensor) -> Tensor:
    """By the class that takes it for its update."""
    param = torch.nn.Parameter(torch.zeros_like(x, device=DEVICE))
    param.grad = x.to(DEVICE)
    settings: dict[str, Any] = {"lr": 1.0, "mu": 0.0, "nesterov": False, "weight_decay": 0.0}
    settings |= {"orth_method": "svd", "orth_dtype": "float64" if x.dtype == torch.float64 else "float32"}
    optimizer = oxidion.Muon([param], **settings, adjust_lr=None)
    optimizer.step()
    return -param.detach().cpu()


@pytest.mark.parametrize("shape", [(64, 128), (128, 64), (50, 50)])
def test_polar_factor_of_a_low_rank_matrix_is_a_partial_isometry(shape: tuple[int, int]) -> None:
    rows, cols = shape
    corner = torch.zeros(shape)
    corner[:, :10] = gaussian((rows, 10), 1)
    line = torch.zeros(shape)
    line[:, 3] = 2.0
    for x in (
        torch.ones(shape),
        corner,
        line,
        gaussian((rows, 3), 2).float() @ gaussian((3, cols), 3).float(),
    ):
        left, values, right = torch.linalg.svd(x.double(), full_matrices=False)
        kept = values > 1e-5 * values.max()
        assert (polar_factor(x) - left[:, kept] @ right[kept]).abs().max() < 1e-5


def test_polar_factor_of_a_steep_matrix_is_orthogonal() -> None:
    left, _, right = torch.linalg.svd(gaussian((64, 128), 1), full_matrices=False)
    x = (left * torch.logspace(0, -12, 64, dtype=torch.float64)) @ right
    factor = polar_factor(x)
    assert (factor @ factor.mT - torch.eye(64, dtype=torch.float64)).abs().max() < 1e-13
    # Directions of small values are those of a matrix that rounding has moved.
    assert ((left.mT @ factor @ right.mT).diagonal()[:32] - 1).abs().max() < 1e-6
