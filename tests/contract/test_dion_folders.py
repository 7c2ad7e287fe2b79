"""Folders of microsoft/dion's training script in one process: what is loaded, refused, and written back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import oxidion
from oxidion.checkpoint import load_dcp, save_dcp
from support import dion_folder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def model() -> nn.Sequential:
    """Matrices of every orientation, and vectors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6), nn.Linear(6, 6, bias=False)).double()


def build(kind: str = "Dion", scalar: str = "adamw", **keys: Any) -> tuple[nn.Module, Any]:
    """A model and an optimizer whose settings are others than those of the checkpoint."""
    network = model()
    named = list(network.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [(name, p) for name, p in named if p.ndim == 2]},
        {"params": [(name, p) for name, p in named if p.ndim == 1], "algorithm": scalar},
    ]
    keys = {"lr": 0.5, "betas": (0.3, 0.4), "orth_dtype": "float64", **keys}
    return network, getattr(oxidion, kind)(groups, **keys)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(7, 8, generator=generator).double(), torch.randn(7, 6, generator=generator).double())
        for _ in range(count)
    ]


def train(network: nn.Module, optimizer: Any, count: int) -> None:
    """Takes steps."""
    for x, y in batches(count):
        optimizer.zero_grad()
        (network(x) - y).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("scalar", ["adamw", "lion"])
@pytest.mark.parametrize("kind", ["Dion", "Muon"])
@pytest.mark.parametrize("source", ["microsoft-dion", "dion"])
def test_loaded_folder_goes_on_as_naive_float64_steps_do(
    tmp_path: Path, kind: str, scalar: str, source: str
) -> None:
    dion_folder.write(tmp_path, model(), kind, scalar)
    network, optimizer = build(kind, scalar)
    assert load_dcp(tmp_path, network, optimizer, source) == dion_folder.EXTRA
    for group, wanted in zip(
        optimizer.param_groups,
        dion_folder.groups_of(dion_folder.shapes_of(network), kind, scalar),
        strict=True,
    ):
        assert isinstance(group["lr"], float)
        assert group["lr"] == float(wanted["lr"])
        assert group["step"] == dion_folder.STEP
        assert group["orth_dtype"] == "float64", "keys that microsoft/dion does not have are the optimizer's"
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.95)
    start = [param.detach().clone() for param in network.parameters()]
    train(network, optimizer, 3)
    naive = dion_folder.go_on(model(), kind, scalar, "short", optimizer.param_groups[0], batches(3))
    for mine, wanted, before in zip(network.parameters(), naive, start, strict=True):
        assert float((mine.detach() - wanted).norm() / (wanted - before).norm()) <= 1e-10


def test_compiled_and_wrapped_models_have_the_same_names(tmp_path: Path) -> None:
    dion_folder.write(tmp_path, model(), "Muon", "adamw")
    network, optimizer = build("Muon")
    load_dcp(tmp_path, torch.compile(network, backend="eager"), optimizer)
    weights, _ = dion_folder.tensors(dion_folder.shapes_of(network), "Muon", "adamw", "short")
    assert all(torch.equal(param, weights[name]) for name, param in network.named_parameters())


def test_states_keep_the_dtypes_of_the_folder(tmp_path: Path) -> None:
    def narrow(state: dict[str, Any]) -> None:
        for own in state["optimizer"]["state"].values():
            own["momentum"] = own["momentum"].bfloat16()

    dion_folder.write(tmp_path, model(), "Dion", "adamw", change=narrow)
    network, optimizer = build()
    load_dcp(tmp_path, network, optimizer)
    assert {own["momentum"].dtype for own in optimizer.state.values()} == {torch.bfloat16}
    assert {own["Q"].dtype for own in optimizer.state.values() if "Q" in own} == {torch.float64}
    train(network, optimizer, 1)


def test_groups_that_are_split_more_finely_get_their_values(tmp_path: Path) -> None:
    dion_folder.write(tmp_path, model(), "Dion", "adamw")
    network = model()
    groups: list[dict[str, Any]] = [
        {"params": [p], **({} if p.ndim == 2 else {"algorithm": "adamw"})} for p in network.parameters()
    ]
    optimizer = oxidion.Dion(groups, lr=0.5)
    load_dcp(tmp_path, network, optimizer)
    rates = {dion_folder.RATE, dion_folder.SCALAR_RATE}
    assert {group["lr"] for group in optimizer.param_groups} == rates
    assert {group["step"] for group in optimizer.param_groups} == {dion_folder.STEP}


Spoil = Callable[[dict[str, Any]], object]
SPOILED: dict[str, tuple[Spoil, str]] = {
    "no optimizer": (lambda s: s.pop("optimizer"), "must have an entry 'optimizer'.*has .*'model'"),
    "no model": (lambda s: s.pop("model"), "must have an entry 'model'"),
    "weight": (lambda s: s["model"].pop("2.weight"), "has no '2.weight' of the model"),
    "weight shape": (
        lambda s: s["model"].update({"2.weight": torch.zeros(6, 11)}),
        r"2.weight: the model's has shape \(6, 12\).*\(6, 11\)",
    ),
    "state": (
        lambda s: s["optimizer"]["state"]["2.bias"].pop("variance"),
        "2.bias: .* has no state 'variance'.*has .*'momentum'",
    ),
    "all states": (
        lambda s: s["optimizer"]["state"].pop("2.bias"),
        "2.bias: .* has no states of it, and has some of other parameters of group 1",
    ),
    "state shape": (
        lambda s: s["optimizer"]["state"]["2.weight"].update(momentum=torch.zeros(6, 11)),
        r"2.weight: state 'momentum' must have shape \(6, 12\).*\(6, 11\)",
    ),
    "rank": (
        lambda s: s["optimizer"]["state"]["2.weight"].update(Q=torch.zeros(6, 2)),
        r"cannot be loaded: 2.weight: state 'Q' must have shape \(6, 3\), got \(6, 2\)",
    ),
    "group": (
        lambda s: s["optimizer"]["param_groups"][1]["params"].remove("2.bias"),
        "2.bias: .* has no such parameter in the optimizer's groups",
    ),
    "other parameter": (
        lambda s: s["optimizer"]["param_groups"][1]["params"].append("9.bias"),
        "'9.bias' in the optimizer's groups, and the optimizer here does not step it",
    ),
    "groups": (lambda s: s["optimizer"].pop("param_groups"), "must have 'param_groups'"),
    "flat": (
        lambda s: s["optimizer"]["param_groups"][0].pop("params"),
        "'params' of group 0 .* must be a list of names",
    ),
    "algorithm": (
        lambda s: s["optimizer"]["param_groups"][0].update(algorithm="muon"),
        "algorithm 'muon', the optimizer is Dion",
    ),
    "value": (lambda s: s["optimizer"]["param_groups"][0].update(mu=-1.0), "mu must be .*got -1.0"),
    "other group": (
        lambda s: (
            s["optimizer"]["param_groups"][0]["params"].remove("2.weight"),
            s["optimizer"]["param_groups"][1]["params"].append("2.weight"),
        ),
        r"group 0 of the optimizer has parameters of the groups \[0, 1\]",
    ),
}


@pytest.mark.parametrize(("spoil", "said"), SPOILED.values(), ids=SPOILED.keys())
def test_other_folders_are_refused_and_nothing_changes(tmp_path: Path, spoil: Spoil, said: str) -> None:
    def change(state: dict[str, Any]) -> None:
        spoil(state)

    dion_folder.write(tmp_path, model(), "Dion", "adamw", change=change)
    network, optimizer = build()
    with pytest.raises(ValueError, match=said):
        load_dcp(tmp_path, network, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), model().parameters(), strict=True))
    assert not any(bool(own["momentum"].any()) for own in optimizer.state.values())
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    assert [group["step"] for group in optimizer.param_groups] == [0, 0]


def test_folders_that_are_none_and_unknown_words_are_refused(tmp_path: Path) -> None:
    network, optimizer = build()
    with pytest.raises(ValueError, match=r"must be a folder of torch.distributed.checkpoint.*\.metadata"):
        load_dcp(tmp_path, network, optimizer)
    with pytest.raises(ValueError, match="source must be one of 'microsoft-dion', 'dion', got 'soap'"):
        load_dcp(tmp_path, network, optimizer, "soap")
    with pytest.raises(ValueError, match="form must be one of 'microsoft-dion', 'dion', got 'soap'"):
        save_dcp(tmp_path, network, optimizer, "soap")
    dion_folder.write(tmp_path, network, "Dion", "adamw")
    with pytest.raises(ValueError, match="optimizer has parameters that model does not have"):
        load_dcp(tmp_path, network, build()[1])
    for work in (load_dcp, save_dcp):
        with pytest.raises(TypeError, match="optimizer must be one of oxidion's classes"):
            work(tmp_path, network, torch.optim.SGD(network.parameters()))


def test_states_of_frozen_parameters_are_left_out_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dion_folder.write(tmp_path, model(), "Dion", "adamw")
    network, optimizer = build()
    first = next(network.parameters()).requires_grad_(False)
    load_dcp(tmp_path, network, optimizer)
    assert not optimizer.state.get(first)
    assert "states of 1 parameters that require no gradient here" in caplog.text


@pytest.mark.parametrize("kind", ["Dion", "Muon"])
def test_saved_folder_has_every_key_that_microsoft_dion_asks_for(tmp_path: Path, kind: str) -> None:
    network, optimizer = build(kind)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    train(network, optimizer, 2)
    save_dcp(tmp_path, network, optimizer, extra=dion_folder.EXTRA)
    shapes = dion_folder.shapes_of(network)
    _, states = dion_folder.tensors(shapes, kind, "adamw", "short")
    if kind == "Dion":  # of another rank than the folder's
        states = {
            n: {k: torch.zeros(optimizer.state[p][k].shape) for k in states[n]} for n, p in _named(network)
        }
    groups = [{**group, "initial_lr": 0} for group in dion_folder.groups_of(shapes, kind, "adamw")]
    wanted = {
        "model": {name: torch.zeros(shape).double() for name, shape in shapes.items()},
        "optimizer": {
            "state": {n: {k: v.double() for k, v in own.items()} for n, own in states.items()},
            "param_groups": [dict.fromkeys(group, 0) for group in groups],
        },
        **dict.fromkeys(("step", "wandb_id"), 0),
        "train_loader": {"current_shard_rank_0": 0},
    }
    dcp.load(wanted, checkpoint_id=tmp_path, no_dist=True)
    for name, param in _named(network):
        assert torch.equal(wanted["model"][name], param)
        for key, value in wanted["optimizer"]["state"][name].items():
            assert torch.equal(value.to(optimizer.state[param][key].dtype), optimizer.state[param][key])
    assert [group["step"] for group in wanted["optimizer"]["param_groups"]] == [2, 2]
    assert {key: wanted[key] for key in dion_folder.EXTRA} == dion_folder.EXTRA


def _named(network: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(network.named_parameters())


@pytest.mark.parametrize("kind", ["Dion", "Muon", "NorMuon", "Dion2", "NorDion2"])
def test_run_goes_on_bit_by_bit_from_its_own_folder(tmp_path: Path, kind: str) -> None:
    network, optimizer = build(kind, lr=0.02)
    train(network, optimizer, 3)
    save_dcp(tmp_path, network, optimizer)
    again, resumed = build(kind)
    assert load_dcp(tmp_path, again, resumed) == {}
    train(network, optimizer, 2)
    train(again, resumed, 2)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), network.parameters(), strict=True))


def test_plain_checkpoint_of_this_package_is_no_other_package_s(tmp_path: Path) -> None:
    """It loads as well: it has the same layout, and more keys."""
    network, optimizer = build("Muon", lr=0.02)
    train(network, optimizer, 3)
    model_state, optimizer_state = get_state_dict(network, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path, no_dist=True)
    again, resumed = build("Muon")
    load_dcp(tmp_path, again, resumed)
    train(network, optimizer, 2)
    train(again, resumed, 2)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), network.parameters(), strict=True))


def test_what_microsoft_dion_has_no_place_for_is_not_saved(tmp_path: Path) -> None:
    network, optimizer = build(state_bits=8)
    for group in optimizer.param_groups:
        group["min_quant_numel"] = 1
    with pytest.raises(ValueError, match=r"no place for the state 'momentum_absmax'.*state_bits"):
        save_dcp(tmp_path, network, optimizer)
    network, optimizer = build(scalar="adafactor")
    with pytest.raises(ValueError, match="group 1: Dion of microsoft/dion has no algorithm 'adafactor'"):
        save_dcp(tmp_path, network, optimizer)
    network = model()
    with pytest.raises(ValueError, match="microsoft/dion has no class AdamW"):
        save_dcp(tmp_path, network, oxidion.AdamW(network.parameters()))
    network, optimizer = build()
    with pytest.raises(ValueError, match=r"extra must not have \['model'\]"):
        save_dcp(tmp_path, network, optimizer, extra={"model": 1})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("side", ["rows", "short"])
def test_q_is_written_on_the_side_that_is_asked_for(tmp_path: Path, side: Any) -> None:
    dion_folder.write(tmp_path / "theirs", model(), "Dion", "adamw", "short" if side == "rows" else "rows")
    network, optimizer = build()
    load_dcp(tmp_path / "theirs", network, optimizer)
    save_dcp(tmp_path / "back", network, optimizer, q_side=side)
    shapes = dion_folder.shapes_of(network)
    empty = dion_folder.tensors(shapes, "Dion", "adamw", side)[1]
    found = {"optimizer": {"state": {n: {k: v.clone() for k, v in own.items()} for n, own in empty.items()}}}
    dcp.load(found, checkpoint_id=tmp_path / "back", no_dist=True)
    turned = 0
    for name, param in _named(network):
        held, read = optimizer.state[param], found["optimizer"]["state"][name]
        if param.ndim == 1 or held["Q"].shape == read["Q"].shape:
            assert all(torch.equal(held[key], value) for key, value in read.items())
            continue
        turned += 1
        matrix = held["momentum"] if side == "rows" else held["momentum"].T
        columns = [matrix @ column for column in held["Q"].T]
        naive = torch.stack([column / column.norm() for column in columns], dim=1)
        assert torch.allclose(read["Q"], naive, rtol=0, atol=1e-12)
    assert turned == 1, "the one matrix with more rows than columns"
    with pytest.raises(ValueError, match="q_side must be None, 'rows' or 'short', got 'columns'"):
        save_dcp(tmp_path / "other", network, optimizer, q_side="columns")  # type: ignore[arg-type]
