"""Lamb, Adafactor and CAME on real processes over gloo: steps, collectives, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.layouts import SETTINGS
from support.workers import Workers, workers

from . import jobs, normed, saving

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
# Gradients are summed in another order on every layout; a second moment that is nearly zero passes that on.
CLOSE = 2e-5


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, Workers]]:
    with workers(2) as two, workers(4) as four:
        yield {2: two, 4: four}


def size_of(axes: dict[str, int]) -> int:
    return int(torch.tensor(list(axes.values())).prod())


FOUR = [s.name for s in SETTINGS if size_of(s.axes) == 4 and "strided" not in s.name and s.outer is None]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("setting", FOUR)
def test_steps_on_four_processes_equal_one_process(
    groups: dict[int, Workers], case: str, setting: str
) -> None:
    assert max(groups[4].run(jobs.steps_on_a_layout, case, setting, torch.float64, False)) <= 1e-12


@pytest.mark.parametrize(("name", "most"), [("Lamb", 1), ("Adafactor", 2), ("CAME", 3)])
@pytest.mark.parametrize("parameters", [4, 12])
def test_a_step_takes_one_collective_for_each_phase(
    groups: dict[int, Workers], name: str, most: int, parameters: int
) -> None:
    """Beside that in which the ranks agree on the step, and however many parameters there are."""
    for counts, planned in groups[4].run(normed.collectives, name, parameters):
        assert counts == most + 1
        assert planned == most


def run(groups: dict[int, Workers], ranks: int, job: Any, *args: Any) -> Any:
    """The answer of rank 0; in this process where one rank is wanted."""
    if ranks > 1:
        return groups[ranks].run(job, *args)[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        return job(*args)


def worst(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


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
    groups: dict[int, Workers], tmp_path: Path, name: str, keys: dict[str, Any], source: Any, target: Any
) -> None:
    folder = str(tmp_path / "checkpoint")
    wanted = run(groups, source[0], saving.save, folder, source[1], name, keys)
    got, dtypes = run(groups, target[0], saving.load, folder, target[1], name, keys)
    assert worst(got, wanted) <= CLOSE
    if name != "Lamb":
        assert any(key.endswith("exp_avg_sq_row") for key in dtypes)


@every_model
@pytest.mark.parametrize("layout", ["fsdp", "plane", "strided"])
def test_checkpoint_on_the_same_layout_resumes_bit_equal(
    groups: dict[int, Workers], tmp_path: Path, name: str, keys: dict[str, Any], layout: str
) -> None:
    folder = str(tmp_path / "checkpoint")
    wanted = run(groups, 4, saving.save, folder, layout, name, keys)
    got, _ = run(groups, 4, saving.load, folder, layout, name, keys)
    assert worst(got, wanted) == 0.0
    first, second = run(groups, 4, saving.plain_resume, layout, name, keys)
    assert worst(first, second) == 0.0


def test_factors_lie_as_the_sides_that_they_belong_to(groups: dict[int, Workers]) -> None:
    for rows, columns, means in groups[4].run(normed.placements):
        assert rows == "(Shard(dim=0), Replicate())"
        assert columns == "(Replicate(), Shard(dim=0))"
        assert means == "(Replicate(), Replicate())"
