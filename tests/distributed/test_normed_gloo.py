"""Lamb, Adafactor and CAME on real processes over gloo: steps, collectives, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.layouts import SETTINGS

from . import jobs, normed
from .resuming import Groups, goes_on, plain_state_resumes_bit_equal, resumes_bit_equal

CASES = ("lamb-default", "lamb-clipped", "adafactor-scaled", "adafactor-beta1", "came-default")
MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Lamb", {"weight_decay": 0.1, "debias": "step"}),
    ("Adafactor", {"relative_step": False, "beta1": 0.9}),
    ("Adafactor", {"lr": None}),
    ("CAME", {"lr": 1e-3}),
)
every_model = pytest.mark.parametrize(
    ("name", "keys"), MODELS, ids=[f"{name}-{'-'.join(keys)}" for name, keys in MODELS]
)
# Of the way of the steps in float64; gradients are summed in another order on every layout.
CLOSE = 1e-11


def size_of(axes: dict[str, int]) -> int:
    return int(torch.tensor(list(axes.values())).prod())


FOUR = [s.name for s in SETTINGS if size_of(s.axes) == 4 and "strided" not in s.name and s.outer is None]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("setting", FOUR)
def test_steps_on_four_processes_equal_one_process(groups: Groups, case: str, setting: str) -> None:
    assert max(groups[4].run(jobs.steps_on_a_layout, case, setting, torch.float64, False)) <= 1e-12


@pytest.mark.parametrize(("name", "most"), [("Lamb", 1), ("Adafactor", 2), ("CAME", 3)])
@pytest.mark.parametrize("parameters", [4, 12])
def test_a_step_takes_one_collective_for_each_phase(
    groups: Groups, name: str, most: int, parameters: int
) -> None:
    """In addition to the one in which the ranks agree on the step, for any number of parameters."""
    for counts, planned in groups[4].run(normed.collectives, name, parameters):
        assert counts == most + 1
        assert planned == most


@every_model
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((4, "fsdp"), (2, "fsdp")),
        ((4, "fsdp"), (1, "one")),
        ((4, "fsdp"), (4, "plane")),
        ((1, "one"), (4, "hsdp")),
    ],
    ids=["4-to-2", "4-to-1", "fsdp-to-plane", "1-to-hsdp"],
)
def test_checkpoint_of_one_layout_goes_on_on_another(
    groups: Groups, tmp_path: Path, name: str, keys: dict[str, Any], source: Any, target: Any
) -> None:
    error, dtypes = goes_on(groups, tmp_path, source, target, name, keys)
    assert error <= CLOSE
    if name != "Lamb":
        assert any(key.endswith("exp_avg_sq_row") for key in dtypes)


@every_model
@pytest.mark.parametrize("layout", ["fsdp", "plane", "strided"])
def test_checkpoint_on_the_same_layout_resumes_bit_equal(
    groups: Groups, tmp_path: Path, name: str, keys: dict[str, Any], layout: str
) -> None:
    assert resumes_bit_equal(groups, tmp_path, layout, name, keys)
    assert plain_state_resumes_bit_equal(groups, layout, name, keys)


def test_factors_lie_as_the_sides_that_they_belong_to(groups: Groups) -> None:
    for rows, columns, means in groups[4].run(normed.placements):
        assert rows == "(Shard(dim=0), Replicate())"
        assert columns == "(Replicate(), Shard(dim=0))"
        assert means == "(Replicate(), Replicate())"
