from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import oxidion


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.LayerNorm(8)
        self.proj = nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, 10, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


def names(groups: list[dict], **wanted: object) -> set[str]:
    found = [g for g in groups if all(g.get(k) == v for k, v in wanted.items())]
    return {name for group in found for name, _ in group["params"]}


def test_matrices_go_to_their_algorithm_and_the_rest_to_adamw() -> None:
    groups = oxidion.param_groups(Model(), algorithm="dion", lr=0.1, scalar_lr=0.2, weight_decay=0.3)
    assert names(groups, algorithm="dion", lr=0.1, weight_decay=0.3) == {"proj.weight", "conv.weight"}
    rest = {
        "embed.weight",
        "conv.bias",
        "norm.weight",
        "norm.bias",
        "proj.bias",
        "lm_head.weight",
    }
    assert names(groups, algorithm="adamw", lr=0.2, weight_decay=0.0) == rest


@pytest.mark.parametrize(
    "cls", [oxidion.Dion, oxidion.Dion2, oxidion.Muon, oxidion.NorDion2, oxidion.NorMuon]
)
def test_convolutions_are_flattened_for_every_matrix_algorithm(cls: type[oxidion.Muon]) -> None:
    groups = oxidion.param_groups(Model(), algorithm=cls._ALGORITHM, scalar_algorithm="lion")
    assert names(groups, algorithm=cls._ALGORITHM, flatten=True) == {"conv.weight"}
    assert "lr" not in groups[0]
    optimizer = cls(groups)
    rows = {row["name"]: row for row in optimizer.explain()}
    assert rows["conv.weight"]["view"] == "flattened"
    assert rows["conv.weight"]["lr_factor"] == pytest.approx((4 / 27) ** 0.5)


@pytest.mark.parametrize("algorithm", ["adamw", "lion", "lamb", "adafactor", "came"])
def test_convolutions_are_not_flattened_for_rules_of_any_shape(algorithm: str) -> None:
    groups = oxidion.param_groups(Model(), algorithm=algorithm, lr=0.1)
    assert names(groups, algorithm=algorithm) >= {"conv.weight", "proj.weight"}
    assert not any("flatten" in group for group in groups)


def test_every_parameter_requiring_a_gradient_is_in_one_group() -> None:
    model = Model()
    model.proj.bias.requires_grad_(False)
    groups = oxidion.param_groups(model)
    listed = [id(p) for group in groups for _, p in group["params"]]
    assert len(listed) == len(set(listed))
    assert set(listed) == {id(p) for p in model.parameters() if p.requires_grad}


def test_tied_head_is_no_matrix_whatever_its_name() -> None:
    model = Model(tied=True)
    model.odd_name = model.lm_head
    del model.lm_head
    assert "embed.weight" in names(oxidion.param_groups(model, "dion"), algorithm="adamw")


def test_memory_shared_with_an_embedding_is_found() -> None:
    model = Model()
    model.last = nn.Linear(8, 10, bias=False)
    model.last.weight = nn.Parameter(model.embed.weight.detach())
    assert "last.weight" in names(oxidion.param_groups(model, "dion"), algorithm="adamw")


def test_output_projections_of_blocks_are_matrices() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"output": nn.Linear(4, 4)})])})
    assert names(oxidion.param_groups(model, "dion"), algorithm="dion") == {"blocks.0.output.weight"}


def test_name_patterns_keep_matrices_out() -> None:
    groups = oxidion.param_groups(Model(), "dion", scalar_patterns=["^proj"])
    assert names(groups, algorithm="dion") == {"conv.weight"}


def test_group_keys_are_passed_on_and_decisions_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="oxidion.groups"):
        groups = oxidion.param_groups(Model(), "dion", rank_fraction=0.25)
    assert names(groups, rank_fraction=0.25) == {"proj.weight", "conv.weight"}
    assert "embed.weight (10, 8): adamw (embedding)" in caplog.text
    optimizer = oxidion.Dion(groups)
    assert {row["name"]: row["rank"] for row in optimizer.explain()}["proj.weight"] == 2


def test_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="requires a gradient"):
        oxidion.param_groups(nn.ReLU())


def test_core_logs_reach_python(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="oxidion.plan"):
        oxidion.Muon([nn.Parameter(torch.zeros(3))], strict=False).plan()
    assert "is no matrix, optimized by adamw" in caplog.text


def test_unknown_key_of_another_package_is_named_with_our_word() -> None:
    group = {"params": [torch.nn.Parameter(torch.eye(4))], "momentum": 0.9}
    with pytest.raises(ValueError, match=r"unknown group key 'momentum'.*nearest known key is 'mu'"):
        oxidion.Dion([group])
