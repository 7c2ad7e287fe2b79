"""Averages of the weights on meshes: each rank has its part of that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oxidion
from support.cases import Case, Group
from support.layouts import setting_named

from . import compared

STEPS = 5
SHAPES = ((12, 8), (8, 12), (17, 5), (3, 6, 4))
RULES: dict[str, dict[str, Any]] = {
    "ema": {"average": "ema", "average_decay": 0.75, "average_start": 1},
    "schedule_free": {"average": "schedule_free", "average_step_power": 1.0},
}
CLASSES: dict[str, dict[str, Any]] = {
    "Muon": {},
    "Dion": {"rank_fraction": 0.5},
    "SOAP": {"precondition_frequency": 2},
    "Adafactor": {"relative_step": False},
    "Lamb": {"weight_decay": 0.0},  # its decay is part of what norms are taken of
}
SETTINGS = ("fsdp3-dim0", "dp2-fsdp2-tp2")


def difference(
    name: str, rule: str, setting: str, keys: dict[str, Any], dtype: torch.dtype
) -> tuple[float, bool]:
    """Largest distance of weights and averages from those of one process; whether all bits are the same."""
    cls = getattr(oxidion, name)
    case = Case(name, cls, cls._ALGORITHM, {"lr": 2.0**-6, **keys}, (Group(SHAPES, RULES[rule]),))
    grads = compared.normal(case.shapes, STEPS, 3)
    single, params = compared.one_process(case, grads, dtype)
    mesh = compared.all_ranks(case, setting_named(setting), grads, dtype)
    means = [single.state[param]["average"] for param in params]
    held = [rank.optimizer.state[param]["average"] for rank in mesh.ranks for param in rank.params]
    pairs = [
        *compared.parts(mesh, params),
        *((own, wanted) for own, (_, wanted) in zip(held, compared.parts(mesh, means), strict=True)),
    ]
    ways = [
        float((p.detach() - start.detach()).norm())
        for p, start in zip(params, case.parameters(dtype), strict=True)
    ]
    for param, mean, way in zip(params, means, ways, strict=True):
        assert float((param.detach() - mean).norm()) > 0.01 * way, "the average is another than the weights"
    errors = [
        float((own - wanted).norm()) / way
        for (own, wanted), way in zip(pairs, ways * (2 * len(mesh.ranks)), strict=True)
    ]
    return max(errors), all(torch.equal(own, wanted) for own, wanted in pairs)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CLASSES)
def test_averages_on_a_mesh_are_those_of_one_process(name: str, rule: str, setting: str) -> None:
    error, _ = difference(name, rule, setting, CLASSES[name], torch.float64)
    assert error <= 1e-12


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_averages_on_a_mesh_have_the_bits_of_one_process(name: str, rule: str, setting: str) -> None:
    _, is_equal = difference(name, rule, setting, {}, torch.float32)
    assert is_equal
