"""Which parameters of a model `galore_param_groups` projects."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion


class MyRMSNorm(nn.Module):
    """A normalization of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Block(nn.Module):
    """A block as of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = MyRMSNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)
        self.narrow = nn.Linear(16, 3)
        self.bias_table = nn.Parameter(torch.zeros(12, 16))


class Model(nn.Module):
    """An embedding, blocks and an output layer."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.conv = nn.Conv2d(8, 16, 12)
        self.norm = nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 64, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Not called."""
        raise NotImplementedError


def names(groups: list[dict[str, Any]]) -> list[set[str]]:
    return [{name for name, _ in group["params"]} for group in groups]


WEIGHTS = {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("up", "down")}


def test_linear_weights_are_projected_and_vectors_do_not_decay() -> None:
    model = Model()
    projected, others, bare = groups = oxidion.galore_param_groups(model, rank=4, weight_decay=0.1)
    assert names(groups)[0] == WEIGHTS
    assert {"embed.weight", "lm_head.weight", "conv.weight", "blocks.0.bias_table"} <= names(groups)[1]
    assert "blocks.0.narrow.weight" in names(groups)[1]  # rank 4 of 3 rows
    assert {"norm.weight", "norm.bias", "blocks.1.input_layernorm.weight", "blocks.0.up.bias"} <= names(
        groups
    )[2]
    assert all(param.ndim == 1 for _, param in bare["params"])
    assert (projected["weight_decay"], others["weight_decay"], bare["weight_decay"]) == (0.1, 0.1, 0.0)
    listed = [id(param) for group in groups for _, param in group["params"]]
    assert sorted(listed) == sorted(id(param) for param in model.parameters())


@pytest.mark.parametrize("cls", [oxidion.GaLoreAdamW, oxidion.APOLLOAdamW, oxidion.APOLLOMini])
def test_groups_build_an_optimizer_that_projects_what_they_say(cls: type) -> None:
    model = Model()
    optimizer: Any = cls(oxidion.galore_param_groups(model, rank=4), lr=0.01)
    ranks = {row["name"]: row["rank"] for row in optimizer.explain()}
    assert {name for name, rank in ranks.items() if rank == 4} == WEIGHTS
    assert set(ranks.values()) == {4, None}


def test_include_and_exclude_choose_by_name() -> None:
    model = Model()
    groups = oxidion.galore_param_groups(model, rank=4, include="embed|lm_head|conv", exclude=r"blocks\.1")
    assert names(groups)[0] == {
        "embed.weight",
        "lm_head.weight",
        "conv.weight",
        "blocks.0.up.weight",
        "blocks.0.down.weight",
    }
    assert names(oxidion.galore_param_groups(model, rank=4, include="norm"))[0] == WEIGHTS


def test_frozen_and_shared_parameters() -> None:
    model = Model(tied=True)
    model.blocks[0].requires_grad_(False)
    groups = oxidion.galore_param_groups(model, rank=4)
    listed = [param for group in groups for _, param in group["params"]]
    assert len({id(param) for param in listed}) == len(listed)
    assert all(param.requires_grad for param in listed)
    assert names(groups)[0] == {name for name in WEIGHTS if "blocks.1" in name}
    assert "embed.weight" in names(groups)[1]
    with pytest.raises(ValueError, match="no parameter"):
        oxidion.galore_param_groups(model.requires_grad_(False))


def test_min_dim_and_further_keys() -> None:
    groups = oxidion.galore_param_groups(
        Model(), rank=2, min_dim=20, scale=0.5, svd="exact", other_weight_decay=0.3
    )
    assert len(groups) == 2
    assert groups[0]["weight_decay"] == 0.3
    groups = oxidion.galore_param_groups(Model(), rank=2, scale=0.5, svd="exact")
    assert (groups[0]["scale"], groups[0]["svd"], groups[0]["rank"]) == (0.5, "exact", 2)
    assert "svd" not in groups[1]


def test_decisions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="oxidion.groups"):
        oxidion.galore_param_groups(Model(), rank=4)
    text = caplog.text
    assert "blocks.0.up.weight (32, 16): projected, rank 4" in text
    assert "lm_head.weight (64, 16): output layer by its name" in text


def test_rank_beyond_a_side_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    param = nn.Parameter(torch.zeros(3, 8))
    with caplog.at_level(logging.WARNING, logger="oxidion.groups"):
        optimizer: Any = oxidion.GaLoreAdamW([("w", param)], rank=3)
        oxidion.GaLoreAdamW([param], rank=None)
        oxidion.GaLoreAdamW([param], rank=2)
        param.grad = torch.ones(3, 8)
        optimizer.step()
        optimizer.explain()
    said, of_none = [record.message for record in caplog.records]
    assert said == "w: rank 3 of a matrix of shape (3, 8) projects nothing, optimized by adamw"
    assert of_none.startswith("no group of this GaLoreAdamW has a rank")
    assert optimizer.explain().to_dict()["algorithm"] == ["adamw"]
