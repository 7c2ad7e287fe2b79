"""Optimizers in an eigenbasis on a mesh: what is sent when, and the side that no rank cuts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oxidion
from support.cases import Case, Group
from support.inputs import Shape, gradients
from support.layouts import Setting, copies, fsdp
from support.sim_mesh import R, S, SimMesh, layouts_for

from .comparison import Comparison, on_grid

AG, AR, A2A, RS = "all_gather", "all_reduce", "all_to_all", "reduce_scatter"
RANKS, GAP, M, N = 4, 3, 24, 16
ROWS, COLUMNS = Setting("rows", {"fs": RANKS}, fsdp(0)), Setting("columns", {"fs": RANKS}, fsdp(1))
REPLICAS = Setting("replicas", {"dp": RANKS}, copies, {"dp": True})
HSDP = Setting("hsdp", {"dp": 2, "fs": 2}, lambda s: {"dp": R, "fs": S(0)}, {"dp": True})


def traffic(setting: Setting, shape: Shape, **kwargs: Any) -> list[list[tuple[str, int]]]:
    """Kinds and bytes of what rank 0 gives to collectives in four steps, with a matrix for each rank."""
    settings = {"precondition_frequency": GAP, **kwargs}
    case = Case("traffic", oxidion.SOAP, "soap", settings, (Group((shape,) * RANKS),))
    mesh = SimMesh(setting.axes, case.build, layouts_for(case, setting.place), extra=setting.extra)
    mesh.build([p.detach() for p in case.parameters(torch.float32)])
    sent = []
    for grads in gradients(case.shapes, GAP + 1, 0):
        mesh.step(lambda _, g=grads: g)  # type: ignore[misc]
        sent.append(sorted((s.kind, s.bytes) for s in mesh.sent))
    return sent


def elements(count: int) -> int:
    """Bytes of float32."""
    return 4 * count


def test_basis_of_the_uncut_side_is_sent_only_when_recomputed() -> None:
    # What the ranks add to the factors of four matrices to their owners, and a basis from each owner.
    due = [(AG, elements(N * N)), (AG, elements(1)), (RS, elements(RANKS * N * N))]
    for kwargs in ({"sides": "short"}, {"sides": "unsharded"}, {"max_precondition_dim": N}):
        assert traffic(ROWS, (M, N), **kwargs) == [sorted(due), [], [], sorted(due)]


def test_replicas_send_bases_when_they_are_due_and_nothing_else() -> None:
    due = sorted([(AG, elements(M * M)), (AG, elements(N * N)), (AG, elements(1))])
    assert traffic(REPLICAS, (M, N)) == [due, [], [], due]


@pytest.mark.parametrize("cls", [oxidion.SOAP, oxidion.SOAPMuon])
@pytest.mark.parametrize(("setting", "transposed"), [(ROWS, False), (COLUMNS, True), (HSDP, False)], ids=str)
def test_unsharded_side_has_the_basis(cls: Any, setting: Setting, transposed: bool) -> None:
    settings = {"lr": 2.0**-6, "weight_decay": 0.125, "precondition_frequency": 2, "sides": "unsharded"}
    shapes = ((12, 8), (8, 12), (9, 7), (3, 6, 5))
    case = Case("unsharded", cls, cls._ALGORITHM, settings, (Group(shapes[:3]),))
    comparison = Comparison(case, setting, torch.float64, "float64")
    comparison.groups = [{**group, "transposed": transposed} for group in comparison.groups]
    # One process would have the basis of the shorter side.
    comparison.states = [{} for _ in comparison.states]
    for grads in gradients(case.shapes, 4, 0):
        comparison.step([on_grid(grad) for grad in grads])
    comparison.check(1e-10)
    for rank in comparison.mesh.ranks:
        for param in rank.params:
            names = {"L", "Q_L"} if transposed else {"R", "Q_R"}
            assert {"L", "R", "Q_L", "Q_R"} & rank.optimizer.state[param].keys() == names
