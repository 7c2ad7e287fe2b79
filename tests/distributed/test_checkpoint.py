"""Checkpoints: written on one layout, read on another, and what they hold."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from support.workers import Workers, workers

from . import saving

# The gradients of wrapped models are summed in another order on every layout.
CLOSE = {"Dion": 5e-5, "Muon": 5e-4, "AdamW": 5e-5, "Lion": 5e-5}
DTYPES = {"Dion": {"state_dtype": torch.bfloat16}, "AdamW": {"state_dtype": torch.bfloat16}}


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, Workers]]:
    with workers(2) as two, workers(4) as four:
        yield {2: two, 4: four}


def run(groups: dict[int, Workers], ranks: int, job: Any, *args: Any) -> Any:
    """The answer of rank 0; in this process where one rank is wanted."""
    if ranks > 1:
        return groups[ranks].run(job, *args)[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        return job(*args)


def worst(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


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


@pytest.mark.parametrize("name", ["Dion", "Muon", "AdamW"])
@pytest.mark.parametrize(("source", "target"), WAYS, ids=lambda w: f"{w[0]}-{w[1]}")
def test_checkpoint_of_one_layout_goes_on_on_another(
    groups: dict[int, Workers], tmp_path: Path, name: str, source: Any, target: Any
) -> None:
    keys = {"rank_fraction": 0.25} if name == "Dion" else {}
    folder = str(tmp_path / "checkpoint")
    wanted = run(groups, source[0], saving.save, folder, source[1], name, keys)
    got, _ = run(groups, target[0], saving.load, folder, target[1], name, keys)
    assert worst(got, wanted) <= CLOSE[name]


@pytest.mark.parametrize("name", ["Dion", "Muon", "AdamW", "Lion"])
@pytest.mark.parametrize("layout", ["fsdp", "plane", "strided"])
def test_checkpoint_on_the_same_layout_resumes_bit_equal(
    groups: dict[int, Workers], tmp_path: Path, name: str, layout: str
) -> None:
    folder = str(tmp_path / "checkpoint")
    wanted = run(groups, 4, saving.save, folder, layout, name, {})
    got, _ = run(groups, 4, saving.load, folder, layout, name, {})
    assert worst(got, wanted) == 0.0


@pytest.mark.parametrize("name", ["Dion", "Muon", "AdamW", "Lion"])
@pytest.mark.parametrize("layout", ["fsdp", "plane"])
def test_plain_state_dict_resumes_bit_equal(groups: dict[int, Workers], name: str, layout: str) -> None:
    first, second = run(groups, 4, saving.plain_resume, layout, name, {})
    assert worst(first, second) == 0.0


def test_compressed_sync_is_still_compressed_after_a_plain_resume(groups: dict[int, Workers]) -> None:
    first, second = run(groups, 4, saving.plain_resume, "hsdp", "Dion", {"rank_fraction": 0.25})
    assert worst(first, second) == 0.0


@pytest.mark.parametrize("name", ["Dion", "AdamW"])
def test_dtype_of_states_survives_a_change_of_layout(
    groups: dict[int, Workers], tmp_path: Path, name: str
) -> None:
    folder = str(tmp_path / "checkpoint")
    run(groups, 4, saving.save, folder, "fsdp", name, DTYPES[name])
    _, dtypes = run(groups, 2, saving.load, folder, "fsdp", name, DTYPES[name])
    kept = {key: dtype for key, dtype in dtypes.items() if not key.endswith("step")}
    assert kept
    assert set(kept.values()) == {"torch.bfloat16"}


def test_asynchronous_save_holds_the_state_of_its_moment(groups: dict[int, Workers], tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    wanted = run(groups, 4, saving.save, folder, "fsdp", "Dion", {}, True)
    got, _ = run(groups, 4, saving.load, folder, "fsdp", "Dion", {})
    assert worst(got, wanted) == 0.0


def test_states_have_the_placements_that_match_the_parameter(groups: dict[int, Workers]) -> None:
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


def test_synchronizing_makes_decoupled_momenta_equal(groups: dict[int, Workers]) -> None:
    for before, after in groups[4].run(saving.spread_of_momentum):
        assert before > 1e-3
        assert after == 0.0


def test_checkpoint_of_plain_tensors_goes_on_in_dtensors(groups: dict[int, Workers]) -> None:
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
    assert worst(got, [p.detach() for p in params]) <= 1e-6


@pytest.mark.parametrize("named", [True, False], ids=["with-meshes", "without-meshes"])
def test_sharded_checkpoint_of_the_reference_goes_on(groups: dict[int, Workers], named: bool) -> None:
    for errors in groups[4].run(saving.of_the_reference, named):
        assert max(errors) <= 2e-6
