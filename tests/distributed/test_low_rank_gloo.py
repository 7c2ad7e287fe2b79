"""GaLore and APOLLO on real processes over gloo, and their checkpoints between layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from . import family, jobs
from .resuming import Groups, goes_on, plain_state_resumes_bit_equal, resumes_bit_equal

GALORE = {"rank": 2, "update_proj_gap": 2}
MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("GaLoreAdamW", GALORE),
    ("GaLoreAdamW", {**GALORE, "rotate_moments": True, "stagger": True}),
    ("APOLLOAdamW", GALORE),
    ("APOLLOMini", {"update_proj_gap": 2}),
)
IDS = ["galore", "galore-rotate-stagger", "apollo", "mini"]
OWNED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("GaLoreAdamW", {**GALORE, "rotate_moments": True, "state_bits": 32, "owned_states": True}),
    ("APOLLOAdamW", {**GALORE, "owned_states": True}),
    ("APOLLOMini", {"update_proj_gap": 2, "owned_states": True}),
)
OWNED_IDS = ["galore-owned", "apollo-owned", "mini-owned"]
"""Moments with the owners of matrices; a checkpoint needs the word of all ranks first."""
# Of the way of the steps in float64; gradients are summed in another order on every layout.
CLOSE = 1e-11


@pytest.mark.parametrize(
    "case",
    [
        *(
            "galore-default",
            "galore-rotate",
            "galore-exact",
            "galore-full",
            "apollo-default",
            "apollo-tensor",
        ),
        *("galore-owned", "galore-owned-rotate-full", "apollo-owned", "apollo-owned-tensor"),
    ],
)
@pytest.mark.parametrize("setting", ["fsdp4-dim0", "fsdp4-dim1", "hsdp", "fsdp2-tp2"])
def test_steps_on_four_processes_equal_one_process(groups: Groups, case: str, setting: str) -> None:
    assert max(groups[4].run(jobs.steps_on_a_layout, case, setting, torch.float64, False)) <= 1e-11


@pytest.mark.parametrize(
    ("name", "keys"),
    [*MODELS, *OWNED],
    ids=[*IDS, *OWNED_IDS],
)
@pytest.mark.parametrize("kind", ["rows", "columns", "ddp"])
def test_wrapped_model_on_two_processes_equals_one_process(
    groups: Groups, kind: str, name: str, keys: dict[str, Any]
) -> None:
    assert max(groups[2].run(family.wrapped_model, kind, name, keys, False)) <= CLOSE


@pytest.mark.parametrize(("name", "keys"), MODELS, ids=IDS)
def test_verify_finds_the_reference_on_shards(groups: Groups, name: str, keys: dict[str, Any]) -> None:
    for sharded, whole in groups[2].run(family.verified, name, keys):
        assert whole < 1e-4
        assert sharded < 1e-4


# Three steps before and three after: a projection is scheduled in the second one after loading.
@pytest.mark.parametrize(("name", "keys"), MODELS, ids=IDS)
@pytest.mark.parametrize(
    ("source", "target"),
    [((4, "fsdp"), (2, "fsdp")), ((4, "plane"), (2, "fsdp")), ((1, "one"), (4, "plane"))],
    ids=["4-to-2", "plane-to-2", "1-to-plane"],
)
def test_checkpoint_of_one_layout_goes_on_on_another(
    groups: Groups, tmp_path: Path, name: str, keys: dict[str, Any], source: Any, target: Any
) -> None:
    error, dtypes = goes_on(groups, tmp_path, source, target, name, keys)
    assert error <= CLOSE
    kept = "proj" if name == "GaLoreAdamW" else "update_norm"
    assert any(key.endswith(kept) for key in dtypes)


# From moments with the owners of matrices to moments that are cut as matrices are, and back.
@pytest.mark.parametrize(("name", "keys"), OWNED, ids=OWNED_IDS)
@pytest.mark.parametrize(
    ("source", "target"),
    [((4, "plane"), (2, "fsdp")), ((2, "fsdp"), (4, "plane"))],
    ids=["plane-to-2", "2-to-plane"],
)
@pytest.mark.parametrize("is_owned", [True, False], ids=["from-owners", "to-owners"])
def test_owned_moments_resume_on_layouts_without_owners_and_back(
    groups: Groups,
    tmp_path: Path,
    name: str,
    keys: dict[str, Any],
    source: Any,
    target: Any,
    is_owned: bool,
) -> None:
    before, after = {**keys, "owned_states": is_owned}, {"owned_states": not is_owned}
    error, dtypes = goes_on(groups, tmp_path, source, target, name, before, after)
    assert error <= CLOSE
    assert ("stepped Tensor exp_avg_sq" in dtypes) == (not is_owned), "owners have plain tensors"


@pytest.mark.parametrize(("name", "keys"), MODELS, ids=IDS)
@pytest.mark.parametrize("layout", ["fsdp", "plane", "strided"])
def test_checkpoint_on_the_same_layout_resumes_bit_equal(
    groups: Groups, tmp_path: Path, name: str, keys: dict[str, Any], layout: str
) -> None:
    assert resumes_bit_equal(groups, tmp_path, layout, name, keys)
    assert plain_state_resumes_bit_equal(groups, layout, name, keys)
