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


def test_one_basis_of_the_uncut_side_sends_nothing_until_it_is_due() -> None:
    # What the ranks add to the factors of four matrices to their owners, and a basis from each owner.
    due = [(AG, elements(N * N)), (AG, elements(1)), (RS, elements(RANKS * N * N))]
    for kwargs in ({"sides": "short"}, {"sides": "unsharded"}, {"max_precondition_dim": N}):
        assert traffic(ROWS, (M, N), **kwargs) == [sorted(due), [], [], sorted(due)]


def test_replicas_send_bases_when_they_are_due_and_nothing_else() -> None:
    due = sorted([(AG, elements(M * M)), (AG, elements(N * N)), (AG, elements(1))])
    assert traffic(REPLICAS, (M, N)) == [due, [], [], due]


def test_two_bases_send_five_times_the_matrix_and_four_squares_of_its_sides() -> None:
    # A rank's parts of four matrices, or of one that it owns.
    part = lambda count: (A2A, elements(count))  # noqa: E731
    every = [part(M * N)] * 5 + [part(M * M)] * 2 + [part(N * N)] * 2
    # Factors and bases to the owner, bases back; the number of each matrix, which all ranks have, comes back.
    due = [part(M * M)] * 3 + [part(N * N)] * 3 + [(AG, elements(1))]
    sent = traffic(ROWS, (M, N))
    assert sent == [sorted(every + due), sorted(every), sorted(every), sorted(every + due)]


def test_whitened_factors_send_their_eigenvalues_and_what_these_take() -> None:
    # Vectors of the cut rows lie with the ranks as the rows do, those of the columns with all.
    plain, sent = traffic(ROWS, (M, N)), traffic(ROWS, (M, N), variant="kl")
    more = [(A2A, elements(M))] * 2 + [(AG, elements(N))]
    assert sent == [sorted([*every, *more]) for every in plain]
    assert traffic(REPLICAS, (M, N), variant="kl") == traffic(REPLICAS, (M, N))
    assert traffic(ROWS, (M, N), variant="kl", owned_states=True) == traffic(ROWS, (M, N), owned_states=True)


@pytest.mark.parametrize("cls", [oxidion.SOAP, oxidion.SOAPMuon])
@pytest.mark.parametrize(("setting", "transposed"), [(ROWS, False), (COLUMNS, True), (HSDP, False)], ids=str)
def test_unsharded_side_has_the_basis(cls: Any, setting: Setting, transposed: bool) -> None:
    settings = {"lr": 2.0**-6, "weight_decay": 0.125, "precondition_frequency": 2, "sides": "unsharded"}
    shapes = ((12, 8), (8, 12), (9, 7), (3, 6, 5))
    case = Case("unsharded", cls, cls.ALGORITHM, settings, (Group(shapes[:3]),))
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


@pytest.mark.parametrize("shape", [(2, 2), (3, 2)])
def test_ranks_without_a_part_keep_eigenvalues_that_are_numbers(shape: Shape) -> None:
    """They have no square to see by that a gradient was not finite, and the eigenvalues of the uncut side."""
    case = Case(
        "kl", oxidion.SOAP, "soap", {"variant": "kl", "precondition_frequency": 1}, (Group((shape,) * 8),)
    )
    mesh = SimMesh(ROWS.axes, case.build, layouts_for(case, ROWS.place), extra=ROWS.extra)
    full = [p.detach() for p in case.parameters(torch.float64)]
    mesh.build(full)
    single = SimMesh({"fs": 1}, case.build, layouts_for(case, ROWS.place))
    single.build([p.clone() for p in full])
    for step, grads in enumerate(gradients(case.shapes, 4, 0)):
        if step == 2:
            grads = [grad.clone().fill_(float("nan")) for grad in grads]
        for each in (mesh, single):
            each.step(lambda _, g=grads: [grad.clone() for grad in g])  # type: ignore[misc]
    for number in range(8):
        expected = single.ranks[0].optimizer.state[single.ranks[0].params[number]]["eigen_right"]
        assert bool(expected.isfinite().all())
        for rank in mesh.ranks:
            torch.testing.assert_close(rank.optimizer.state[rank.params[number]]["eigen_right"], expected)
