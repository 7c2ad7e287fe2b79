"""SOAP and SOAP-Muon on real processes over gloo, and their checkpoints between layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from . import family, jobs
from .resuming import Groups, goes_on, plain_state_resumes_bit_equal, resumes_bit_equal

DUE = {"precondition_frequency": 2}
MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SOAP", DUE),
    ("SOAP", {**DUE, "sides": "short"}),
    ("SOAPMuon", {**DUE, "orth_dtype": "float64"}),
    ("SOAP", {**DUE, "owned_states": True}),
)
IDS = ["soap", "soap-short", "soap-muon", "soap-owned"]
# Of the way of the steps in float64; gradients are summed in another order on every layout, and the smallest
# elements in a basis are moved most by that.
CLOSE = 1e-9


@pytest.mark.parametrize(
    "case",
    ["soap-default", "soap-short", "soap-heads", "soap_muon-default"],
)
@pytest.mark.parametrize("setting", ["fsdp4-dim0", "hsdp", "fsdp2-tp2"])
def test_steps_on_four_processes_equal_one_process(groups: Groups, case: str, setting: str) -> None:
    assert max(groups[4].run(jobs.steps_on_a_layout, case, setting, torch.float64, False)) <= 1e-11


@pytest.mark.parametrize(
    ("case", "setting"),
    [
        ("soap-merged-rows", "fsdp4-dim0"),
        ("soap-merged-rows", "hsdp"),
        *(("soap-merged-columns", setting) for setting in ("fsdp4-dim0", "fsdp4-dim1", "fsdp2-tp2")),
    ],
)
def test_merged_dimensions_on_four_processes_equal_one_process(
    groups: Groups, case: str, setting: str
) -> None:
    assert max(groups[4].run(jobs.steps_on_a_layout, case, setting, torch.float64, False)) <= 1e-11


@pytest.mark.parametrize(("name", "keys"), MODELS, ids=IDS)
@pytest.mark.parametrize("kind", ["rows", "ddp"])
def test_wrapped_model_on_two_processes_equals_one_process(
    groups: Groups, kind: str, name: str, keys: dict[str, Any]
) -> None:
    assert max(groups[2].run(family.wrapped_model, kind, name, keys, False)) <= CLOSE


@pytest.mark.parametrize(("name", "keys"), MODELS, ids=IDS)
@pytest.mark.parametrize(
    ("source", "target"),
    [((4, "plane"), (2, "fsdp")), ((1, "one"), (4, "plane"))],
    ids=["plane-to-2", "1-to-plane"],
)
def test_checkpoint_of_one_layout_goes_on_on_another(
    groups: Groups, tmp_path: Path, name: str, keys: dict[str, Any], source: Any, target: Any
) -> None:
    error, dtypes = goes_on(groups, tmp_path, source, target, name, keys)
    assert error <= CLOSE
    assert any(key.endswith("Q_R") for key in dtypes)


@pytest.mark.parametrize(("name", "keys"), MODELS, ids=IDS)
@pytest.mark.parametrize("layout", ["fsdp", "plane"])
def test_checkpoint_on_the_same_layout_resumes_bit_equal(
    groups: Groups, tmp_path: Path, name: str, keys: dict[str, Any], layout: str
) -> None:
    assert resumes_bit_equal(groups, tmp_path, layout, name, keys)
    assert plain_state_resumes_bit_equal(groups, layout, name, keys)
