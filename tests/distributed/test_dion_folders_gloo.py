"""Folders of microsoft/dion's training script on several ranks: read on other meshes, and written back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import oxidion
from support import dion_folder
from support.workers import Workers

from . import folders, jobs
from .resuming import Groups, Place, run

CLOSE = 1e-10
PLACES: list[Place] = [(2, "fsdp"), (4, "fsdp"), (4, "plane"), (1, "one")]
SETTINGS = [("Dion", "adamw", "short"), ("Dion", "lion", "rows"), ("Muon", "adamw", "rows")]


@pytest.mark.parametrize(("kind", "scalar", "side"), SETTINGS)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]}-{place[1]}")
def test_folder_of_two_ranks_goes_on_on_another_mesh(
    groups: Groups, tmp_path: Path, place: Place, kind: str, scalar: str, side: str
) -> None:
    groups[2].run(folders.write, str(tmp_path / "theirs"), kind, scalar, side)
    got, extra, is_sharded = run(
        groups, place[0], folders.load, str(tmp_path / "theirs"), place[1], kind, scalar
    )
    muon = oxidion.Muon([torch.nn.Parameter(torch.ones(2, 2))], orth_dtype="float64").param_groups[0]
    wanted = dion_folder.go_on(jobs.model(), kind, scalar, side, muon, jobs.batches(3))
    assert extra == dion_folder.EXTRA
    assert is_sharded == (place[0] > 1)
    start, _ = dion_folder.tensors(dion_folder.shapes_of(jobs.model()), kind, scalar, side)
    for mine, naive, before in zip(got, wanted, start.values(), strict=True):
        assert float((mine - naive).norm() / (naive - before).norm()) <= CLOSE


@pytest.mark.parametrize(("kind", "side"), [("Dion", "rows"), ("Dion", "short"), ("Muon", "rows")])
def test_four_ranks_write_back_what_two_have_written(
    groups: Groups, tmp_path: Path, kind: str, side: str
) -> None:
    groups[2].run(folders.write, str(tmp_path / "theirs"), kind, "adamw", side)
    groups[4].run(folders.there_and_back, str(tmp_path / "theirs"), str(tmp_path / "back"), "fsdp", kind)
    shapes = dion_folder.shapes_of(jobs.model())
    weights, states = dion_folder.tensors(shapes, kind, "adamw", side)
    empty = {
        "model": {name: torch.zeros_like(value) for name, value in weights.items()},
        "optimizer": {
            "state": {n: {k: torch.zeros_like(v) for k, v in own.items()} for n, own in states.items()},
            "param_groups": [dict.fromkeys(g, 0) for g in dion_folder.groups_of(shapes, kind, "adamw")],
        },
        "step": 0,
    }
    found = run(groups, 1, folders.read_whole, str(tmp_path / "back"), empty)
    assert found["step"] == dion_folder.STEP
    for name, value in weights.items():
        assert torch.equal(found["model"][name], value)
        for key, state in states[name].items():
            assert torch.equal(found["optimizer"]["state"][name][key], state), (name, key)
    for made, wanted in zip(
        found["optimizer"]["param_groups"], dion_folder.groups_of(shapes, kind, "adamw"), strict=True
    ):
        ignored = {"betas", "beta1"} if wanted["algorithm"] != "adamw" else {"betas"}
        assert {k: v for k, v in made.items() if k not in ignored} == {
            k: v for k, v in wanted.items() if k not in ignored
        }


@pytest.mark.parametrize("layout", ["fsdp", "plane"])
def test_four_ranks_write_q_on_the_side_of_rows(groups: Groups, tmp_path: Path, layout: str) -> None:
    theirs, back = str(tmp_path / "theirs"), str(tmp_path / "back")
    groups[2].run(folders.write, theirs, "Dion", "adamw", "short")
    groups[4].run(folders.there_and_back, theirs, back, layout, "Dion", "rows")
    shapes = dion_folder.shapes_of(jobs.model())
    _, before = dion_folder.tensors(shapes, "Dion", "adamw", "short")
    wanted = {"optimizer": {"state": dion_folder.tensors(shapes, "Dion", "adamw", "rows")[1]}}
    read = run(groups, 1, folders.read_whole, back, wanted)["optimizer"]["state"]
    product = before["0.weight"]["momentum"] @ before["0.weight"]["Q"]
    assert shapes["0.weight"] == (16, 8)
    assert torch.allclose(read["0.weight"]["Q"], product / product.norm(dim=0), rtol=0, atol=1e-12)
    assert torch.equal(read["2.weight"]["Q"], before["2.weight"]["Q"])


def test_ranks_with_zeros_alone_count_as_the_others_do(two: Workers) -> None:
    assert two.run(folders.counters_of_a_shard, 200) == [[(0.0, 201.0)]] * 2
    assert two.run(folders.counters_of_a_shard, 0) == [[(0.0, 1.0)]] * 2
