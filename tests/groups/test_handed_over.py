"""Parameters that frameworks hand over, output layers of all kinds, and mistakes of first calls."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import oxidion
from groups.test_unnamed import Language, by_name


def algorithms(optimizer: torch.optim.Optimizer) -> list[str]:
    """The algorithm of each group."""
    return [group["algorithm"] for group in optimizer.param_groups]


def network() -> nn.Sequential:
    """A convolution and a linear layer."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(72, 10))


# ------------------------------------------------------------------ parameters with their model


@pytest.mark.parametrize("key", ["mu", "momentum"])
def test_keys_of_groups_stand_where_they_are_read(key: str) -> None:
    model = Language()
    optimizer = oxidion.Muon([{"params": model.parameters(), key: 0.7}], model=model, summary=False)
    found = by_name(optimizer)
    assert (found["up.weight"]["mu"], found["emb.weight"]["algorithm"]) == (0.7, "adamw")
    with pytest.raises(ValueError, match=r"rank_fraction=0.3 is not read by"):
        oxidion.Muon([{"params": model.parameters(), "rank_fraction": 0.3}], model=model, summary=False)


def test_algorithm_of_a_group_decides_how_it_is_read() -> None:
    model = network()
    groups = [{"params": [model[0].weight], "algorithm": "AdamW"}, {"params": [model[2].weight]}]
    assert algorithms(oxidion.Muon(groups, model=model, summary=False)) == ["adamw", "adamw"]
    attention = nn.MultiheadAttention(8, 2)
    optimizer = oxidion.Muon(
        [{"params": attention.parameters(), "algorithm": "lion"}], model=attention, summary=False
    )
    assert set(algorithms(optimizer)) == {"lion"}


def test_rank_of_a_group_is_that_of_a_projection() -> None:
    model = Language()
    optimizer = oxidion.GaLoreAdamW([{"params": model.parameters(), "rank": 4}], model=model, summary=False)
    found = by_name(optimizer)
    assert (found["up.weight"]["rank"], found["emb.weight"]["algorithm"]) == (4, "adamw")


def test_none_in_a_group_is_kept() -> None:
    model = Language()
    groups = [{"params": [model.up.weight], "rank": 4}, {"params": [model.down.weight], "rank": None}]
    optimizer = oxidion.GaLoreAdamW(groups, rank=8, model=model, summary=False)
    assert [group["rank"] for group in optimizer.param_groups] == [4, None]


def test_class_of_a_user_in_a_group_is_the_one_that_it_inherits() -> None:
    class Signs(oxidion.Lion):
        """A class of a user."""

    model = Language()
    groups = [{"params": [model.up.weight], "algorithm": Signs}]
    assert algorithms(oxidion.Muon(groups, model=model, summary=False)) == ["lion"]


def test_groups_that_are_sorted_stay_so_with_their_model() -> None:
    model = Language()
    for made in (
        oxidion.param_groups(model, summary=False),
        oxidion.param_groups(model, "muon", summary=False),
    ):
        assert by_name(oxidion.Muon(made, model=model)) == by_name(oxidion.Muon(model, summary=False))
    copied = [dict(group) for group in oxidion.param_groups(model, summary=False)]
    with pytest.raises(ValueError, match="group 0 is one of param_groups already"):
        oxidion.Muon(copied, model=model)


def test_overrides_may_match_what_was_not_handed_over() -> None:
    model = Language()
    optimizer = oxidion.Muon(
        [model.up.weight], model=model, overrides={"lm_head.*": {"lr": 0.1}}, summary=False
    )
    assert algorithms(optimizer) == ["muon"]
    with pytest.raises(ValueError, match="overrides match no parameter"):
        oxidion.Muon([model.up.weight], model=model, overrides={"head.*": {"lr": 0.1}}, summary=False)


def test_groups_stay_separate_and_param_groups_sorts_them_too() -> None:
    model = Language()
    given = [{"params": [model.up.weight]}, {"params": [model.down.weight, model.up.bias]}]
    groups = oxidion.param_groups(model, "muon", params=given, summary=False)
    assert [[name for name, _ in group["params"]] for group in groups] == [
        ["up.weight"],
        ["down.weight"],
        ["up.bias"],
    ]
    assert len(oxidion.Muon(given, model=model, summary=False).param_groups) == 3


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda m: oxidion.Muon(m.up, model=m), TypeError, "two models were given, Linear and Language"),
        (lambda m: oxidion.Muon([m, m]), TypeError, "takes one model, got a list"),
        (lambda _: oxidion.Muon(Language), TypeError, "got the class Language itself"),
        (lambda m: oxidion.Muon(m.parameters(), m), TypeError, "lr cannot be a model, got Language"),
        (
            lambda m: oxidion.Muon([], model=m),
            ValueError,
            "none of the given parameters is one that requires",
        ),
        (
            lambda m: oxidion.Muon(m.up.weight, model=m),
            TypeError,
            "an iterable of parameters .* got a tensor",
        ),
        (lambda m: oxidion.Muon({"params": [m.up.weight]}, model=m), TypeError, "parameter 0 .* got str"),
        (
            lambda m: oxidion.Muon([{"lr": 1.0}], model=m),
            ValueError,
            "group 0 must be a dict with a key 'par",
        ),
        (
            lambda m: oxidion.Muon([m.up.weight] * 2, model=m),
            ValueError,
            "parameter 1 .* is in a group already",
        ),
        (
            lambda m: oxidion.Muon([nn.Parameter(torch.ones(2, 2))], model=m),
            ValueError,
            r"parameter 0 of group 0, of shape \(2, 2\), is not one of the model",
        ),
        (
            lambda m: oxidion.Muon([{"params": [m.up.weight], "algorithm": ["muon"]}]),
            TypeError,
            r"algorithm must be a class of oxidion .* got \['muon'\]",
        ),
        (lambda m: oxidion.Muon(m, adamw_lr=1e-3), TypeError, "the nearest known argument is 'scalar_lr'"),
        (
            lambda m: oxidion.Muon(m, scalar_lr="3e-4"),
            ValueError,
            "scalar_lr must be .* pass the number 0.0003",
        ),
        (lambda m: oxidion.Muon(m, head_lr=-1.0), ValueError, "head_lr must be .* got -1.0"),
        (
            lambda m: oxidion.Muon(m, scalar_momentum=0.9),
            ValueError,
            "scalar_momentum=0.9 is not read by 'adamw' .*'scalar_betas'",
        ),
        (
            lambda m: oxidion.param_groups(m, overrides={"up.*": {"lrr": 3}}),
            ValueError,
            r"overrides\['up\.\*'\]: unknown group key 'lrr'; the nearest is 'lr'",
        ),
        (
            lambda m: oxidion.Muon(m, overrides={nn.Linear: "muon"}),
            ValueError,
            r"up.bias: Muon takes weight matrices, got shape \(32,\)\. Name an algorithm that takes vectors",
        ),
        (lambda m: oxidion.MuonH([m.up.bias]), ValueError, "MuonH takes weight matrices"),
        (
            lambda _: oxidion.Muon(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))),
            ValueError,
            "0.weight has no shape yet, as its module is lazy",
        ),
        (lambda m: oxidion.CAME(m), ValueError, "CAME has no default for lr"),
    ],
)
def test_mistakes_are_reported_in_the_words_of_the_call(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call(Language())


def test_lists_of_parameters_are_no_models() -> None:
    matrix, vector = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8))
    assert algorithms(oxidion.Muon(nn.ParameterList([matrix]))) == ["muon"]
    assert oxidion.AdamW(nn.ParameterList([matrix, vector])).param_groups[0]["weight_decay"] == 0.01
    named = oxidion.AdamW(nn.ParameterDict({"a": matrix, "b": vector}))
    assert named.param_groups[0]["param_names"] == ["a", "b"]
    model = Language()
    with_model = oxidion.Muon(nn.ParameterList(model.parameters()), model=model, summary=False)
    assert by_name(with_model) == by_name(oxidion.Muon(Language(), summary=False))


def test_any_iterable_of_parameters_is_added() -> None:
    matrix = nn.Parameter(torch.ones(8, 8))
    for given in (nn.ParameterList([matrix]), {"a": matrix}.values(), (p for p in [matrix]), matrix):
        optimizer = oxidion.Muon(Language(), summary=False)
        optimizer.add_param_group({"params": given})
        assert optimizer.param_groups[-1]["param_names"] == ["group2.0"]
    optimizer = oxidion.Muon(Language(), summary=False)
    with pytest.raises(TypeError, match="group 2: params must be parameters, got the module Linear"):
        optimizer.add_param_group({"params": nn.Linear(3, 3)})


def test_named_parameters_of_a_model_warn_too() -> None:
    with pytest.warns(UserWarning, match="0.weight, of shape .* looks like an embedding"):
        oxidion.Muon(nn.Sequential(nn.Embedding(640, 16), nn.Linear(16, 16)).named_parameters(), strict=False)


def test_ten_thousand_groups_with_their_model_take_seconds() -> None:
    model = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(10_000)])
    given = [{"params": [param]} for param in model.parameters()]
    start = time.perf_counter()
    oxidion.Muon(given, model=model, summary=False)
    with_model = time.perf_counter() - start
    start = time.perf_counter()
    oxidion.Muon([{"params": [param]} for param in model.parameters()])
    assert with_model < 20 * (time.perf_counter() - start)


# ------------------------------------------------------------------ output layers


class Parts(nn.Module):
    """A module with parts of these names."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def body() -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))


def tower(size: int) -> nn.Sequential:
    """Features of an input of a size."""
    return nn.Sequential(nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, 64))


def test_part_of_a_model_has_output_layers_by_name_alone() -> None:
    layer = Parts(up=nn.Linear(16, 32), output=nn.Linear(32, 24))
    assert oxidion.param_groups(layer, "muon", summary=False).decisions["output.weight"].startswith("adamw")
    groups = oxidion.param_groups(layer, "muon", prefix="encoder.layer.1", summary=False)
    assert groups.decisions["encoder.layer.1.output.weight"].startswith("muon")
    assert not groups.summary.note
    head = oxidion.param_groups(nn.Linear(16, 24), "muon", prefix="lm_head", summary=False)
    assert head.decisions["lm_head.weight"].startswith("adamw")


def test_sizes_that_are_lists_are_no_sizes() -> None:
    model = Parts(body=body(), last=nn.Linear(64, 5))
    model.embed_dim = [8, 16]  # type: ignore[assignment]
    assert oxidion.param_groups(model, "muon", summary=False).decisions["last.weight"].startswith("adamw")


@pytest.mark.parametrize(
    ("model", "heads"),
    [
        (
            Parts(body=body(), actor=nn.Linear(64, 2), critic=nn.Linear(64, 5)),
            ["actor.weight", "critic.weight"],
        ),
        (Parts(pre=nn.Sequential(nn.Linear(80, 256), nn.Linear(256, 128)), rnn=nn.GRU(128, 64)), []),
        (Parts(pre=nn.Sequential(nn.Linear(9, 12), nn.Linear(12, 16)), mix=nn.MultiheadAttention(16, 2)), []),
        (
            nn.Sequential(nn.ConvTranspose2d(100, 64, 4), nn.ReLU(), nn.ConvTranspose2d(64, 3, 4)),
            ["2.weight"],
        ),
        (nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 10)), ["2.weight"]),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(72, 10)), ["2.weight"]),
        (Parts(user=tower(32), item=tower(48), top=nn.Linear(128, 10)), ["top.weight"]),
        (
            Parts(convolutions=nn.Conv2d(3, 8, 3), last=nn.Linear(32 * 49, 10).requires_grad_(False)),
            [],
        ),
        (
            Parts(body=body(), linear=nn.Linear(64, 5), adaLN_modulation=nn.Sequential(nn.Linear(64, 128))),
            [],
        ),
        (
            Parts(
                body=body(), final_layer=Parts(linear=nn.Linear(64, 5), adaLN_modulation=nn.Linear(64, 128))
            ),
            ["final_layer.linear.weight"],
        ),
        (Parts(body=body(), frozen=nn.Linear(64, 8).requires_grad_(False)), []),
        (Parts(body=body().requires_grad_(False), probe=nn.Linear(64, 10)), ["probe.weight"]),
    ],
)
def test_layers_whose_outputs_nothing_takes_are_output_layers(model: Any, heads: list[str]) -> None:
    groups = oxidion.param_groups(model, "muon", summary=False)
    assert [name for name, said in groups.decisions.items() if "output layer" in said] == heads


def test_head_with_one_output_has_the_rate_of_heads() -> None:
    model = Parts(body=body(), head=nn.Linear(64, 1))
    found = by_name(oxidion.Muon(model, lr=0.02, head_lr=1e-5, scalar_lr=1e-3, summary=False))
    assert (found["head.weight"]["lr"], found["head.bias"]["lr"]) == (1e-5, 1e-3)
    with_lion = by_name(oxidion.Muon(model, lr=0.02, scalar_algorithm="lion", summary=False))
    assert (with_lion["head.weight"]["lr"], with_lion["head.bias"]["lr"]) == (0.02 / 8, 0.02)


def test_note_names_only_what_counts_as_hidden() -> None:
    regression = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 1))
    assert not oxidion.param_groups(regression, "muon", summary=False).summary.note


def test_scripted_models_are_sorted_as_guesses() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)))
    assert set(oxidion.param_groups(model, "muon", summary=False).decisions) == {
        f"{at}.{name}" for at in (0, 1) for name in ("weight", "bias")
    }


def test_summary_has_whole_names_of_single_parameters() -> None:
    table = oxidion.param_groups(network(), "muon", summary=False).summary.to_dict()
    assert table["names"] == ["0.weight", "*.bias", "2.weight"]
