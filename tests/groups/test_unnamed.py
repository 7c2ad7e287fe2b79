"""Groups that were made without an algorithm become those of the class that takes them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import oxidion
from oxidion.groups import ParamGroups


class Language(nn.Module):
    """An embedding, two hidden matrices, a normalization and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(64, 16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 64, bias=False)


class Inheriting(oxidion.Muon):
    """A class of a user."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)


class InheritingSphere(oxidion.MuonH):
    """A class of a user, without a constructor."""


def groups(*args: Any, **settings: Any) -> ParamGroups:
    """Groups of a new model, without a summary."""
    return oxidion.param_groups(Language(), *args, summary=False, **settings)


def by_name(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Group keys by parameter."""
    return {
        name: {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
        for name in group["param_names"]
    }


SETTINGS: list[dict[str, Any]] = [
    {"scalar_algorithm": "lion"},
    {"scalar_betas": (0.8, 0.9), "overrides": {"up.weight": "adamw"}},
    {"overrides": {"emb.weight": "muon", "up.weight": "dion", "down.weight": {"lr": 0.3}}},
    {"overrides": {"up.weight": "lion", "norm.*": oxidion.MuonH, "*.bias": {"weight_decay": 0.5}}},
    {"head_lr": 1e-4, "embedding_lr": 0.1, "weight_decay": 0.3, "scalar_weight_decay": 0.2},
    {"scalar_patterns": ["up"], "prefix": "body", "scalar_algorithm": "lion", "head_lr": 0.5},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("lr", [{}, {"lr": 0.125}, {"lr": 0.125, "scalar_lr": 0.25}])
@pytest.mark.parametrize("cls", [oxidion.Muon, oxidion.MuonH, oxidion.AdamW, oxidion.Lion, Inheriting])
def test_each_way_to_sort_gives_the_same_keys(cls: Any, lr: dict[str, Any], settings: dict[str, Any]) -> None:
    strict = {"strict": "norm.*" not in settings.get("overrides", {})}  # vectors in a group of MuonH
    options = {
        key: value for key, value in settings.items() if cls is not oxidion.MuonH or key != "weight_decay"
    }
    expected = by_name(cls(Language(), summary=False, **lr, **strict, **options))
    for made in (
        groups(**lr, **options),
        groups(cls if cls is not Inheriting else oxidion.Muon, **lr, **options),
        copy.deepcopy(groups(**lr, **options)),
        [dict(group) for group in groups(**lr, **options)],
    ):
        found = by_name(cls(made, **({"lr": lr["lr"]} if lr else {}), **strict))
        assert found == expected


@pytest.mark.parametrize("cls", [oxidion.Muon, oxidion.AdamW, oxidion.Lion])
def test_the_same_groups_serve_two_optimizers(cls: Any) -> None:
    made = groups()
    usual = by_name(cls(groups()))
    for other in (oxidion.Muon, oxidion.Dion, oxidion.AdamW):
        other(made, lr=0.5)
        assert by_name(cls(made)) == usual
    assert [group["algorithm"] for group in made] == ["matrix", "scalar"]


def test_groups_are_saved_as_text_and_pickled_ones_need_a_name(tmp_path: Path) -> None:
    theirs = torch.optim.AdamW(groups(lr=0.1))
    torch.save(theirs.state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    assert [group["algorithm"] for group in saved["param_groups"]] == ["matrix", "scalar"]
    with pytest.raises(ValueError, match=r"algorithm='matrix' stood for .* param_groups\(model, algorithm="):
        oxidion.Muon(pickle.loads(pickle.dumps(groups())))
    named = oxidion.Muon(pickle.loads(pickle.dumps(groups("muon", mu=0.8))))
    assert by_name(named)["up.weight"]["mu"] == 0.8
    own = oxidion.Muon(groups(scalar_algorithm="lion"))
    for held in (own.state_dict(), copy.deepcopy(own).state_dict()):
        assert {type(group["algorithm"]) for group in held["param_groups"]} == {str}


def test_classes_of_users_name_the_algorithm_that_they_inherit() -> None:
    class Signs(oxidion.Lion):
        """A class of a user."""

    for optimizer in (
        oxidion.Muon(Language(), overrides={"up.weight": Signs}, summary=False),
        oxidion.Muon(groups(overrides={"up.weight": Signs})),
        oxidion.Muon(groups("muon", overrides={"up.weight": Signs})),
    ):
        assert by_name(optimizer)["up.weight"]["algorithm"] == "lion"
    assert by_name(oxidion.Muon(groups(scalar_algorithm=Signs)))["up.bias"]["algorithm"] == "lion"
    assert by_name(Inheriting(groups(Inheriting)))["up.weight"]["algorithm"] == "muon"
    made = by_name(InheritingSphere(groups(InheritingSphere), lr=0.3))["up.weight"]
    assert (made["lr"], made["weight_norm"]) == (0.3, "hyperball")


def test_rate_that_depends_on_the_class_is_shown_as_its_default() -> None:
    made = groups(lr=0.5, scalar_algorithm="lion")
    rates = dict(zip(*(made.summary.to_dict()[key] for key in ("rule", "lr")), strict=True))
    assert rates["output layer by its name"] == "default"
    assert rates["embedding"] == 0.5
    made[-1]["lr"] = 0.5
    assert by_name(oxidion.Muon(made))["lm_head.weight"]["lr"] == 0.5


def test_none_of_an_override_is_kept() -> None:
    optimizer = oxidion.GaLoreAdamW(
        Language(), rank=4, overrides={"up.weight": {"rank": None}}, summary=False
    )
    found = by_name(optimizer)
    assert (found["up.weight"]["rank"], found["down.weight"]["rank"]) == (None, 4)


def test_values_written_before_a_class_takes_groups_are_kept() -> None:
    made = groups(lr=0.1, scalar_lr=0.2)
    made[0]["lr"], made[0]["nesterov"], made[1]["weight_decay"] = 0.5, True, 0.3
    del made[1]["lr"]
    found = by_name(oxidion.Muon(made, lr=0.7))
    assert (found["up.weight"]["lr"], found["up.weight"]["nesterov"]) == (0.5, True)
    assert (found["emb.weight"]["lr"], found["emb.weight"]["weight_decay"]) == (0.7, 0.3)


@pytest.mark.parametrize(
    ("cls", "lr", "expected"),
    [
        (oxidion.Muon, {}, 0.01 / 4),
        (Inheriting, {}, 0.01 / 4),
        (oxidion.Muon, {"lr": 0.5}, 0.5 / 4),
        (oxidion.Muon, {"lr": torch.tensor(0.5)}, 0.5 / 4),
        (oxidion.Lion, {"lr": 0.5}, 0.5),
    ],
)
def test_head_under_lion_has_a_smaller_rate_in_each_way(cls: Any, lr: Any, expected: float) -> None:
    for optimizer in (
        cls(Language(), scalar_algorithm="lion", summary=False, **lr),
        cls(groups(scalar_algorithm="lion", **lr)),
        cls(groups(scalar_algorithm="lion"), **lr),
        cls(groups(cls._ALGORITHM, scalar_algorithm="lion"), **lr),
    ):
        assert float(by_name(optimizer)["lm_head.weight"]["lr"]) == expected


def test_arguments_of_a_class_win_over_the_defaults_of_another() -> None:
    for made in (groups(oxidion.MuonH), groups("MuonH"), groups(), Language()):
        more = {"summary": False} if isinstance(made, nn.Module) else {}
        for cls in (oxidion.MuonH, InheritingSphere):
            found = by_name(cls(made, lr=0.05, **more))["up.weight"]
            assert (found["algorithm"], found["lr"], found["weight_norm"]) == ("muon", 0.05, "hyperball")
        with pytest.raises(ValueError, match="weight_decay must be 0"):
            oxidion.MuonH(made, weight_decay=0.1, **more)
    assert {g["scale"] for g in oxidion.APOLLOMini(groups("APOLLOMini"), scale=7.0).param_groups} == {7.0}
    held = by_name(oxidion.Dion(groups("MuonH"), lr=0.05))["up.weight"]
    assert (held["lr"], held["weight_norm"]) == (0.05, "hyperball")
    listed = by_name(oxidion.Muon(Language(), lr=0.05, overrides={"up.weight": "MuonH"}, summary=False))
    assert (listed["up.weight"]["lr"], listed["up.weight"]["weight_norm"]) == (0.05, "hyperball")


def test_class_with_other_defaults_is_refused_in_existing_groups() -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    weight.grad = torch.ones(8, 8)
    for word in (oxidion.MuonH, "MuonH"):
        optimizer = oxidion.Muon([weight])
        optimizer.param_groups[0]["algorithm"] = word
        with pytest.raises(ValueError, match=r"algorithm cannot become MuonH.*weight_norm='hyperball'"):
            optimizer.step()


def test_groups_without_a_summary_are_printed() -> None:
    assert repr(ParamGroups()) == ""
    assert not ParamGroups().decisions
