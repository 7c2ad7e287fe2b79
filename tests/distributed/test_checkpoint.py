"""Checkpoints: written on one layout, read on another, and what they hold."""

from __future__ import annotations

import copy
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oxidion
from oxidion._energy.report import report
from support.features import FEATURES, KINDS
from support.workers import Workers

from . import saving
from .resuming import Groups, goes_on, plain_state_resumes_bit_equal, resumes_bit_equal, run

# Of the way of six steps in float64; gradients are summed in another order on every layout.
CLOSE = 1e-11
DTYPES = {"Dion": {"state_dtype": torch.bfloat16}, "AdamW": {"state_dtype": torch.bfloat16}}


WAYS = [
    ((4, "fsdp"), (2, "fsdp")),
    ((4, "fsdp"), (1, "one")),
    ((2, "fsdp"), (4, "fsdp")),
    ((1, "one"), (4, "fsdp")),
    ((4, "fsdp"), (4, "plane")),
    ((4, "plane"), (2, "fsdp")),
    ((4, "hsdp"), (4, "fsdp")),
    ((4, "hsdp"), (1, "one")),
]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("AdamW", {"average": "schedule_free"}),
        ("Muon", {"average": "schedule_free", "weight_decay": 0.0}),
        ("Lion", {"average": "ema", "average_decay": 0.5}),
        ("Lamb", {"average": "ema", "average_start": 1}),
        ("AdamW", {"average": "ema", "average_decay": 0.5, "average_dtype": "bfloat16"}),
        ("AdamW", {"average": "schedule_free", "average_dtype": "bfloat16"}),
    ],
    ids=["free", "free-muon", "ema", "late-ema", "narrow-ema", "narrow-free"],
)
@pytest.mark.parametrize(("source", "target"), [WAYS[1], WAYS[4], WAYS[6]], ids=lambda w: f"{w[0]}-{w[1]}")
def test_averages_of_one_layout_go_on_on_another(
    groups: Groups,
    tmp_path: Path,
    source: tuple[int, str],
    target: tuple[int, str],
    name: str,
    keys: dict[str, Any],
) -> None:
    error, dtypes = goes_on(groups, tmp_path, source, target, name, keys)
    assert error <= CLOSE
    assert any("average" in key for key in dtypes)


ON_ANOTHER = ("late-ema", "schedule-free", "hyperball", "both", "row-floor", "cautious", "amsgrad")
"""Features that do not depend on the layout to the last bit."""
CELLS = [(name, feature) for feature in ON_ANOTHER for name in FEATURES[feature].classes]


@pytest.mark.parametrize(("name", "feature"), CELLS)
def test_every_feature_goes_on_on_another_layout(
    groups: Groups, tmp_path: Path, name: str, feature: str
) -> None:
    keys = {**KINDS[name], **FEATURES[feature].keys}
    error, _ = goes_on(groups, tmp_path, (4, "plane"), (2, "fsdp"), name, keys)
    assert error <= CLOSE


EIGHT_BITS = {"state_bits": 8, "min_quant_numel": 30, "block_size": 8}  # matrices, and not their biases
OF_OWNERS = [
    ("SOAP", {**KINDS["SOAP"], **EIGHT_BITS}),
    ("SOAPMuon", {**KINDS["SOAP"], **EIGHT_BITS, "orth_dtype": "float64"}),
    ("GaLoreAdamW", {**KINDS["GaLoreAdamW"], **EIGHT_BITS, "owned_states": True}),
]


@pytest.mark.parametrize(("name", "keys"), OF_OWNERS, ids=lambda v: v if isinstance(v, str) else "")
def test_owner_sharded_8_bit_states_resume_on_fewer_ranks(
    groups: Groups, tmp_path: Path, name: str, keys: dict[str, Any]
) -> None:
    error, dtypes = goes_on(groups, tmp_path, (4, "fsdp"), (2, "fsdp"), name, keys)
    assert error <= CLOSE
    assert any(key.endswith("_absmax") for key in dtypes)


@pytest.mark.parametrize("name", ["MuonH", "Muon", "Dion", "Dion2", "AdamW", "SOAP"])
@pytest.mark.parametrize(("source", "target"), [WAYS[1], WAYS[4], WAYS[6]], ids=lambda w: f"{w[0]}-{w[1]}")
def test_weight_norms_of_one_layout_go_on_on_another(
    groups: Groups, tmp_path: Path, source: tuple[int, str], target: tuple[int, str], name: str
) -> None:
    keys: dict[str, Any] = {} if name in ("AdamW", "SOAP") else {"orth_dtype": "float64"}
    if name == "Muon":
        keys["weight_norm"] = "row_floor"
    elif name != "MuonH":
        keys |= {"weight_norm": "hyperball", "weight_decay": 0.0}
    if name == "Dion2":
        keys["selection_scope"] = "global"
    error, dtypes = goes_on(groups, tmp_path, source, target, name, keys)
    assert error <= CLOSE
    assert any("radius" in key for key in dtypes) == (name != "Muon")


@pytest.mark.parametrize("name", ["Dion", "Muon", "AdamW", "Lion"])
@pytest.mark.parametrize(("source", "target"), WAYS, ids=lambda w: f"{w[0]}-{w[1]}")
def test_checkpoint_of_one_layout_goes_on_on_another(
    groups: Groups, tmp_path: Path, name: str, source: Any, target: Any
) -> None:
    keys = {"rank_fraction": 0.25} if name == "Dion" else {}
    error, _ = goes_on(groups, tmp_path, source, target, name, keys)
    assert error <= CLOSE


@pytest.mark.parametrize("name", ["Dion", "Muon", "AdamW", "Lion"])
@pytest.mark.parametrize("layout", ["fsdp", "plane", "strided"])
def test_checkpoint_on_the_same_layout_resumes_bit_equal(
    groups: Groups, tmp_path: Path, name: str, layout: str
) -> None:
    assert resumes_bit_equal(groups, tmp_path, layout, name, {})


@pytest.mark.parametrize("name", ["Dion", "Muon", "AdamW", "Lion"])
@pytest.mark.parametrize("layout", ["fsdp", "plane"])
def test_plain_state_dict_resumes_bit_equal(groups: Groups, name: str, layout: str) -> None:
    assert plain_state_resumes_bit_equal(groups, layout, name, {})


@pytest.mark.parametrize(
    "name", ["Dion", "Muon", "NorMuon", "NorDion2", "AdamW", "Lion", "Adafactor", "CAME"]
)
@pytest.mark.parametrize("layout", ["fsdp", "plane"])
def test_state_dict_of_rank_0_is_broadcast_and_resumes_bit_equal(
    groups: Groups, layout: str, name: str
) -> None:
    sizes = []
    keys = {"lr": None} if name == "Adafactor" else {}
    for went_on, resumed, size in groups[4].run(saving.broadcast_resume, layout, name, keys):
        sizes.append(size)
        assert all(torch.equal(one, other) for one, other in zip(went_on, resumed, strict=True))
    assert sizes[0] > 0
    assert sizes[1:] == [0, 0, 0], "more ranks than the first have the state dict"


def test_compressed_sync_stays_compressed_after_a_plain_resume(groups: Groups) -> None:
    assert plain_state_resumes_bit_equal(groups, "hsdp", "Dion", {"rank_fraction": 0.25})


@pytest.mark.parametrize("name", ["Dion", "AdamW"])
def test_dtype_of_states_survives_a_change_of_layout(groups: Groups, tmp_path: Path, name: str) -> None:
    _, dtypes = goes_on(groups, tmp_path, (4, "fsdp"), (2, "fsdp"), name, DTYPES[name])
    kept = {key: dtype for key, dtype in dtypes.items() if not key.endswith("step")}
    assert kept
    assert set(kept.values()) == {"torch.bfloat16"}


def test_asynchronous_save_holds_the_state_of_its_moment(groups: Groups, tmp_path: Path) -> None:
    assert resumes_bit_equal(groups, tmp_path, "fsdp", "Dion", {}, asynchronous=True)


def test_states_have_the_placements_that_match_the_parameter(groups: Groups) -> None:
    rows = run(groups, 4, saving.placements, "fsdp")
    # [16, 8] is cut along its long side: Q belongs to the other, its columns are spread. [12, 16] and [3, 12]
    # are cut along their short side, which Q has.
    assert rows == [
        ("0.weight", "(Shard(dim=0),)", "(Shard(dim=0),)", "(Shard(dim=1),)"),
        ("2.weight", "(Shard(dim=0),)", "(Shard(dim=0),)", "(Shard(dim=0),)"),
        ("4.weight", "(Shard(dim=0),)", "(Shard(dim=0),)", "(Shard(dim=0),)"),
    ]
    rows = run(groups, 4, saving.placements, "plane")
    assert rows[0] == ("0.weight", *["(Shard(dim=1), Shard(dim=0))"] * 2, "(Shard(dim=0), Shard(dim=1))")
    assert rows[1] == ("2.weight", *["(Shard(dim=0), Shard(dim=1))"] * 2, "(Shard(dim=0), Shard(dim=1))")


def test_synchronizing_makes_decoupled_momenta_equal(groups: Groups) -> None:
    for before, after in groups[4].run(saving.spread_of_momentum):
        assert before > 1e-3
        assert after == 0.0


def test_checkpoint_of_plain_tensors_goes_on_in_dtensors(groups: Groups) -> None:
    torch.manual_seed(0)
    full = [torch.randn(10, 6), torch.randn(5, 12)]
    params = [nn.Parameter(p.clone()) for p in full]
    optimizer = oxidion.Dion(params, rank_fraction=0.5)
    grads = [torch.randn_like(p) for p in full]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()
    saved, middle = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    optimizer.step()
    got = groups[4].run(saving.foreign, saved, middle, grads)[0]
    assert all(float((a - b.detach()).abs().max()) <= 1e-6 for a, b in zip(got, params, strict=True))


@pytest.mark.parametrize("named", [True, False], ids=["with-meshes", "without-meshes"])
def test_sharded_checkpoint_of_the_reference_goes_on(groups: Groups, named: bool) -> None:
    for errors in groups[4].run(saving.of_the_reference, named):
        assert max(errors) <= 2e-6


@pytest.mark.parametrize("algorithm", ["muon", "normuon"])
def test_sharded_checkpoint_of_the_reference_of_muon_goes_on(groups: Groups, algorithm: str) -> None:
    for errors in groups[4].run(saving.orthonormal_of_the_reference, algorithm):
        assert max(errors) <= 1e-12


def test_folder_of_ranks_gets_its_name_when_all_have_written(four: Workers, tmp_path: Path) -> None:
    answers = four.run(saving.whole_folder_of_ranks, str(tmp_path), None)
    assert answers == [(None, "step-00000003", [f"rank{rank}" for rank in range(4)])] * 4
    again = four.run(saving.whole_folder_of_ranks, str(tmp_path), None)
    raised = [said for said, *_ in again]
    assert raised[0].startswith("FileExistsError: ")
    assert all(
        said.startswith("RuntimeError: no checkpoint was written: rank 0 of the group failed with FileExists")
        for said in raised[1:]
    )


@pytest.mark.parametrize("failing", [0, 2])
def test_folder_of_several_ranks_has_no_name_where_one_failed(
    four: Workers, tmp_path: Path, failing: int
) -> None:
    for rank, (said, *found) in enumerate(four.run(saving.whole_folder_of_ranks, str(tmp_path), failing)):
        own, others = "FileNotFoundError: ", f"RuntimeError: no checkpoint was written: rank {failing} of the"
        assert said.startswith(own if rank == failing else others)
        assert found == [None, []]


@pytest.mark.parametrize("layout", ["fsdp", "plane", "strided"])
def test_energies_of_momenta_are_those_of_one_process(groups: Groups, tmp_path: Path, layout: str) -> None:
    made = []
    for ranks, where in ((4, layout), (1, "one")):
        folder = tmp_path / where
        run(groups, ranks, saving.save, str(folder), where, "Muon", {}, torch.float64)
        asked: dict[str, Any] = {"key": None, "names": None, "match": "", "energy": 0.9}
        made.append(report([folder], fractions=[Fraction(1, 4), Fraction(1, 2)], **asked))
    assert [row.name for row in made[0].rows] == [row.name for row in made[1].rows]
    assert len(made[0].rows) == 3
    for row, wanted in zip(made[0].rows, made[1].rows, strict=True):
        assert row.curve == pytest.approx(wanted.curve, rel=1e-9)


@pytest.mark.parametrize("is_ours", [False, True])
def test_checkpoints_are_written_during_steps(groups: Groups, tmp_path: Path, is_ours: bool) -> None:
    """Over the default group both by the thread that saves and by steps, whose messages would meet."""
    for differences in groups[2].run(saving.save_during_steps, str(tmp_path / "run"), is_ours):
        assert not any(bool(difference.any()) for difference in differences)
    assert len(list((tmp_path / "run").iterdir())) == (2 if is_ours else 4)
