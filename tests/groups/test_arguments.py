"""Arguments, errors and the summary of ``param_groups``."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion.groups.summary import _shown
from support import forks


class Net(nn.Module):
    """An embedding, two layers, a router of experts, a last layer with an unknown name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.prophecy = nn.Linear(8, 5)
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores."""
        scores: Tensor = self.prophecy(self.down(self.up(self.embed(tokens))))
        return scores


def taken(groups: list[dict[str, Any]], **keys: Any) -> set[str]:
    """Names of the parameters in groups with these keys."""
    found = [g for g in groups if all(g.get(key) == value for key, value in keys.items())]
    return {name for group in found for name, _ in group["params"]}


def test_last_layer_of_any_name_is_the_layer_of_outputs() -> None:
    groups = oxidion.param_groups(Net(), "muon")
    assert taken(groups, algorithm="muon") == {"up.weight", "down.weight"}
    assert groups.decisions["prophecy.weight"] == "adamw (output layer, the last one)"
    assert groups.decisions["frozen.weight"] == "frozen, left out"


def test_layer_leading_back_to_the_features_is_no_output_layer() -> None:
    block = nn.Module()
    block.up, block.down = nn.Linear(8, 32), nn.Linear(32, 8)
    assert taken(oxidion.param_groups(block, "muon"), algorithm="muon") == {"up.weight", "down.weight"}


class Backwards(nn.Module):
    """Layers that are called in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.first = nn.Linear(6, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """Scores."""
        scores: Tensor = self.answer(self.drop(self.norm(self.first(x)))) * scale
        return scores


@pytest.mark.parametrize(
    "example",
    [torch.ones(3, 6), (torch.ones(3, 6), 2.0), {"x": torch.ones(3, 6), "scale": 2.0}],
    ids=["tensor", "tuple", "dict"],
)
def test_forward_pass_finds_the_output_layer_and_changes_nothing(example: Any) -> None:
    torch.manual_seed(0)
    model = Backwards().train()
    model.drop.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    groups = oxidion.param_groups(model, "muon", example=example)
    assert taken(groups, algorithm="muon") == {"first.weight"}
    assert groups.decisions["answer.weight"] == "adamw (output layer of the forward pass)"
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [m.training for m in model.modules()] == [True, True, True, False, True]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_wrappers_do_not_hide_the_layer_of_outputs() -> None:
    outer = nn.Module()
    outer.module = nn.Module()
    outer.module.fc = nn.Linear(8, 8)
    outer.module.body = nn.Linear(8, 8)
    assert taken(oxidion.param_groups(outer, "muon"), algorithm="muon") == {"module.body.weight"}


def test_heads_of_an_attention_are_no_layers_of_outputs() -> None:
    head = nn.ModuleDict({name: nn.Linear(8, 4, bias=False) for name in ("key", "query", "value")})
    model = nn.Module()
    model.attention = nn.Module()
    model.attention.heads = nn.ModuleList([head])
    model.lm_head = nn.Linear(4, 11)
    groups = oxidion.param_groups(model, "muon")
    assert taken(groups, algorithm="muon") == {
        f"attention.heads.0.{n}.weight" for n in ("key", "query", "value")
    }


def test_overrides_by_pattern_and_class_and_the_last_wins() -> None:
    groups = oxidion.param_groups(
        Net(),
        "muon",
        lr=0.02,
        scalar_lr=0.001,
        overrides={
            "up.*": "lion",
            nn.Embedding: {"algorithm": "muon", "lr": 0.5},
            "prophecy.weight": {"lr": 0.25},
            "d*.weight": "adamw",
            "down.weight": {"mu": 0.5},
        },
    )
    assert taken(groups, algorithm="lion", lr=0.001, weight_decay=0.0) == {"up.weight", "up.bias"}
    assert taken(groups, algorithm="muon", lr=0.5) == {"embed.weight"}
    assert taken(groups, algorithm="adamw", lr=0.25) == {"prophecy.weight"}
    assert taken(groups, algorithm="muon", mu=0.5, lr=0.02) == {"down.weight"}
    assert taken(groups, algorithm="adamw", lr=0.001) == {"down.bias", "prophecy.bias"}
    optimizer = oxidion.Muon(groups)
    assert {row["name"]: row["algorithm"] for row in optimizer.explain()}["up.weight"] == "lion"


@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        ({"upp.*": "lion"}, ValueError, r"match no parameter: \['upp\.\*'\]"),
        ({"up.*": "lions"}, ValueError, "must be one of .*got 'lions'; the nearest is 'lion'"),
        ({3: "lion"}, TypeError, "name pattern or a class"),
        ([("up.*", "lion")], TypeError, "overrides must map"),
    ],
)
def test_wrong_overrides_are_refused(overrides: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        oxidion.param_groups(Net(), "muon", overrides=overrides)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"algorithm": "doin"}, ValueError, "algorithm must be one of .*got 'doin'; the nearest is 'dion'"),
        ({"algorithm": "moun"}, ValueError, "the nearest is 'muon'"),
        ({"scalar_algorithm": "adam"}, ValueError, "scalar_algorithm .*the nearest is 'adamw'"),
        (
            {"weight_decays": 1.0},
            TypeError,
            "argument 'weight_decays'; the nearest one is 'weight_decay'",
        ),
        ({"scalar_beta": 1.0}, TypeError, "unknown argument 'scalar_beta'; the nearest one is 'scalar_beta"),
        ({"scalar_patterns": "head"}, TypeError, "list of regular expressions, got the string 'head'"),
    ],
)
def test_wrong_arguments_are_refused_with_the_right_one(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        oxidion.param_groups(Net(), **arguments)


def test_settings_of_the_rest_and_of_its_parts() -> None:
    groups = oxidion.param_groups(
        Net(), "muon", lr=0.02, scalar_lr=0.001, scalar_betas=(0.8, 0.9), embedding_lr=0.3, head_lr=0.004
    )
    assert taken(groups, algorithm="adamw", lr=0.3) == {"embed.weight"}
    assert taken(groups, algorithm="adamw", lr=0.004) == {"prophecy.weight"}
    assert taken(groups, betas=(0.8, 0.9)) == taken(groups, algorithm="adamw")
    optimizer = oxidion.Muon(groups)
    assert {tuple(g["betas"]) for g in optimizer.param_groups if g["algorithm"] == "adamw"} == {(0.8, 0.9)}


class Strange(nn.Module):
    """Parameters that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.some_kernel = nn.Parameter(torch.ones(4, 6))
        self.riddle = nn.Parameter(torch.ones(4, 6))


def test_guesses_are_said_and_strict_refuses_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="oxidion.groups"):
        groups = oxidion.param_groups(Strange(), "muon")
    assert "some_kernel (4, 6): muon" in caplog.text
    assert "riddle (4, 6): adamw" in caplog.text
    assert taken(groups, algorithm="muon") == {"linear.weight", "some_kernel"}
    with pytest.raises(ValueError, match=r"no rule knows .*riddle .*overrides="):
        oxidion.param_groups(Strange(), "muon", strict=True)
    overrides = {"riddle": "muon", "some_kernel": "adamw"}
    groups = oxidion.param_groups(Strange(), "muon", strict=True, overrides=overrides)
    assert taken(groups, algorithm="muon") == {"linear.weight", "riddle"}


def test_summary_has_a_line_for_each_rule_and_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    _shown.clear()
    groups = oxidion.param_groups(Net(), "muon")
    assert str(groups.summary) in capsys.readouterr().err
    rows = {row["rule"]: row for row in groups.summary}
    assert rows["linear layers"]["parameters"] == 2
    assert rows["linear layers"]["elements"] == 2 * 8 * 16
    assert rows["linear layers"]["names"] == "up.weight, down.weight"
    assert sum(row["elements"] for row in groups.summary) == sum(
        p.numel() for p in Net().parameters() if p.requires_grad
    )
    oxidion.param_groups(Net(), "muon")
    assert capsys.readouterr().err == ""
    oxidion.param_groups(nn.Linear(3, 3), "muon", summary=False)
    assert capsys.readouterr().err == ""


def test_fused_weights_are_cut_unless_asked_otherwise() -> None:
    block = nn.Module()
    block.attn = nn.Module()
    block.attn.qkv, block.attn.proj = nn.Linear(8, 24), nn.Linear(8, 8)
    cut = oxidion.param_groups(block, "muon")
    assert taken(cut, split_sizes=(8, 8, 8)) == {"attn.qkv.weight"}
    whole = oxidion.param_groups(block, "muon", split_fused=False)
    assert taken(whole, algorithm="muon") == {"attn.qkv.weight", "attn.proj.weight"}
    assert not any("split_sizes" in group for group in whole)


def test_layers_of_torch_itself() -> None:
    model = nn.Module()
    model.rnn = nn.LSTM(6, 4, batch_first=True)
    model.attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    model.bilinear = nn.Bilinear(3, 4, 5)
    model.grouped = nn.Conv2d(4, 8, 3, groups=2)
    model.depthwise = nn.Conv2d(4, 8, 3, groups=4)
    model.turned = nn.ConvTranspose2d(4, 8, 3)
    model.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 7))
    model.narrow = nn.Linear(6, 1)
    groups = oxidion.param_groups(model, "muon", strict=True)
    assert taken(groups, split_sizes=(4, 4, 4, 4)) == {"rnn.weight_ih_l0", "rnn.weight_hh_l0"}
    assert taken(groups, split_sizes=(8, 8, 8)) == {"attention.in_proj_weight"}
    assert taken(groups, flatten=True, fan_in_fan_out=True) == {"turned.weight"}
    assert taken(groups, flatten=True) == {"turned.weight", "bilinear.weight", "grouped.weight"}
    rest = taken(groups, algorithm="adamw")
    assert {"attention.bias_k", "depthwise.weight", "narrow.weight"} <= rest
    assert "normed.parametrizations.weight.original0" in rest
    assert "normed.parametrizations.weight.original1" in taken(groups, algorithm="muon")


class Experts(nn.Module):
    """Experts of either orientation, with biases."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        up, down = ((3, 8, 20), (3, 20, 8)) if turned else ((3, 20, 8), (3, 8, 20))
        self.w1, self.w2 = nn.Parameter(torch.ones(up)), nn.Parameter(torch.ones(down))
        self.w1_bias = nn.Parameter(torch.ones(3, 20))


@pytest.mark.parametrize("turned", [False, True])
def test_orientation_of_experts_follows_from_layer_sizes(turned: bool) -> None:
    model = nn.Module()
    model.embed = nn.Embedding(11, 8)
    model.moe = nn.Module()
    model.moe.gate, model.moe.experts = nn.Linear(8, 3, bias=False), Experts(turned=turned)
    groups = oxidion.param_groups(model, "muon", strict=True)
    assert taken(groups, algorithm="muon") == {"moe.experts.w1", "moe.experts.w2"}
    assert taken(groups, fan_in_fan_out=True) == (taken(groups, algorithm="muon") if turned else set())
    assert {"moe.gate.weight", "moe.experts.w1_bias", "embed.weight"} == taken(groups, algorithm="adamw")


def test_adapters_are_matrices_and_those_of_embeddings_are_not() -> None:
    model = nn.Module()
    model.layer = nn.Module()
    model.layer.base_layer = nn.Linear(8, 8).requires_grad_(False)
    model.layer.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})
    model.layer.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8, bias=False)})
    model.layer.lora_magnitude_vector = nn.ParameterDict({"default": torch.ones(8)})
    model.embed = nn.Module()
    model.embed.lora_embedding_A = nn.ParameterDict({"default": torch.ones(2, 11)})
    groups = oxidion.param_groups(model, "muon", strict=True)
    assert taken(groups, algorithm="muon") == {"layer.lora_A.default.weight", "layer.lora_B.default.weight"}
    assert taken(groups, algorithm="adamw") == {
        "layer.lora_magnitude_vector.default",
        "embed.lora_embedding_A.default",
    }


FSDP1 = """
import warnings; warnings.filterwarnings("ignore")
import torch, oxidion
from torch import nn, distributed
distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
model = FSDP(model, use_orig_params=USE, device_id=torch.device("cpu"))
for cls in (oxidion.Dion, oxidion.Muon, oxidion.Adafactor):
    groups = lambda: oxidion.param_groups(model, cls._ALGORITHM, summary=False)
    for make in (groups, lambda: cls(model.parameters(), strict=False)):
        try:
            make()
        except TypeError as error:
            assert "FSDP2 (torch.distributed.fsdp.fully_shard)" in str(error), error
        else:
            raise AssertionError(cls)
optimizer = oxidion.AdamW(oxidion.param_groups(model, "adamw", summary=False), lr=0.01)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
distributed.destroy_process_group()
"""


@pytest.mark.parametrize("use", ["True", "False"])
def test_flat_parameters_are_refused_by_name_or_stepped_by_adamw(use: str) -> None:
    (done,) = forks.common().run(FSDP1.replace("USE", use))
    assert done.returncode == 0, done.stderr[-3000:]


def test_no_warning_of_python_is_raised() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        oxidion.param_groups(Net(), "dion")
