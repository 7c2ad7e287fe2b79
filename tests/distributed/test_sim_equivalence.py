"""A step on any layout equals the step of one process: all ranks simulated in this one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import oxidion
from oxidion._reference.registry import REFERENCE
from support.cases import BASIS_ALGORITHMS, MATRIX_ALGORITHMS, Case, Group, case_named
from support.inputs import Shape, gradients
from support.layouts import Setting, setting_named
from support.sim_mesh import Layout, R, Rank, S, cut

from . import compared
from .comparison import Comparison, on_grid
from .pairs import CHOSEN, LONGER_CHOSEN, LONGER_ROWS, ROWS, WIDE_CHOSEN, WIDE_ROWS

STEPS = 3


def rows(all_rows: Sequence[tuple[Any, ...]], chosen: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Cases and layouts; those that are not chosen are part of the full product, which is slow."""
    names = {tuple(map(str, row)) for row in chosen}
    assert names
    return [
        pytest.param(*row[:2], marks=() if tuple(map(str, row)) in names else pytest.mark.slow)
        for row in all_rows
    ]


def rows_of(dtype: str) -> list[Any]:
    """Rows of one dtype."""
    return rows([row for row in ROWS if row[2] == dtype], CHOSEN)


def run_and_compare_with_one_process(comparison: Comparison, orth_dtype: str, steps: int = STEPS) -> None:
    """Steps of all ranks, of one process and of the reference on the same gradients."""
    case = comparison.case
    single = case.build(comparison.single, orth_dtype=orth_dtype)
    for exact in gradients(case.shapes, steps, 0, flatten=bool(case.kwargs.get("flatten", False))):
        # A mean of rounded gradients would not be the rounded gradient that one process has.
        grads = [on_grid(grad) for grad in exact]
        comparison.step(grads)
        for param, grad in zip(comparison.single, grads, strict=True):
            param.grad = grad.to(param.dtype)
        single.step()


@pytest.mark.parametrize(("case", "setting"), rows_of("float64"), ids=str)
def test_float64_step_on_any_layout_equals_one_process(case: Case, setting: Setting) -> None:
    comparison = Comparison(case, setting, torch.float64, "float64")
    run_and_compare_with_one_process(comparison, "float64")
    # With directions from a sketch, rounding errors grow by the inverse of the gap between directions in it.
    sketched = 1e-11 if case.kwargs.get("svd") == "random" else 1e-12
    comparison.check(1e-10 if case.algorithm in (*MATRIX_ALGORITHMS, *BASIS_ALGORITHMS) else sketched)
    if setting.outer is None:  # named meshes choose the orientation, which one process would not
        comparison.expected = [p.detach() for p in comparison.single]
        # A mean of three gradients is rounded, and divided by small elements before it is orthonormalized.
        comparison.check(1e-11 if case.algorithm == "soap_muon" else 1e-12)


@pytest.mark.parametrize(("case", "setting"), rows_of("float32"), ids=str)
def test_float32_step_on_any_layout_equals_one_process(case: Case, setting: Setting) -> None:
    comparison = Comparison(case, setting, torch.float32, "float32")
    run_and_compare_with_one_process(comparison, "float32")
    comparison.expected = [p.detach().double() for p in comparison.single]
    # Small elements in a basis are divided by their own size, and have the rounding of a mean of large ones.
    comparison.check(1e-3 if case.algorithm in BASIS_ALGORITHMS else 2e-6)


@pytest.mark.parametrize(("case", "setting"), rows(WIDE_ROWS, WIDE_CHOSEN), ids=str)
def test_sixty_four_ranks_equal_one_process(case: Case, setting: Setting) -> None:
    comparison = Comparison(case, setting, torch.float64, "float64")
    run_and_compare_with_one_process(comparison, "float64", 2)
    comparison.expected = [p.detach() for p in comparison.single]
    comparison.check(1e-12)


# Five steps: bases and projections are new in the third one and in the fifth.
@pytest.mark.parametrize(("case", "setting"), rows(LONGER_ROWS, LONGER_CHOSEN), ids=str)
def test_sixty_four_ranks_equal_one_process_where_more_is_due(case: Case, setting: Setting) -> None:
    grads = compared.normal(case.shapes, 5, 0)
    _, params = compared.one_process(case, grads, torch.float64)
    mesh = compared.all_ranks(case, setting, grads, torch.float64)
    assert compared.distance(mesh, case, params) <= 1e-12


def held(rank: Rank) -> list[list[Tensor]]:
    """Copies of the parameters of a rank, each with its states."""
    return [[t.detach().clone() for t in (p, *rank.optimizer.state[p].values())] for p in rank.params]


@pytest.mark.parametrize(
    "name", ["dion-quarter", "galore-default", "apollo-tensor", *(f"{a}-default" for a in MATRIX_ALGORITHMS)]
)
@pytest.mark.parametrize("setting", ["fsdp4-dim0", "ddp4", "hsdp-compressed", "dp2-fsdp2-tp2"])
def test_gradient_missing_everywhere_skips_the_parameter(name: str, setting: str) -> None:
    case, missing = case_named(name), {0, 3}
    comparison = Comparison(case, setting_named(setting), torch.float64, "float64")
    first, second = gradients(case.shapes, 2, 0)
    comparison.step(first)
    before = [held(rank) for rank in comparison.mesh.ranks]
    some = [None if i in missing else grad for i, grad in enumerate(second)]
    comparison.mesh.step(lambda rank: comparison.replica_gradients(rank, some))
    for i, (expected, grad) in enumerate(zip(comparison.expected, second, strict=True)):
        if i not in missing:
            REFERENCE[case.algorithm](expected, grad, comparison.states[i], comparison.groups[i])
    comparison.check(1e-10)
    for rank, olds in zip(comparison.mesh.ranks, before, strict=True):
        for i in missing:
            assert all(torch.equal(new, old) for new, old in zip(held(rank)[i], olds[i], strict=True))


@pytest.mark.parametrize("setting", ["ddp3-compressed", "hsdp-compressed", "dp2-fsdp2-tp2-compressed"])
def test_compressed_replicas_are_equal_when_one_has_no_gradient(setting: str) -> None:
    case = case_named("dion-quarter")
    chosen = setting_named(setting)
    comparison = Comparison(case, chosen, torch.float32, "float32")
    for number, grads in enumerate(gradients(case.shapes, STEPS, 0)):
        scale = [0.0, *(math.sqrt(k + number) for k in range(1, chosen.axes["dp"]))]
        comparison.mesh.step(lambda rank, g=grads, s=scale: [s[rank.at["dp"]] * x for x in g])  # type: ignore[misc]
    for rank in comparison.mesh.ranks:
        twin = next(r for r in comparison.mesh.ranks if {**r.at, "dp": 0} == {**rank.at, "dp": 0})
        for i, (mine, other) in enumerate(zip(rank.params, twin.params, strict=True)):
            assert torch.equal(mine, other)
            mine_q, other_q = (r.optimizer.state[p]["Q"] for r, p in ((rank, mine), (twin, other)))
            assert torch.equal(mine_q, other_q)
            start = cut(comparison.full[i], rank.spans(i, comparison.full[i].shape))
            assert start.numel() == 0 or not torch.equal(mine, start)


@pytest.mark.parametrize("name", ["dion", "muon"])
def test_unequal_shares_of_replicas_equal_one_process(name: str) -> None:
    # Four matrices of one shape and five of another on three ranks: the first rank has more of the one and
    # less of the other, so shares arrive at a stride larger than their length, and are compacted.
    cls = oxidion.Muon if name == "muon" else oxidion.Dion
    kwargs = {} if name == "muon" else {"rank_fraction": 0.5}
    case = Case("unequal", cls, name, kwargs, (Group(((20, 16),) * 4 + ((8, 6),) * 5),))
    comparison = Comparison(case, setting_named("ddp3-compressed"), torch.float64, "float64")
    if name == "muon":
        setting = Setting("", {"dp": 3}, lambda _: {"dp": R}, {"dp": True})
        comparison = Comparison(case, setting, torch.float64, "float64")
    for grads in gradients(case.shapes, 2, 0):
        comparison.step([on_grid(grad) for grad in grads])
    comparison.check(1e-10)


def test_experts_sharded_on_the_first_dimension_send_nothing() -> None:
    case = Case("experts", oxidion.Dion, "dion", {"rank_fraction": 0.5}, (Group(((6, 5, 4), (6, 4, 7))),))
    for cls, algorithm in ((oxidion.Dion, "dion"), (oxidion.Muon, "muon")):
        kwargs = case.kwargs if cls is oxidion.Dion else {}
        experts = Case("experts", cls, algorithm, kwargs, case.groups)
        comparison = Comparison(
            experts, Setting("ep", {"ep": 4}, lambda s: {"ep": S(0)}), torch.float64, "float64"
        )
        assert all(not rank.plan.transfers for rank in comparison.mesh.ranks)
        for grads in gradients(experts.shapes, 2, 0):
            comparison.step(grads)
        comparison.check(1e-10)


def test_ranks_without_an_expert_start_the_same_collectives() -> None:
    # One expert on two ranks of "ep", between matrices that both axes share: what a rank does not store must
    # not change the order in which it joins the others.
    shapes = ((8, 6), (1, 5, 4), (3, 4, 6), (8, 6), (1, 5, 4), (7, 9))
    for cls, algorithm, kwargs in (
        (oxidion.Dion, "dion", {"rank_fraction": 0.5, "max_batch_bytes": 1}),
        (oxidion.Muon, "muon", {}),
    ):
        case = Case("experts", cls, algorithm, kwargs, (Group(shapes),))
        place = lambda s: {"dp": R, "ep": S(0), "tp": S(len(s) - 1)}  # noqa: E731
        setting = Setting("", {"dp": 2, "ep": 2, "tp": 2}, place)
        comparison = Comparison(case, setting, torch.float64, "float64")
        for grads in gradients(shapes, 2, 0):
            comparison.step(grads)
        comparison.check(1e-10)


@pytest.mark.parametrize("name", ["dion-quarter", "muon-default", "dion-mixed"])
def test_one_group_on_different_meshes_equals_one_process(name: str) -> None:
    # Tall matrices on the ranks along "a", others on those along "b", vectors on both.
    def place(shape: Shape) -> Layout:
        if len(shape) < 2:
            return {"a": S(0) if shape else R, "b": R}
        return {"a": S(0)} if shape[0] > shape[1] else {"b": S(1)}

    case = case_named(name)
    comparison = Comparison(case, Setting("", {"a": 2, "b": 3}, place), torch.float64, "float64")
    for grads in gradients(case.shapes, STEPS, 0):
        comparison.step(grads)
    comparison.check(1e-10)


def test_no_step_touches_the_global_generator() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    comparison = Comparison(case_named("dion-quarter"), setting_named("fsdp2-tp2"), torch.float32, "float32")
    comparison.mesh.step(lambda _: gradients(comparison.case.shapes, 1, 0)[0])
    assert torch.equal(before, torch.get_rng_state())
