"""Gradients come in every placement that DTensor can redistribute: steps are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from support.workers import Workers

from . import placing

LOW_RANK: dict[str, Any] = {"rank": 4}
CLASSES: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdEMAMix": {},
    "Lion": {},
    "Lamb": {},
    "Adafactor": {"lr": 1e-2, "relative_step": False, "scale_parameter": False},
    "CAME": {"lr": 1e-3},
    "Muon": {},
    "NorMuon": {},
    "Dion": {"rank_fraction": 0.5},
    "Dion2": {"selection_scope": "global"},
    "NorDion2": {"selection_scope": "global"},
    "GaLoreAdamW": LOW_RANK,
    "APOLLOAdamW": LOW_RANK,
    "APOLLOMini": {},
}
MATRIX = ("Muon", "NorMuon", "Dion", "Dion2", "NorDion2")
ONE_AXIS = [
    ("R", ["P", "A", "R", "0", "P", "X", "1"]),
    ("0", ["R", "P", "1", "0", "A"]),
]
TWO_AXES = [("RR", ["PP", "PR", "RP", "0P"]), ("0R", ["0P", "PP", "RR", "PR"]), ("01", ["PP", "10", "RR"])]


@pytest.mark.parametrize(("param", "grads"), ONE_AXIS, ids=lambda value: "".join(value))
@pytest.mark.parametrize("name", CLASSES)
def test_steps_equal_those_of_one_process(two: Workers, name: str, param: str, grads: list[str]) -> None:
    job = placing.steps_with_gradients_laid_out_otherwise
    assert max(two.run(job, name, CLASSES[name], {"tp": 2}, param, grads)) <= 1e-11


@pytest.mark.parametrize(("param", "grads"), TWO_AXES, ids=lambda value: "-".join(value))
@pytest.mark.parametrize("name", ["AdamW", "Lamb", "Dion", "Muon"])
def test_steps_on_two_axes_equal_those_of_one_process(
    four: Workers, name: str, param: str, grads: list[str]
) -> None:
    job = placing.steps_with_gradients_laid_out_otherwise
    assert max(four.run(job, name, CLASSES[name], {"dp": 2, "tp": 2}, param, grads)) <= 1e-11


@pytest.mark.parametrize("name", CLASSES)
def test_norms_along_the_sequence_train_as_on_one_process(two: Workers, name: str) -> None:
    settings = {**CLASSES[name], **({"strict": False} if name in MATRIX else {})}
    assert max(two.run(placing.sequence_parallel_steps, name, settings, 3)) <= 1e-9


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("another mesh", "LayoutError: gain: the gradient is on another device mesh"),
        ("one rank without", "PlanMismatch: gain: its gradient is a sum of contributions on rank 0"),
        ("one rank replicated", "PlanMismatch: gain: its gradient is a sum of contributions on rank 0"),
        ("one rank sharded", "PlanMismatch: gain: rank 0 has a gradient of other placements"),
    ],
)
def test_gradients_that_do_not_fit_are_refused_on_all_ranks(two: Workers, case: str, words: str) -> None:
    for said in two.run(placing.says, case):
        assert words in said
        assert said.endswith("True")


def test_sums_are_planned_once_and_sent_together(two: Workers) -> None:
    for transfers, plan, bound in two.run(placing.planned_sums, 50):
        assert transfers == 1
        assert "gradients not added up" in plan
        assert bound == 1
