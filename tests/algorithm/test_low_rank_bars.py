"""Bars on the distance of float32 steps with projected gradients from float64 ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oxidion
from support.asserts import update_relative_error
from support.case import Case, Group
from support.inputs import gaussian
from support.trajectory import Twin

from .test_normed import uneven

SHAPES = ((16, 12), (18, 12), (17, 5), (24, 40), (40, 24), (4, 12, 10))
KEYS = {"rank": 4, "update_proj_gap": 3, "lr": 2.0**-4, "weight_decay": 0.125, "state_bits": 32}
SETTINGS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (oxidion.GaLoreAdamW, {"scale": 1.0}),
    (oxidion.GaLoreAdamW, {"scale": 1.0, "svd": "exact"}),
    (oxidion.GaLoreAdamW, {"scale": 1.0, "proj_type": "left"}),
    (oxidion.GaLoreAdamW, {"scale": 1.0, "rotate_moments": True}),
    (oxidion.APOLLOAdamW, {}),
)


@pytest.mark.parametrize(("cls", "keys"), SETTINGS)
def test_six_float32_updates_are_within_1e_5_of_float64(cls: Any, keys: dict[str, Any]) -> None:
    case = Case("bar", cls, cls._ALGORITHM, {**KEYS, **keys}, (Group(SHAPES),))
    twin = Twin(case, torch.float32)
    for step in range(6):
        twin.follow_parameters()
        before = [param.clone() for param in twin.expected]
        twin.step([uneven(shape, step, index).float().double() for index, shape in enumerate(SHAPES)])
        for param, old, expected in zip(twin.params, before, twin.expected, strict=True):
            assert update_relative_error(param, old, expected - old) <= 1e-5


@pytest.mark.parametrize("scale_type", ["channel", "tensor"])
def test_limit_of_apollo_spreads_nan_over_the_whole_matrix(scale_type: str) -> None:
    params = [torch.nn.Parameter(gaussian(shape, 1)) for shape in ((24, 16), (16, 24))]
    optimizer = oxidion.APOLLOAdamW(params, lr=0.01, rank=4, scale_type=scale_type)
    for step in range(3):
        for param in params:
            param.grad = gaussian(tuple(param.shape), 2, step)
        if step == 1:
            params[0].grad[0, 0] = torch.nan
        optimizer.step()
        # As the formula has it: the norm of the update is that of all channels.
        assert bool(params[0].isnan().all()) == (step > 0)
    assert bool(params[1].isfinite().all())
