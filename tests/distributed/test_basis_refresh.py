"""Bases that are made anew on any layout: more steps than the longer side of a matrix waits for."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

import pytest
from torch import Tensor, nn

import oxidion
from support.cases import Case, Group
from support.inputs import gaussian
from support.layouts import Setting, setting_named
from support.pairwise import covering
from support.sim_mesh import SimMesh, cut, layouts_for

from .comparison import on_grid

STEPS = 13
BASE: dict[str, Any] = {"lr": 2.0**-6, "weight_decay": 2.0**-3}
KL: dict[str, Any] = {"variant": "kl", "betas": (0.95, 0.9), "correct_bias": False}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "soap": (oxidion.SOAP, {}),
    "soap-short": (oxidion.SOAP, {"sides": "short"}),
    "soap-kl": (oxidion.SOAP, KL),
    "soap-owned": (oxidion.SOAP, {"owned_states": True}),
    "soap_muon": (oxidion.SOAPMuon, {}),
    "soap_muon-owned": (oxidion.SOAPMuon, {"owned_states": True}),
}
# Square, 3:1 and 1:3; a stack; heads of 12 x 4. Three ranks cut 26 rows to 9, 9 and 8.
WHOLE = Group(((12, 12), (26, 9), (8, 24), (2, 15, 5)))
HEADS = Group(((36, 4),), {"num_heads": 3})
SETTINGS = ("fsdp4-dim0", "fsdp4-dim1", "fsdp3-dim0", "ddp3-compressed", "fsdp2-tp2")
FREQUENCIES = (10, 3, 1)

Row = tuple[str, str, int]
ROWS: list[Row] = list(itertools.product(KINDS, SETTINGS, FREQUENCIES))


def pairs(row: Row) -> set[Hashable]:
    """Pairs of what a row has."""
    return set(itertools.combinations(row, 2))


CHOSEN = covering(ROWS, pairs)
"""Rows in which every class meets every layout and every frequency."""


def case_of(kind: str, frequency: int) -> Case:
    """A class with some settings, over all shapes."""
    cls, keys = KINDS[kind]
    settings = {**BASE, "precondition_frequency": frequency, **keys}
    return Case(kind, cls, cls.ALGORITHM, settings, (WHOLE, HEADS))


def steps_of(case: Case) -> list[list[Tensor]]:
    """Gradients whose sums and means are exact."""
    return [
        [on_grid(gaussian(shape, 5, step, i)) for i, shape in enumerate(case.shapes)] for step in range(STEPS)
    ]


def bases(optimizer: Any, params: list[nn.Parameter]) -> list[dict[str, Tensor]]:
    """Copies of the bases of every parameter, by side."""
    return [
        {key: value.clone() for key, value in optimizer.state[p].items() if key[:2] == "Q_"} for p in params
    ]


def one_process(case: Case, grads: list[list[Tensor]]) -> list[Tensor]:
    """Parameters of one process, in which each basis is not the first one when the last step begins."""
    params = case.parameters()
    optimizer = case.build(params, orth_dtype="float64")
    for step, own in enumerate(grads):
        for param, grad in zip(params, own, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        if step == 0:
            first = bases(optimizer, params)
        if step == STEPS - 2:
            last = bases(optimizer, params)
    for before, after, shape in zip(first, last, case.shapes, strict=True):
        assert before.keys() == after.keys()
        assert len(before) == (1 if case.kwargs.get("sides") == "short" else 2)
        for side, basis in before.items():
            changed = (basis != after[side]).flatten(-2).any(-1)
            assert bool(changed.all()), f"{side} of {shape} is the first one still"
    return [param.detach() for param in params]


@pytest.mark.parametrize(
    ("kind", "setting", "frequency"),
    [pytest.param(*row, marks=() if row in CHOSEN else pytest.mark.slow) for row in ROWS],
)
def test_refreshed_bases_on_any_layout_are_those_of_one_process(
    kind: str, setting: str, frequency: int
) -> None:
    case, layout = case_of(kind, frequency), setting_named(setting)
    grads = steps_of(case)
    expected = one_process(case, grads)
    start = [p.detach() for p in case.parameters()]
    mesh = mesh_of(case, layout, start)
    for own in grads:
        mesh.step(lambda rank, own=own: shares(layout, rank.at, own))  # type: ignore[misc]
    for rank in mesh.ranks:
        for i, (param, wanted, before) in enumerate(zip(rank.params, expected, start, strict=True)):
            error = float((param.detach() - cut(wanted, rank.spans(i, wanted.shape))).norm())
            assert error <= 1e-12 * float((wanted - before).norm()), (case.shapes[i], rank.number)


def mesh_of(case: Case, layout: Setting, start: list[Tensor]) -> SimMesh:
    """All ranks, before their first step."""
    mesh = SimMesh(
        layout.axes,
        lambda params: case.build(params, orth_dtype="float64"),
        layouts_for(case, layout.place),
        extra=layout.extra,
    )
    mesh.build(start)
    return mesh


def shares(layout: Setting, at: dict[str, int], grads: list[Tensor]) -> list[Tensor]:
    """What a rank has of gradients, which are the mean of that where copies are not averaged."""
    for name, is_averaged in layout.extra.items():
        if not is_averaged:
            away = at[name] - (layout.axes[name] - 1) / 2
            grads = [grad * (1.0 + away) for grad in grads]
    return grads
