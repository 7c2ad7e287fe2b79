"""Settings that exclude or need each other, and keys that mean another thing in the class around a group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import oxidion

from .table import CASES, Case, every_case


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 3))


TOGETHER = {
    "lr with relative steps": ({"lr": 1e-3}, r"lr must be None with relative_step=True, got 0.001 \(group"),
    "no lr without them": (
        {"relative_step": False},
        r"lr must be a finite number.*relative_step=False, got None",
    ),
    "warm-up without them": (
        {"lr": 0.1, "relative_step": False, "warmup_init": True},
        "warmup_init=True requires relative_step=True",
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_adafactor_settings_that_do_not_go_together_raise(name: str) -> None:
    keys, message = TOGETHER[name]
    with pytest.raises(ValueError, match=message):
        oxidion.Adafactor([matrix()], **keys)
    with pytest.raises(ValueError, match=message):
        oxidion.Adafactor([{"params": [matrix()]}, {"params": [matrix()], **keys}])
    with pytest.raises(ValueError, match=message):
        oxidion.Muon([{"params": [matrix()], "algorithm": "adafactor", **keys}])
    optimizer = oxidion.Adafactor([matrix()])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [matrix()], **keys})
    assert len(optimizer.param_groups) == 1


def test_adafactor_keeps_what_the_user_gives() -> None:
    lr = torch.tensor(0.25)
    optimizer = oxidion.Adafactor([matrix()], lr=lr, relative_step=False)
    assert optimizer.param_groups[0]["lr"] is lr
    assert oxidion.Adafactor([matrix()]).param_groups[0]["lr"] is None


@pytest.mark.parametrize("make", [lambda p: oxidion.CAME(p), lambda p: oxidion.CAME(p, lr=None)])
def test_came_without_lr_raises_at_construction(make: Any) -> None:
    with pytest.raises(ValueError, match="CAME has no default for lr"):
        make([matrix()])


@pytest.mark.parametrize("algorithm", [case.algorithm for case in CASES if case.algorithm != "adafactor"])
def test_foreign_group_in_adafactor_needs_an_lr_of_its_own(algorithm: str) -> None:
    with pytest.raises(ValueError, match=r"lr must be a finite number >= 0, got None \(group 0\)"):
        oxidion.Adafactor([{"params": [matrix()], "algorithm": algorithm}])
    group = oxidion.Adafactor([{"params": [matrix()], "algorithm": algorithm, "lr": 0.5}]).param_groups[0]
    assert group["lr"] == 0.5


@every_case
@pytest.mark.parametrize("foreign", CASES, ids=str)
def test_group_of_another_kind_gets_its_own_algorithms_default(case: Case, foreign: Case) -> None:
    keys = {"lr": 0.5} if case.algorithm == "adafactor" != foreign.algorithm else {}
    group = case.new([{"params": [matrix()], "algorithm": foreign.algorithm, **keys}]).param_groups[0]
    schema = foreign.cls._SCHEMA
    for key in ("betas", "eps", "epsilon", "beta1"):
        if key not in schema:
            continue
        held = group.get(key, group.get({"eps": "epsilon", "epsilon": "eps"}.get(key, "")))
        default = schema[key].default
        if key in ("betas", "eps") or default is None:
            kind = len(default) if isinstance(default, tuple) else None
            assert (len(held) if isinstance(held, tuple) else None) == kind, key
    if foreign.algorithm == "adafactor" != case.algorithm:
        assert (group["lr"], group["beta1"], group["relative_step"]) == (None, None, True)
        assert "betas" not in group
        assert "beta2" not in group


def test_own_keys_of_a_group_win_whatever_the_class_calls_them() -> None:
    params = [matrix() for _ in range(4)]
    came = oxidion.CAME(
        [
            {"params": params[:1], "algorithm": "muon", "eps": 0.25},
            {"params": params[1:2], "algorithm": "muon", "epsilon": 0.5},
            {"params": params[2:3], "algorithm": "adamw", "eps": 0.75, "betas": (0.5, 0.625)},
            {"params": params[3:], "betas": (0.5, 0.625, 0.75), "eps": (0.5, 0.25)},
        ],
        lr=1e-3,
    )
    assert [group.get("epsilon", group.get("eps")) for group in came.param_groups] == [
        0.25,
        0.5,
        0.75,
        (0.5, 0.25),
    ]
    assert [group["betas"] for group in came.param_groups[2:]] == [(0.5, 0.625), (0.5, 0.625, 0.75)]
    muon = oxidion.Muon(
        [
            {"params": [matrix()], "algorithm": "came", "eps": (0.5, 0.25)},
            {"params": [matrix()], "algorithm": "lamb", "eps": 0.5, "beta1": 0.25},
            {"params": [matrix()], "algorithm": "adafactor", "beta1": 0.5},
        ]
    )
    assert muon.param_groups[0]["eps"] == (0.5, 0.25)
    assert muon.param_groups[1]["epsilon"] == 0.5
    assert muon.param_groups[1]["betas"] == (0.25, 0.95)
    assert muon.param_groups[2]["beta1"] == 0.5
    saved = muon.state_dict()
    muon.load_state_dict(saved)
    assert [group.get("betas") for group in muon.param_groups] == [(0.9, 0.999, 0.9999), (0.25, 0.95), None]
