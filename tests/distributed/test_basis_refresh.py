"""Bases that are recomputed on any layout: more steps than the longer side of a matrix waits for."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from support.cases import Case, Group
from support.layouts import setting_named
from support.pairwise import covering

from . import compared

STEPS = 13
BASE: dict[str, Any] = {"lr": 2.0**-6, "weight_decay": 2.0**-3}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "soap": (oxidion.SOAP, {}),
    "soap-short": (oxidion.SOAP, {"sides": "short"}),
    "soap_muon": (oxidion.SOAPMuon, {}),
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
"""Rows in which every class meets every layout and every frequency, and these each other."""


def bases(optimizer: Any, params: list[nn.Parameter]) -> list[dict[str, Tensor]]:
    """Copies of the bases of every parameter, by side."""
    return [
        {key: value.clone() for key, value in optimizer.state[p].items() if key[:2] == "Q_"} for p in params
    ]


@pytest.mark.parametrize(
    ("kind", "setting", "frequency"),
    [pytest.param(*row, marks=() if row in CHOSEN else pytest.mark.slow) for row in ROWS],
)
def test_refreshed_bases_on_any_layout_are_those_of_one_process(
    kind: str, setting: str, frequency: int
) -> None:
    cls, keys = KINDS[kind]
    settings = {**BASE, "precondition_frequency": frequency, **keys}
    case = Case(kind, cls, cls._ALGORITHM, settings, (WHOLE, HEADS))
    found: list[list[dict[str, Tensor]]] = []
    grads = compared.normal(case.shapes, STEPS, 5)
    _, params = compared.one_process(case, grads, torch.float64, lambda _, *own: found.append(bases(*own)))
    # What the last step begins with is another basis than the first, of every side of every matrix.
    for first, last, shape in zip(found[0], found[-2], case.shapes, strict=True):
        assert len(first) == (1 if kind == "soap-short" else 2)
        for side, basis in first.items():
            assert bool((basis != last[side]).flatten(-2).any(-1).all()), f"{side} of {shape}"
    mesh = compared.all_ranks(case, setting_named(setting), grads, torch.float64)
    assert compared.distance(mesh, case, params) <= 1e-12
