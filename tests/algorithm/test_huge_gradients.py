"""Finite gradients whose squares are no float32 numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion._reference.adafactor import adafactor_step
from oxidion._reference.came import came_step
from oxidion._reference.lamb import lamb_step
from oxidion._reference.update import grad_norm
from support.asserts import assert_updates_close
from support.inputs import gaussian

SHAPES: tuple[tuple[int, ...], ...] = ((24, 16), (70, 3), (3, 70), (5, 1), (4, 6, 10), (16,), ())
SCALES = (1e-30, 1e-19, 1e-12, 1e10, 1e19, 1e25, 1e30, 3e38)

ADAFACTOR: dict[str, Any] = {"relative_step": False, "scale_parameter": False, "beta1": 0.5}
FACTORED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adafactor": (oxidion.Adafactor, adafactor_step, ADAFACTOR),
    "came": (oxidion.CAME, came_step, {}),
}


def gradients(shape: tuple[int, ...], scale: float, dtype: torch.dtype, steps: int = 3) -> list[Tensor]:
    """Of every size up to a scale, which is that of the largest."""
    each = []
    for step in range(steps):
        grad = gaussian(shape, 6, step)
        for dim, size in enumerate(shape):
            line = torch.linspace(-1, 0, size, dtype=torch.float64)
            grad = grad * (10.0**line).reshape([size if at == dim else 1 for at in range(len(shape))])
        each.append((grad / grad.abs().max() * scale).to(dtype))
    return each


@pytest.mark.parametrize("kind", FACTORED)
@pytest.mark.parametrize("state", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_factored_steps_follow_the_reference_at_any_scale(
    kind: str, dtype: torch.dtype, scale: float, state: torch.dtype
) -> None:
    """Above 2e19 in the states of checkpoints in float64 alone: second moments are no float32 numbers."""
    if dtype == torch.float16:
        scale = {1e10: 6e4, 1e-12: 1e-4}.get(scale, 1.0)
    cls, reference, keys = FACTORED[kind]
    for shape in SHAPES:
        # What a parameter of 16 bits rounds away would hide the rest: these are large steps from zero.
        param = nn.Parameter(torch.zeros(shape, dtype=dtype))
        optimizer = cls([param], lr=0.5, **keys)
        own, _ = factors_in(optimizer, param, state)
        expected, theirs = torch.zeros(shape, dtype=torch.float64), {}
        for step, grad in enumerate(gradients(shape, scale, dtype)):
            param.grad = grad.clone()
            optimizer.step()
            reference(expected, grad.double(), theirs, optimizer.param_groups[0])
            assert bool(param.isfinite().all())
            assert all(bool(value.isfinite().all()) for value in own.values())
            if state == torch.float64 or scale < 1e19:
                tolerance = {torch.float32: 1e-4, torch.float16: 5e-3}.get(dtype, 3e-2)
                assert_updates_close(param.detach(), torch.zeros(shape), expected, tolerance, f"{shape}")
            elif step == 0:
                # The gradient, clipped: not less than the reference's step, and along it.
                moved, wanted = param.detach().double().flatten(), expected.flatten()
                assert moved.norm() >= 0.3 * wanted.norm()
                assert moved @ wanted >= 0.3 * moved.norm() * wanted.norm()


def factors_in(
    optimizer: Any, param: nn.Parameter, dtype: torch.dtype
) -> tuple[dict[str, Tensor], list[str]]:
    """The state of a parameter before its first step, with second moments in this type."""
    optimizer.init_state()
    state = optimizer.state[param]
    names = [key for key in state if "_sq" in key or "_res" in key]
    for key in names:
        state[key] = state[key].to(dtype)
    return state, names


@pytest.mark.parametrize("kind", FACTORED)
@pytest.mark.parametrize("shape", [(24, 16), (300, 2), (16,)], ids=str)
def test_float32_second_moments_stop_at_the_maximum_and_recover(kind: str, shape: tuple[int, ...]) -> None:
    cls, _, keys = FACTORED[kind]
    param = nn.Parameter(gaussian(shape, 1).float())
    optimizer = cls([param], lr=0.01, **keys)
    state, names = factors_in(optimizer, param, torch.float32)
    small, large = gradients(shape, 1.0, torch.float32), gradients(shape, 1e30, torch.float32)
    for grad in [*small, *large, *small]:
        param.grad = grad
        optimizer.step()
        assert bool(param.isfinite().all())
        assert all(bool(state[name].isfinite().all()) for name in names)
    assert max(float(state[name].max()) for name in names) >= 1e37


@pytest.mark.parametrize("kind", FACTORED)
def test_rows_of_zeros_next_to_huge_rows_stand_still(kind: str) -> None:
    cls, _, keys = FACTORED[kind]
    for shape in ((40, 24), (80, 2), (3, 90)):
        param = nn.Parameter(torch.ones(shape))
        optimizer = cls([param], lr=0.01, **keys)
        optimizer.param_groups[0]["weight_decay"] = 0.0
        for grad in gradients(shape, 1e36, torch.float32):
            grad[1] = 0.0
            param.grad = grad
            optimizer.step()
        assert bool((param[1] == 1.0).all())
        assert bool((param[0] != 1.0).all() and param.isfinite().all())


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e19, 1e25, 1e38])
def test_lamb_clips_gradients_of_any_scale_to_their_norm(scale: float) -> None:
    shapes = ((24, 16), (300,))
    params = [nn.Parameter(gaussian(shape, 1).float()) for shape in shapes]
    optimizer: Any = oxidion.Lamb(params, lr=0.01, max_grad_norm=1.0)
    expected = [param.detach().double() for param in params]
    initial = [param.detach().clone() for param in params]
    states: list[dict[str, Tensor]] = [{}, {}]
    for step in range(3):
        for param, shape in zip(params, shapes, strict=True):
            param.grad = gradients(shape, scale, torch.float32)[step]
        optimizer.step()
        grads = [param.grad.double() for param in params if param.grad is not None]
        group = {**optimizer.param_groups[0], "grad_norm": grad_norm(grads)}
        for x, grad, state in zip(expected, grads, states, strict=True):
            lamb_step(x, grad, state, group)
    for param, start, x in zip(params, initial, expected, strict=True):
        assert_updates_close(param.detach(), start, x, 1e-3 if scale > 1e-30 else 2e-2)


CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (oxidion.AdamW, {}),
    "AdamW-amsgrad": (oxidion.AdamW, {"amsgrad": True}),
    "AdEMAMix": (oxidion.AdEMAMix, {}),
    "Lion": (oxidion.Lion, {}),
    "Lamb": (oxidion.Lamb, {}),
    "Adafactor": (oxidion.Adafactor, {"lr": None, "relative_step": True}),
    "CAME": (oxidion.CAME, {}),
    "Muon": (oxidion.Muon, {}),
    "NorMuon": (oxidion.NorMuon, {}),
    "Dion": (oxidion.Dion, {}),
    "Dion2": (oxidion.Dion2, {}),
    "NorDion2": (oxidion.NorDion2, {}),
    "GaLoreAdamW": (oxidion.GaLoreAdamW, {"rank": 4}),
    "APOLLOAdamW": (oxidion.APOLLOAdamW, {"rank": 4}),
    "APOLLOMini": (oxidion.APOLLOMini, {}),
}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-19, 1e10, 1e19, 1e25, 1e30, 1e37])
def test_parameters_stay_finite_under_finite_gradients(name: str, dtype: torch.dtype, scale: float) -> None:
    cls, keys = CLASSES[name]
    group = {"params": [nn.Parameter(gaussian((24, 16), 1).to(dtype))]}
    if "rank" in keys:
        group, keys = {**group, "rank": keys["rank"]}, {}
    optimizer = cls([group], **{"lr": 1e-3, **keys})
    (param,) = optimizer.param_groups[0]["params"]
    for grad in gradients((24, 16), scale, dtype):
        param.grad = grad
        optimizer.step()
        assert bool(param.isfinite().all())
