"""Group keys of a user's own by ``extra_keys``, and values of groups in Python's own types."""

from __future__ import annotations

import copy
import enum
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oxidion

OWN = ("lr_mult", "is_expert_parallel", "rho")


class Rule(str, enum.Enum):
    RMS = "rms_norm"


class Count(enum.IntEnum):
    FOUR = 4


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(0)))


def go(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()


def made(name: str, **group: Any) -> Any:
    given = {"relative_step": False, "lr": 0.1} if name == "Adafactor" else {"lr": 0.1}
    rank = {"rank": 4} if name in ("GaLoreAdamW", "APOLLOAdamW") else {}
    return getattr(oxidion, name)([{"params": [weight()], **group}], extra_keys=OWN, **given, **rank)


NAMES = sorted({*oxidion.optim.__all__} - {"DionMixedPrecisionConfig"})


@pytest.mark.parametrize("name", NAMES)
def test_own_keys_stay_and_change_no_step(name: str) -> None:
    with_keys, without = made(name, lr_mult=2.0, is_expert_parallel=True), made(name)
    for optimizer in (with_keys, without):
        for _ in range(2):
            go(optimizer)
    assert torch.equal(with_keys.param_groups[0]["params"][0], without.param_groups[0]["params"][0])
    saved = with_keys.state_dict()
    assert [saved["param_groups"][0].get(key) for key in OWN] == [2.0, True, None]
    with pytest.raises(ValueError, match=r"unknown group key 'gamma'.*extra_keys=\('gamma',\)"):
        with_keys.add_param_group({"params": [weight()], "gamma": 2.0})


def test_own_keys_come_from_the_checkpoint_or_are_kept() -> None:
    saved = made("Muon", lr_mult=2.0).state_dict()
    other = made("Muon", lr_mult=3.0, rho=0.5)
    other.load_state_dict(saved)
    assert [other.param_groups[0][key] for key in ("lr_mult", "rho")] == [2.0, 0.5]


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))], ids=["copy", "pickle"]
)
def test_copies_take_groups_with_own_keys(again: Any) -> None:
    other = again(made("Muon", lr_mult=2.0))
    other.add_param_group({"params": [weight()], "lr_mult": 5.0})
    assert [group["lr_mult"] for group in other.param_groups] == [2.0, 5.0]
    with pytest.raises(ValueError, match="unknown group key 'gamma'"):
        other.add_param_group({"params": [weight()], "gamma": 5.0})


def test_groups_of_a_model_have_own_keys() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    settings: dict[str, Any] = {"extra_keys": ["lr_mult"], "summary": False}
    by_name: Any = oxidion.Muon(model, overrides={"0.*": {"lr_mult": 4.0}}, **settings)
    handed: Any = oxidion.Muon(
        [{"params": list(model.parameters()), "lr_mult": 3.0}], model=model, **settings
    )
    sorted_groups = oxidion.param_groups(model, "muon", overrides={"0.weight": {"lr_mult": 4.0}}, **settings)
    assert [group.get("lr_mult") for group in by_name.param_groups] == [4.0, None, 4.0, None]
    assert [group["lr_mult"] for group in handed.param_groups] == [3.0, 3.0]
    assert sorted(group.get("lr_mult", 0.0) for group in sorted_groups) == [0.0, 0.0, 4.0]
    assert len(oxidion.Muon(sorted_groups, extra_keys=["lr_mult"]).param_groups) == 3


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ("lr_mult", TypeError, "list of names"),
        ((1,), TypeError, "list of names"),
        (None, TypeError, "list of names"),
        (("lr",), ValueError, "groups may have 'lr' anyway"),
        (("rank_fraction",), ValueError, "groups may have 'rank_fraction' anyway"),
        (("momentum",), ValueError, "groups may have 'momentum' anyway"),
        (("eps",), ValueError, "groups may have 'eps' anyway"),
        (("fused",), ValueError, "groups may have 'fused' anyway"),
    ],
)
def test_own_keys_are_names_that_nothing_reads(given: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        oxidion.Muon([weight()], extra_keys=given)
    with pytest.raises(error, match=said):
        oxidion.param_groups(nn.Sequential(nn.Linear(4, 4)), "muon", extra_keys=given, summary=False)


def test_names_may_come_from_a_generator_and_values_are_kept() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    names = (key for key in ("kind",))
    optimizer: Any = oxidion.Muon(
        model, overrides={"0.weight": {"kind": torch.int64}}, extra_keys=names, summary=False
    )
    assert [group.get("kind") for group in optimizer.param_groups] == [torch.int64, None, None]
    go(optimizer)
    assert [group.get("kind") for group in optimizer.state_dict()["param_groups"]] == [
        torch.int64,
        None,
        None,
    ]


def test_factory_of_the_trainer_hands_own_keys_on() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    groups = {"overrides": {"0.weight": {"lr_mult": 2.0}}, "summary": False}
    for place in ({"extra_keys": ["lr_mult"]}, {}):
        more = {} if place else {"extra_keys": ["lr_mult"]}
        made: Any = oxidion.compat.hf.OptimizerFactory()(
            model, "Muon", lr=0.1, groups={**groups, **place}, **more
        )
        assert [group.get("lr_mult") for group in made.param_groups] == [2.0, None, None]


def test_decay_by_the_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="decoupled_weight_decay must be True"):
        oxidion.AdamW([{"params": [weight()], "decoupled_weight_decay": False}], weight_decay=0.1)
    peer = torch.optim.Adam([weight()], weight_decay=0.1)
    with pytest.raises(ValueError, match="decoupled_weight_decay must be True"):
        oxidion.AdamW([weight()]).load_state_dict(peer.state_dict())
    oxidion.AdamW([weight()]).load_state_dict(torch.optim.Adam([weight()]).state_dict())


def test_numbers_of_numpy_may_be_written() -> None:
    muon: Any = oxidion.Muon([weight()])
    go(muon)
    muon.param_groups[0].update(nesterov=np.bool_(True), ns_steps=np.int64(6), momentum=np.float32(0.5))
    go(muon)
    assert [muon.param_groups[0][key] for key in ("nesterov", "ns_steps", "mu")] == [True, 6, 0.5]
    adamw: Any = oxidion.AdamW([weight()])
    adamw.param_groups[0]["betas"] = np.array([0.5, 0.75])
    go(adamw)
    adamw.load_state_dict(adamw.state_dict())
    assert adamw.param_groups[0]["betas"] == (0.5, 0.75)


@pytest.mark.parametrize("where", ["arguments", "group", "later"])
def test_checkpoints_hold_values_of_plain_types(where: str) -> None:
    odd = {
        "lr": np.float64(0.1),
        "adjust_lr": Rule.RMS,
        "betas": (np.float64(0.5), np.float64(0.75)),
        "num_heads": Count.FOUR,
        "weight_decay": np.float64(0.5),
    }
    arguments = {key: value for key, value in odd.items() if key != "num_heads"}
    if where == "arguments":
        optimizer: Any = oxidion.Muon([weight()], **arguments)
    else:
        optimizer = oxidion.Muon([{"params": [weight()], **(odd if where == "group" else {})}])
    if where == "later":
        optimizer.param_groups[0].update(odd)
    go(optimizer)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    (group,) = torch.load(buffer, weights_only=True)["param_groups"]
    assert type(group["adjust_lr"]) is str
    assert group["adjust_lr"] == "rms_norm"
    assert {type(value) for key, value in group.items() if key not in ("params", "param_names")} <= {
        str, int, float, bool, tuple, type(None),
    }  # fmt: skip
    assert {type(each) for each in group["betas"]} == {float}
    if where != "later":
        assert type(optimizer.param_groups[0]["lr"]) is float
