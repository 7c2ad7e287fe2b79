"""Sizes whose products no integer holds, and matrices that no plan holds: refused in words, never wrapped."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from torch import nn

import oxidion
from oxidion._oxidion import Plan, algorithms

MATRIX = ("muon", "normuon", "dion", "dion2", "nordion2", "galore_adamw", "apollo_adamw")
TOO_LARGE = [
    (2**40, 2**40),
    (2**32, 2**32),
    (2**24, 2**24),
    (2**63, 2),
    (2**64 - 1, 2**64 - 1),
    (0, 2**62),
    (2**62, 0, 2**62),
    (2, 2**24, 2**24),
    (2**48,),
]


def plan(*shapes: tuple[int, ...], algorithm: str = "adamw", **settings: Any) -> Plan:
    """The plan of one process."""
    groups = [{"algorithm": algorithm, **settings}]
    return Plan.of_shapes(groups, [(f"p{i}", shape, "float32", 0, []) for i, shape in enumerate(shapes)])


@pytest.mark.parametrize("shape", TOO_LARGE, ids=str)
@pytest.mark.parametrize("algorithm", sorted({*MATRIX, *algorithms()}))
def test_sizes_whose_product_overflows_are_refused(shape: tuple[int, ...], algorithm: str) -> None:
    if len(shape) < 2 and algorithm in MATRIX:
        pytest.skip("a matrix algorithm refuses vectors of any length")
    words = rf"p1: .* at most 2\^47, .* got shape {re.escape(str(list(shape)))}: split it"
    with pytest.raises(ValueError, match=words):
        plan((4, 4), shape, algorithm=algorithm)


def test_parameters_that_are_too_large_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at most 2\^47 elements together, got more up to p2 of shape"):
        plan((2**46,), (2**46,), (1,))


@pytest.mark.parametrize("algorithm", algorithms())
def test_largest_sizes_are_planned_without_overflow(algorithm: str) -> None:
    shapes = [(2**23, 2**22), (2**22, 2**23), (2**44, 1), (1, 2**44)]
    for shape in shapes:
        made = plan(shape, algorithm=algorithm, rank=4, rank_fraction=2.0**-18, fraction=2.0**-18)
        states = sum(row["state_bytes"] for row in made.rows())
        assert 0 <= states < 2**60
        assert 0 <= made.arena_bytes < 2**62
        assert made.arena_bytes % 64 == 0


@pytest.mark.parametrize("algorithm", MATRIX[:5])
@pytest.mark.parametrize(
    ("shape", "settings", "count"),
    [
        ((2**40, 4, 4), {}, 2**40),
        ((2**12, 2**13, 0, 4), {"interleaved": 1}, 2**25),
        ((2**25, 4), {"num_heads": 2**25}, 2**25),
        ((2**20 + 1, 10, 7), {}, 2**20 + 1),
    ],
)
def test_parameter_of_too_many_matrices_is_refused(
    algorithm: str, shape: tuple[int, ...], settings: dict[str, Any], count: int
) -> None:
    with pytest.raises(ValueError, match=rf"p0: .* at most 1048576 matrices, got {count} of shape .*flatten"):
        plan(shape, algorithm=algorithm, **settings)


def test_plan_of_many_matrices_takes_time_by_their_number() -> None:
    began = time.process_time()
    made = plan((2**19, 10, 7), algorithm="dion")
    # Half as many took 3.8 s where every part began as a copy of all units.
    assert time.process_time() - began < 5
    assert sum(made.work()) > 0


def test_split_sizes_whose_sum_overflows_are_refused() -> None:
    with pytest.raises(ValueError, match="split_sizes must sum to dimension 0"):
        plan((2, 4), algorithm="muon", split_sizes=(2**63 - 1, 2**63 - 1, 4))


def test_optimizer_refuses_an_empty_parameter_with_a_huge_side() -> None:
    param = nn.Parameter(torch.empty(0, 2**50))
    param.grad = torch.empty(0, 2**50)
    with pytest.raises(ValueError, match=r"at most 2\^47.*got shape \[0, 1125899906842624\]"):
        oxidion.AdamW([param]).step()
