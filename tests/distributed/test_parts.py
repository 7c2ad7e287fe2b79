"""Muon on parts of matrices that tensor parallelism keeps as plain tensors, as Megatron does."""

from __future__ import annotations

import pytest

from support.workers import Workers

from . import parts


@pytest.mark.parametrize("tp_mode", ["duplicated", "distributed"])
def test_whole_matrices_in_parts_on_ranks_step_as_in_one_process(two: Workers, tp_mode: str) -> None:
    for error, plain, planned_once, shapes in two.run(parts.train, tp_mode):
        assert error <= 1e-12
        assert plain
        assert planned_once
        assert shapes == [(4, 6), (6, 6), (5, 7)]


def test_parts_step_as_matrices_of_their_own_where_asked_for(two: Workers) -> None:
    for error, plain, _, shapes in two.run(parts.train, "blockwise"):
        assert error > 1e-3
        assert plain
        assert shapes == [(4, 6), (6, 6), (5, 7)]


def test_parts_go_on_after_a_state_dict_or_replacement_by_copies(two: Workers) -> None:
    for restored, replaced, verified in two.run(parts.resume):
        assert restored <= 1e-12
        assert replaced <= 1e-12
        assert verified <= 1e-9


def test_ranks_with_parts_that_disagree_raise(two: Workers) -> None:
    for said in two.run(parts.differ):
        assert "has a gradient" in said


@pytest.mark.parametrize("tp_mode", ["blockwise", "duplicated", "distributed"])
def test_parts_step_as_with_megatrons_own_muon(two: Workers, tp_mode: str) -> None:
    found = two.run(parts.compare_with_megatron, tp_mode)
    if missing := found[0][1]:
        pytest.skip(f"Megatron-Core cannot be imported: {missing}")
    for error, _ in found:
        assert 0.0 < error <= 2e-5  # both in float32. Measured: 3.1e-6


def test_whole_matrices_dealt_by_megatron_step_as_in_one_process(two: Workers) -> None:
    found = two.run(parts.layer_wise)
    if missing := found[0][2]:
        pytest.skip(f"Megatron-Core cannot be imported: {missing}")
    for error, held, _ in found:
        assert held == [2]
        assert error == 0.0
