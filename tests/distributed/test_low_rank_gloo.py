"""GaLore and APOLLO on real processes over gloo, and their checkpoints between layouts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.workers import Workers, workers

from . import family, jobs, saving

GALORE = {"rank": 2, "update_proj_gap": 2}
MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("GaLoreAdamW", GALORE),
    ("GaLoreAdamW", {**GALORE, "rotate_moments": True, "stagger": True}),
    ("APOLLOAdamW", GALORE),
    ("APOLLOMini", {"update_proj_gap": 2}),
)
IDS = ["galore", "galore-rotate-stagger", "apollo", "mini"]
# Gradients are summed in another order; Adam divides small elements of a projected gradient by themselves.
CLOSE = 5e-4


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, Workers]]:
    with workers(2) as two, workers(4) as four:
        yield {2: two, 4: four}


@pytest.mark.parametrize(
    "case",
    ["galore-default", "galore-rotate", "galore-exact", "galore-full", "apollo-default", "apollo-tensor"],
)
@pytest.mark.parametrize("setting", ["fsdp4-dim0", "fsdp4-dim1", "hsdp", "fsdp2-tp2"])
def test_steps_on_four_processes_equal_one_process(
    groups: dict[int, Workers], case: str, setting: str
) -> None:
    assert max(groups[4].run(jobs.steps_on_a_layout, case, setting, torch.float64, False)) <= 1e-11


@pytest.mark.parametrize(("name", "keys"), MODELS, ids=IDS)
@pytest.mark.parametrize("kind", ["rows", "columns", "ddp"])
def test_wrapped_model_on_two_processes_equals_one_process(
    groups: dict[int, Workers], kind: str, name: str, keys: dict[str, Any]
) -> None:
    assert max(groups[2].run(family.wrapped_model, kind, name, keys, False)) <= CLOSE


@pytest.mark.parametrize(("name", "keys"), MODELS, ids=IDS)
def test_verify_finds_the_reference_on_shards(
    groups: dict[int, Workers], name: str, keys: dict[str, Any]
) -> None:
    for sharded, whole in groups[2].run(family.verified, name, keys):
        assert whole < 1e-4
        assert sharded < 1e-4


def run(groups: dict[int, Workers], ranks: int, job: Any, *args: Any) -> Any:
    """The answer of rank 0; in this process where one rank is wanted."""
    if ranks > 1:
        return groups[ranks].run(job, *args)[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        return job(*args)


def worst(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


# Three steps before and three after: a projection is due in the second one after loading.
@pytest.mark.parametrize(("name", "keys"), MODELS, ids=IDS)
@pytest.mark.parametrize(
    ("source", "target"),
    [((4, "fsdp"), (2, "fsdp")), ((4, "plane"), (2, "fsdp")), ((1, "one"), (4, "plane"))],
    ids=["4-to-2", "plane-to-2", "1-to-plane"],
)
def test_checkpoint_of_one_layout_goes_on_on_another(
    groups: dict[int, Workers], tmp_path: Path, name: str, keys: dict[str, Any], source: Any, target: Any
) -> None:
    folder = str(tmp_path / "checkpoint")
    wanted = run(groups, source[0], saving.save, folder, source[1], name, keys)
    got, dtypes = run(groups, target[0], saving.load, folder, target[1], name, keys)
    assert worst(got, wanted) <= CLOSE
    kept = "proj" if name == "GaLoreAdamW" else "update_norm"
    assert any(key.endswith(kept) for key in dtypes)


@pytest.mark.parametrize(("name", "keys"), MODELS, ids=IDS)
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
