"""float32 weights of bfloat16 parameters on every layout: the bits of a float32 run on the same layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oxidion._core import masters
from support.cases import Case
from support.inputs import gaussian
from support.layouts import Setting
from support.pairwise import covering
from support.sim_mesh import SimMesh, layouts_for

from .compared import shares
from .pairs import CHOSEN, kind

STEPS = 5
ROWS = list({(case.name, setting.name): (case, setting) for case, setting, _ in CHOSEN}.values())
FEW = covering(ROWS, lambda row: {row[0].algorithm, row[1].name, (kind(row[0].algorithm), row[1].name)})
PAIRS = [pytest.param(*row, marks=() if row in FEW else pytest.mark.slow) for row in ROWS]


def on_mesh(case: Case, setting: Setting, dtype: torch.dtype, **more: Any) -> SimMesh:
    mesh = SimMesh(
        setting.axes,
        lambda params: case.build(params, orth_dtype="float32", state_dtype=torch.float32, **more),
        layouts_for(case, setting.place),
        extra=setting.extra,
        outer=setting.outer,
        inner=setting.inner,
    )
    mesh.build([param.detach().bfloat16().to(dtype) for param in case.parameters()])
    return mesh


def same(one: Tensor, other: Tensor) -> bool:
    """Equal bits."""
    halves = [x.detach().contiguous().flatten().view(torch.uint8) for x in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*halves)


@pytest.mark.parametrize(("case", "setting"), PAIRS, ids=str)
def test_run_on_a_layout_equals_that_of_float32_weights(case: Case, setting: Setting) -> None:
    half = on_mesh(case, setting, torch.bfloat16, master_weights=True)
    full = on_mesh(case, setting, torch.float32)
    for step in range(STEPS):
        grads = [gaussian(shape, 3, step, at) for at, shape in enumerate(case.shapes)]
        for mesh in (half, full):
            # What a rank has is a bfloat16 number in both.
            mesh.step(lambda rank: [g.bfloat16().double() for g in shares(setting, rank.at, grads)])  # noqa: B023
    for mine, theirs in zip(half.ranks, full.ranks, strict=True):
        for at, (param, other) in enumerate(zip(mine.params, theirs.params, strict=True)):
            own, states = mine.optimizer.state[param], theirs.optimizer.state[other]
            where = f"rank {mine.number}, parameter {at}"
            assert own[masters.KEY].shape == param.shape
            assert same(masters.joined(param.detach(), own[masters.KEY]), other), where
            for key, value in states.items():
                assert same(own[key], value), f"{where}: {key}"
