"""Offload: shards on the CPU of a mesh of devices that are not there, stepped by gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.cases import case_named, optimizer_classes

from . import jobs, offloaded, saving
from .resuming import Groups, run

#: A row of the table of optimizers for every class.
CASES = (
    "dion-quarter",
    "muon-default",
    "normuon-default",
    "dion2-default",
    "nordion2-default",
    "adamw-default",
    "lion-default",
    "ademamix-default",
    "lamb-default",
    "adafactor-beta1",
    "came-default",
    "galore-default",
    "apollo-default",
    "apollo-mini",
    "soap-default",
    "soap_muon-default",
)
LOCAL = {"selection_scope": "global"}
MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Dion", {"rank_fraction": 0.25}),
    ("Muon", {}),
    ("Dion2", LOCAL),
    ("AdamW", {}),
    ("GaLoreAdamW", {"rank": 2, "update_proj_gap": 2}),
    ("CAME", {"lr": 1e-3}),
)
every_model = pytest.mark.parametrize(("name", "keys"), MODELS, ids=[name for name, _ in MODELS])
# Of the way of the steps in float64: sums over ranks have another order than those of one process.
CLOSE = 1e-11


def test_every_class_has_a_row() -> None:
    assert {case_named(name).cls for name in CASES} == set(optimizer_classes())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("setting", ["fsdp2-dim0", "fsdp2-dim1", "tp2-rows"])
def test_offloaded_steps_on_two_processes_equal_one_process(groups: Groups, case: str, setting: str) -> None:
    answers = groups[2].run(jobs.steps_on_a_layout, case, setting, torch.float64, False, offloaded.KIND)
    assert max(answers) <= CLOSE


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("setting", ["hsdp", "fsdp2-tp2"])
def test_offloaded_steps_on_four_processes_equal_one_process(groups: Groups, case: str, setting: str) -> None:
    answers = groups[4].run(jobs.steps_on_a_layout, case, setting, torch.float64, False, offloaded.KIND)
    assert max(answers) <= CLOSE


@every_model
@pytest.mark.parametrize(("ranks", "layout"), [(2, "fsdp"), (4, "hsdp"), (4, "plane")])
def test_states_lie_where_the_shard_lies_also_after_a_load(
    groups: Groups, ranks: int, layout: str, name: str, keys: dict[str, Any]
) -> None:
    for before, after, explained in groups[ranks].run(offloaded.places_of_states, layout, name, keys):
        assert before == after == {"cpu"}
        assert explained == {"cpu"}


@every_model
@pytest.mark.parametrize(
    ("source", "target"),
    [((2, "fsdp"), (4, "plane")), ((4, "hsdp"), (2, "fsdp")), ((4, "fsdp"), (1, "one"))],
    ids=["2-to-plane", "hsdp-to-2", "4-to-1"],
)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async"])
def test_checkpoint_of_offloaded_shards_resumes_on_other_layouts(
    groups: Groups,
    tmp_path: Path,
    source: Any,
    target: Any,
    name: str,
    keys: dict[str, Any],
    asynchronous: bool,
) -> None:
    folder = str(tmp_path / "checkpoint")
    wanted = run(groups, source[0], offloaded.save, folder, source[1], name, keys, asynchronous)
    got, places = run(groups, target[0], offloaded.load, folder, target[1], name, keys)
    assert jobs.furthest(got, wanted) <= CLOSE
    assert places == ({"cpu"} if target[1] != "one" else {"plain cpu"})


@every_model
@pytest.mark.parametrize("offloaded_first", [True, False], ids=["offloaded-first", "offloaded-then"])
def test_checkpoint_goes_on_with_and_without_offload(
    groups: Groups, tmp_path: Path, name: str, keys: dict[str, Any], offloaded_first: bool
) -> None:
    folder, plain = str(tmp_path / "checkpoint"), (name, keys, torch.float64)
    if offloaded_first:
        wanted = run(groups, 2, offloaded.save, folder, "fsdp", name, keys, False)
        got, _ = run(groups, 2, saving.load, folder, "fsdp", *plain)
    else:
        wanted = run(groups, 2, saving.save, folder, "fsdp", *plain)
        got, places = run(groups, 2, offloaded.load, folder, "fsdp", name, keys)
        assert places == {"cpu"}
    assert jobs.furthest(got, wanted) <= CLOSE


@every_model
def test_offloaded_checkpoint_on_the_same_layout_is_bit_equal(
    groups: Groups, tmp_path: Path, name: str, keys: dict[str, Any]
) -> None:
    folder = str(tmp_path / "checkpoint")
    wanted = run(groups, 4, offloaded.save, folder, "plane", name, keys, False)
    got, _ = run(groups, 4, offloaded.load, folder, "plane", name, keys)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


@every_model
def test_state_dicts_on_the_cpu_hold_the_states(groups: Groups, name: str, keys: dict[str, Any]) -> None:
    for count, worst, places in groups[2].run(offloaded.offloaded_state_dict, "fsdp", name, keys):
        assert worst == 0.0
        assert places == {"cpu"}
        assert count >= 5  # of each parameter one at least


@every_model
def test_scaler_steps_offloaded_shards_or_skips_infinities(
    groups: Groups, name: str, keys: dict[str, Any]
) -> None:
    for far, changed, scale in groups[2].run(offloaded.scaled, "fsdp", name, keys):
        assert far <= CLOSE
        assert not changed
        assert scale == 512.0


def test_group_without_a_cpu_backend_is_refused_where_needed(groups: Groups) -> None:
    for text, _ in groups[2].run(offloaded.without_backend, "Muon"):
        assert "the ranks [0, 1] cannot exchange tensors on cpu" in text
        assert "offloaded to the CPU" in text
        assert "cpu:gloo,cuda:nccl" in text
    for text, states in groups[2].run(offloaded.without_backend, "AdamW"):
        assert text == ""
        assert states == ["exp_avg", "exp_avg_sq"]


def test_all_ranks_raise_if_only_one_has_offloaded(groups: Groups) -> None:
    for error, text, same, devices in groups[2].run(offloaded.on_another_device):
        assert error == "PlanMismatch"
        assert "rank 0 has parameters on cpu; rank 1 has parameters on cuda" in text
        assert same
        assert devices == ["cpu"]


@pytest.mark.parametrize("name", ["Dion", "Muon", "NorMuon", "AdamW", "Lion", "Lamb"])
@pytest.mark.parametrize(("ranks", "layout"), [(2, "fsdp"), (4, "hsdp"), (4, "plane")])
def test_model_under_the_policy_of_fsdp2_equals_one_process(
    groups: Groups, ranks: int, layout: str, name: str
) -> None:
    for far, places, pinned in groups[ranks].run(offloaded.wrapped, layout, name):
        assert far <= CLOSE
        assert places == {"cpu"}
        assert pinned == {False}
