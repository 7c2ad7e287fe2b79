"""NorMuon, Dion2, NorDion2 and blocks of rows and columns on real processes over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from . import family, jobs
from .resuming import Groups, goes_on, plain_state_resumes_bit_equal, resumes_bit_equal

GLOBAL: dict[str, Any] = {"selection_scope": "global", "fraction": 0.5}
MODELS: tuple[tuple[str, dict[str, Any]], ...] = (("NorMuon", {}), ("Dion2", GLOBAL), ("NorDion2", GLOBAL))
# Of the way of the steps in float64; gradients are summed in another order on every layout.
CLOSE = 1e-11


@pytest.mark.parametrize(
    "case",
    [
        "normuon-default",
        "normuon-flatten",
        "normuon-column-split",
        "dion2-default",
        "dion2-column-heads",
        "nordion2-default",
        "nordion2-split",
        "dion-heads",
        "dion-column-split",
        "muon-column-heads",
    ],
)
@pytest.mark.parametrize("setting", ["fsdp4-dim0", "fsdp4-dim1", "hsdp", "fsdp2-tp2"])
def test_steps_on_four_processes_equal_one_process(groups: Groups, case: str, setting: str) -> None:
    assert max(groups[4].run(jobs.steps_on_a_layout, case, setting, torch.float64, False)) <= 1e-12


@pytest.mark.parametrize(("name", "keys"), MODELS, ids=[name for name, _ in MODELS])
@pytest.mark.parametrize("kind", ["rows", "columns", "ddp", "hsdp"])
def test_wrapped_model_equals_one_process(groups: Groups, kind: str, name: str, keys: dict[str, Any]) -> None:
    for world, named in ((2, True), (4, False)):
        if kind != "hsdp" or world == 4:
            assert max(groups[world].run(family.wrapped_model, kind, name, keys, named)) <= CLOSE


@pytest.mark.parametrize("name", ["Dion2", "NorDion2"])
@pytest.mark.parametrize("setting", ["fsdp4-dim0", "fsdp4-dim1", "hsdp", "fsdp2-tp2"])
def test_local_selection_on_processes_equals_the_simulated_ranks(
    groups: Groups, name: str, setting: str
) -> None:
    assert max(groups[4].run(family.local_steps, name, setting, {})) <= 1e-12


@pytest.mark.parametrize(
    ("name", "kwargs", "comparable"),
    [
        ("NorMuon", {}, True),
        ("NorMuon", {"norm_scope": "shard"}, False),
        ("Dion2", {}, False),
        ("Dion2", {"selection_scope": "global"}, True),
        ("NorDion2", {}, False),
        ("NorDion2", {"selection_scope": "global"}, True),
        ("NorDion2", {"selection_scope": "global", "norm_scope": "shard"}, False),
    ],
)
def test_verify_says_nothing_where_the_layout_decides(
    groups: Groups, name: str, kwargs: dict[str, Any], comparable: bool
) -> None:
    for sharded, whole in groups[2].run(family.verified, name, kwargs):
        assert whole is not None
        assert whole < 1e-4
        assert (sharded is not None) == comparable
        assert sharded is None or sharded < 1e-4


@pytest.mark.parametrize(("name", "keys"), MODELS, ids=[name for name, _ in MODELS])
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
    if name != "Dion2":
        assert any(key.endswith("variance_neuron") for key in dtypes)


@pytest.mark.parametrize("name", ["NorMuon", "Dion2", "NorDion2"])
@pytest.mark.parametrize("layout", ["fsdp", "plane", "strided"])
def test_checkpoint_on_the_same_layout_resumes_bit_equal(
    groups: Groups, tmp_path: Path, name: str, layout: str
) -> None:
    assert resumes_bit_equal(groups, tmp_path, layout, name, {})
    assert plain_state_resumes_bit_equal(groups, layout, name, {})
