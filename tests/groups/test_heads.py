"""Attention layers cut into heads, and weights in which rows alternate, by `param_groups`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion

VIEWS = ("num_heads", "split_sizes", "split_dim", "interleaved", "fan_in_fan_out")


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def module(name: str, numbers: dict[str, Any], layers: dict[str, nn.Module]) -> nn.Module:
    """A module whose class has this name, with numbers about itself."""
    made: nn.Module = type(name, (nn.Module,), {})()
    for key, value in numbers.items():
        setattr(made, key, value)
    for key, layer in layers.items():
        made.add_module(key, layer)
    return made


def views(model: nn.Module, **arguments: Any) -> dict[str, dict[str, Any]]:
    """The keys of each matrix that say how it is read."""
    groups = oxidion.param_groups(model, "muon", summary=False, **arguments)
    return {
        name.removesuffix(".weight"): {key: group[key] for key in VIEWS if key in group}
        for group in groups
        for name, _ in group["params"]
        if group["algorithm"] == "muon"
    }


def within(attention: nn.Module) -> nn.Module:
    """A model around an attention: the last layer of a model may be an output layer."""
    return nn.ModuleDict({"attn": attention, "head": linear(48, 7)})


def grouped(**numbers: Any) -> nn.Module:
    """Six heads of queries, two of keys and values, of 8 outputs each."""
    own = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8, **numbers}
    sizes = {"q_proj": (32, 48), "k_proj": (32, 16), "v_proj": (32, 16), "o_proj": (48, 32)}
    return within(module("Attention", own, {name: linear(*size) for name, size in sizes.items()}))


def test_grouped_attention_has_a_matrix_for_each_head() -> None:
    assert views(grouped(), per_head=True) == {
        "attn.q_proj": {"num_heads": 6},
        "attn.k_proj": {"num_heads": 2},
        "attn.v_proj": {"num_heads": 2},
        "attn.o_proj": {"num_heads": 6, "split_dim": 1},
    }
    assert not any(views(grouped()).values())


def test_numbers_of_a_configuration_count_too() -> None:
    config = SimpleNamespace(num_attention_heads=6, num_key_value_heads=2, head_dim=8)
    sizes = {"q_proj": (32, 48), "k_proj": (32, 16), "o_proj": (48, 32)}
    layers = {name: linear(*size) for name, size in sizes.items()}
    found = views(within(module("OtherAttention", {"config": config}, layers)), per_head=True)
    assert found["attn.k_proj"] == {"num_heads": 2}
    assert found["attn.o_proj"] == {"num_heads": 6, "split_dim": 1}


@pytest.mark.parametrize(
    ("kinds", "cut"), [(("q", "k"), "qk"), (["o"], "o"), ({"v"}, "v"), ((), ""), (False, "")], ids=str
)
def test_a_list_names_the_kinds_that_are_cut(kinds: Any, cut: str) -> None:
    found = views(grouped(), per_head=kinds)
    assert {name[5] for name, keys in found.items() if keys} == set(cut)


@pytest.mark.parametrize("kinds", ["q", 1, None, 2.0], ids=str)
def test_anything_but_a_list_of_kinds_is_a_type_error(kinds: Any) -> None:
    with pytest.raises(TypeError, match="per_head must be True, False or a list of 'q', 'k', 'v', 'o'"):
        views(grouped(), per_head=kinds)


def test_an_unknown_kind_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"per_head must be .*, got 'query'"):
        oxidion.Muon(grouped(), per_head=("q", "query"))


@pytest.mark.parametrize("numbers", [{"head_dim": 7}, {"num_heads": 5}, {"num_kv_heads": 4}], ids=str)
def test_numbers_that_do_not_fit_are_reported_and_cut_nothing(numbers: dict[str, int]) -> None:
    model = grouped(**numbers)
    groups = oxidion.param_groups(model, "muon", summary=False, per_head=True)
    unknown = [name for name, rule in groups.decisions.items() if "heads unknown" in rule]
    assert unknown
    assert not any(views(model, per_head=True)[name.removesuffix(".weight")] for name in unknown)
    assert "heads unknown" in repr(groups)


def test_fused_layers_are_cut_into_the_heads_of_all_kinds() -> None:
    numbers = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8}
    layers = {"qkv_proj": linear(32, 80), "o_proj": linear(48, 32)}
    model = within(module("Attention", numbers, layers))
    assert views(model)["attn.qkv_proj"] == {"split_sizes": (48, 16, 16)}
    assert views(model, per_head=True)["attn.qkv_proj"] == {"num_heads": 10}
    some = views(model, per_head=("q", "v"))
    assert some["attn.qkv_proj"] == {"split_sizes": (8,) * 6 + (16,) + (8, 8)}
    assert some["attn.o_proj"] == {}


def test_uncertain_order_of_a_fused_layer_is_fine_for_all_heads() -> None:
    numbers = {"num_heads": 4, "head_dim": 8}
    model = within(module("FalconAttention", numbers, {"query_key_value": linear(32, 96)}))
    assert views(model, per_head=True)["attn.query_key_value"] == {"num_heads": 12}
    groups = oxidion.param_groups(model, "muon", summary=False, per_head=("q",))
    assert "heads unknown" in groups.decisions["attn.query_key_value.weight"]


def test_latent_attention_is_cut_into_keys_and_values_by_size() -> None:
    numbers = {
        "num_heads": 4,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "kv_lora_rank": 16,
    }
    sizes = {
        "q_a_proj": (32, 24),
        "q_b_proj": (24, 48),
        "kv_a_proj_with_mqa": (32, 20),
        "kv_b_proj": (16, 56),
        "o_proj": (24, 32),
    }
    model = within(module("LatentAttention", numbers, {name: linear(*size) for name, size in sizes.items()}))
    assert views(model, per_head=True) == {
        "attn.q_a_proj": {},
        "attn.q_b_proj": {"num_heads": 4},
        "attn.kv_a_proj_with_mqa": {"split_sizes": (16, 4)},
        "attn.kv_b_proj": {"split_sizes": (8, 6) * 4},
        "attn.o_proj": {"num_heads": 4, "split_dim": 1},
    }


def test_linear_attention_has_heads_of_several_numbers_and_sizes() -> None:
    numbers = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 6, "head_v_dim": 8}
    sizes = {
        "in_proj_qkv": (32, 56),
        "in_proj_z": (32, 32),
        "in_proj_qkvz": (32, 88),
        "in_proj_ba": (32, 8),
        "out_proj": (32, 32),
    }
    model = within(module("GatedDeltaNet", numbers, {name: linear(*size) for name, size in sizes.items()}))
    assert views(model, per_head=True) == {
        "attn.in_proj_qkv": {"split_sizes": (6, 6, 6, 6, 8, 8, 8, 8)},
        "attn.in_proj_z": {"num_heads": 4},
        "attn.in_proj_qkvz": {"split_sizes": (6, 6, 8, 8, 8, 8) * 2},
        "attn.in_proj_ba": {},
        "attn.out_proj": {"num_heads": 4, "split_dim": 1},
    }


def test_latent_attention_without_positions_is_cut_too() -> None:
    numbers = {"num_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 0, "v_head_dim": 6}
    model = within(module("LatentAttention", numbers, {"q_b_proj": linear(24, 32)}))
    assert views(model, per_head=True)["attn.q_b_proj"] == {"num_heads": 4}


def test_head_sizes_follow_from_layers_where_modules_omit_them() -> None:
    sizes = {"q_proj": (32, 24), "k_proj": (20, 12), "v_proj": (20, 12), "out_proj": (24, 32)}
    layers = {name: linear(*size) for name, size in sizes.items()}
    found = views(within(module("Attention", {"num_heads": 4, "num_kv_heads": 2}, layers)), per_head=True)
    assert found == {
        "attn.q_proj": {"num_heads": 4},
        "attn.k_proj": {"num_heads": 2},
        "attn.v_proj": {"num_heads": 2},
        "attn.out_proj": {"num_heads": 4, "split_dim": 1},
    }
    thirds = within(module("Attention", {"num_heads": 4}, {"qkv": linear(32, 96), "proj": linear(32, 32)}))
    assert views(thirds, per_head=True)["attn.qkv"] == {"num_heads": 12}
    unsaid = within(module("Attention", {"num_heads": 4}, {"qkv": linear(32, 64)}))
    assert not views(unsaid, per_head=True)["attn.qkv"]  # keys and values have fewer heads, or smaller ones
    alone = within(module("Attention", {"num_heads": 4}, {"k_proj": linear(32, 16)}))
    assert not views(alone, per_head=True)["attn.k_proj"]


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("MiniMaxLightningAttention", {}),
        ("AttentionCl", {"head_first": True}),
        ("Attention", {"key_dim": 8, "val_dim": 8}),
    ],
)
def test_kinds_that_alternate_are_never_separated_by_order(name: str, numbers: dict[str, Any]) -> None:
    layers = {"qkv": linear(32, 96), "out_proj": linear(32, 32)}
    model = within(module(name, {"num_heads": 4, "head_dim": 8, **numbers}, layers))
    assert views(model, per_head=True)["attn.qkv"] == {"num_heads": 12}
    groups = oxidion.param_groups(model, "muon", summary=False, per_head=("q",))
    assert "heads unknown" in groups.decisions["attn.qkv.weight"]
    assert "split_sizes" not in views(model)["attn.qkv"]


def test_several_layers_in_a_row_are_not_cut_where_uncertain() -> None:
    out = nn.Sequential(linear(32, 32), nn.GELU(), linear(32, 32))
    model = within(module("Attention", {"num_heads": 4, "head_dim": 8}, {"q": linear(32, 32), "out": out}))
    found = views(model, per_head=True)
    assert found["attn.q"] == {"num_heads": 4}
    assert not found["attn.out.0"]
    assert not found["attn.out.2"]


def test_a_layer_of_an_attention_whose_name_is_unknown_is_said() -> None:
    layers = {"q_proj": linear(32, 32), "wonder": linear(32, 32), "q_a_proj": linear(32, 32)}
    model = within(module("Attention", {"num_heads": 4, "head_dim": 8}, layers))
    decisions = oxidion.param_groups(model, "muon", summary=False, per_head=True).decisions
    assert "heads unknown" in decisions["attn.wonder.weight"]
    assert "heads unknown" not in decisions["attn.q_a_proj.weight"]


def test_one_head_that_is_key_and_value_is_one_matrix() -> None:
    layers = {"q_proj": linear(32, 64), "kv_proj": linear(32, 16)}
    model = within(module("Attention", {"num_heads": 4, "head_dim": 16}, layers))
    assert not views(model)["attn.kv_proj"]


@pytest.mark.parametrize("keys", [{"num_heads": 1}, {"num_heads": None}, {"split_sizes": (24, 24)}], ids=str)
def test_keys_of_an_override_replace_all_that_cut_a_weight(keys: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = grouped()
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    before = model.get_parameter("attn.o_proj.weight").detach().clone()
    overrides = {"*.o_proj.weight": {**keys, **({"split_dim": 1} if "split_sizes" in keys else {})}}
    optimizer: Any = oxidion.Muon(model, lr=0.1, per_head=True, overrides=overrides, summary=False)
    optimizer.step()
    assert bool((model.get_parameter("attn.o_proj.weight").detach() != before).all())
    groups = [group for group in optimizer.param_groups if "attn.o_proj.weight" in group["param_names"]]
    assert [group["split_dim"] for group in groups] == [1 if "split_sizes" in keys else 0]


def test_adapters_around_a_layer_do_not_hide_its_name() -> None:
    wrapped = module("Wrapped", {}, {"base_layer": linear(32, 48)})
    model = within(module("Attention", {"num_heads": 6, "head_dim": 8}, {"q_proj": wrapped}))
    assert views(model, per_head=True)["attn.q_proj.base_layer"] == {"num_heads": 6}


def test_layers_of_equal_names_outside_an_attention_are_not_cut() -> None:
    layers = {"q_proj": linear(32, 48), "out": linear(48, 32)}
    model = within(module("Mixer", {"num_heads": 6, "head_dim": 8}, layers))
    assert not any(views(model, per_head=True).values())


def test_every_class_takes_per_head_or_ignores_it_without_heads() -> None:
    for cls in (oxidion.Muon, oxidion.NorMuon, oxidion.Dion, oxidion.Dion2, oxidion.SOAP):
        optimizer: Any = cls(grouped(), lr=0.01, per_head=True, summary=False)
        assert {group.get("num_heads") for group in optimizer.param_groups} == {None, 2, 6}
    plain: Any = oxidion.AdamW(grouped(), per_head=True, summary=False)
    assert all("num_heads" not in group for group in plain.param_groups)


@pytest.mark.parametrize("cls", [oxidion.Muon, oxidion.NorMuon], ids=lambda cls: cls.__name__)
def test_heads_of_a_model_step_as_separate_parameters(cls: Any) -> None:
    torch.manual_seed(0)
    model = grouped().double()
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    settings = {"lr": 0.1, "weight_decay": 0.1, "orth_dtype": "float64"}
    cuts = {"q_proj": (6, 0), "k_proj": (2, 0), "v_proj": (2, 0), "o_proj": (6, 1)}
    expected: dict[str, Tensor] = {}
    for name, (count, dim) in cuts.items():
        weight = model.get_parameter(f"attn.{name}.weight")
        parts = [nn.Parameter(part.clone()) for part in weight.detach().chunk(count, dim)]
        for part, grad in zip(parts, weight.grad.chunk(count, dim), strict=True):  # type: ignore[union-attr]
            part.grad = grad.clone()
        cls(parts, **settings).step()
        expected[name] = torch.cat([part.detach() for part in parts], dim)
    cls(model, per_head=True, summary=False, **settings).step()
    for name, weight in expected.items():
        found = model.get_parameter(f"attn.{name}.weight").detach()
        torch.testing.assert_close(found, weight, rtol=0, atol=1e-12)


def test_gate_and_value_of_a_fused_weight_are_separated() -> None:
    mlp = module("FeedForward", {}, {"w2": linear(24, 32)})
    mlp.register_parameter("w13", nn.Parameter(torch.randn(24, 2, 32)))
    experts = module("GroupedExperts", {}, {})
    experts.register_parameter("w13", nn.Parameter(torch.randn(3, 24, 2, 32)))
    experts.register_parameter("w2", nn.Parameter(torch.randn(3, 32, 24)))
    rows = module("GptOssGroupedExperts", {"dim": 32}, {})
    rows.register_parameter("mlp1_weight", nn.Parameter(torch.randn(3, 48, 32)))
    rows.register_parameter("mlp2_weight", nn.Parameter(torch.randn(3, 32, 24)))
    columns = module("GptOssExperts", {"is_transposed": True}, {})
    columns.register_parameter("gate_up_proj", nn.Parameter(torch.randn(3, 32, 48)))
    model = nn.ModuleDict(
        {"mlp": mlp, "experts": experts, "rows": rows, "columns": columns, "head": linear(32, 5)}
    )
    assert views(model) == {
        "mlp.w13": {"interleaved": 2},
        "mlp.w2": {},
        "experts.w13": {"interleaved": 2},
        "experts.w2": {},
        "rows.mlp1_weight": {"interleaved": 2},
        "rows.mlp2_weight": {},
        "columns.gate_up_proj": {"fan_in_fan_out": True},
    }
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    oxidion.Muon(model, summary=False).step()
