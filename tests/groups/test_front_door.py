"""First calls of a user: a model instead of parameters, algorithms, keys and names."""

from __future__ import annotations

import inspect
import itertools
import typing
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import oxidion
from oxidion._core import schema
from oxidion._core.base import OxOptimizer
from oxidion.optim import AlgorithmName

CLASSES = [
    cls
    for cls in (getattr(oxidion, name) for name in oxidion.__all__ if name != "Dion3")
    if inspect.isclass(cls) and issubclass(cls, Optimizer)
]
every_class = pytest.mark.parametrize("cls", CLASSES)


def needed(cls: Any) -> dict[str, Any]:
    """Arguments without which a class cannot be made of a model."""
    rank = {"rank": 4} if cls in (oxidion.GaLoreAdamW, oxidion.APOLLOAdamW) else {}
    return rank | ({"lr": 1e-3} if cls is oxidion.CAME else {})


def network() -> nn.Sequential:
    """An embedding, a hidden matrix and an output layer."""
    return nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 40))


def algorithms_of(optimizer: Optimizer) -> dict[str, str]:
    """The algorithm of each parameter by name."""
    return {name: group["algorithm"] for group in optimizer.param_groups for name in group["param_names"]}


def step(model: nn.Module, optimizer: Optimizer) -> Tensor:
    """A step with gradients that are the same each time; all parameters after it."""
    chance = torch.Generator().manual_seed(1)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=chance)
    optimizer.step()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


# ------------------------------------------------------------------ the model itself


@every_class
def test_every_class_takes_a_model(cls: Any) -> None:
    optimizer = cls(network(), summary=False, **needed(cls))
    rest = "adamw" if cls._MATRIX else cls._ALGORITHM
    hidden = {name for name, algorithm in algorithms_of(optimizer).items() if algorithm == cls._ALGORITHM}
    assert hidden == {"1.weight"} if cls._MATRIX else hidden >= {"0.weight", "1.weight", "3.weight"}
    assert set(algorithms_of(optimizer).values()) == {cls._ALGORITHM, rest}


@every_class
def test_a_model_gives_the_steps_of_its_groups(cls: Any) -> None:
    ends = []
    for given in (
        lambda model: model,
        lambda model: oxidion.param_groups(model, cls, summary=False),
        lambda model: oxidion.param_groups(model, summary=False),
        lambda model: [dict(group) for group in oxidion.param_groups(model, summary=False)],
    ):
        torch.manual_seed(0)
        model = network()
        options = {"summary": False} if not ends else {}
        ends.append(step(model, cls(given(model), **options, **needed(cls))))
    for end in ends[1:]:
        assert torch.equal(end, ends[0])


def test_arguments_of_groups_are_taken_with_a_model() -> None:
    optimizer = oxidion.Muon(
        network(),
        lr=0.02,
        scalar_lr=3e-4,
        head_lr=1e-4,
        embedding_lr=0.1,
        scalar_betas=(0.5, 0.6),
        weight_decay=0.2,
        overrides={"1.bias": "lion"},
        average="ema",
        scalar_average="ema",
        nesterov=True,
        summary=False,
    )
    found = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    assert {name: group["lr"] for name, group in found.items()} == {
        "0.weight": 0.1,
        "1.weight": 0.02,
        "1.bias": 3e-4,
        "3.weight": 1e-4,
        "3.bias": 3e-4,
    }
    assert found["1.bias"]["algorithm"] == "lion"
    assert found["0.weight"]["betas"] == (0.5, 0.6)
    assert (found["1.weight"]["weight_decay"], found["3.weight"]["weight_decay"]) == (0.2, 0.0)
    assert found["1.weight"]["nesterov"]
    assert found["0.weight"]["average"] == found["1.weight"]["average"] == "ema"


def test_parameters_given_with_their_model_are_sorted_with_keys() -> None:
    model = network()
    for params in (model.parameters(), list(model.named_parameters())):
        whole = oxidion.Muon(params, model=model, lr=0.02, summary=False)
        assert algorithms_of(whole) == algorithms_of(oxidion.Muon(model, lr=0.02, summary=False))
    decayed, free = list(model[1].parameters()), list(model[3].parameters())
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": free, "weight_decay": 0.0, "lr": 1e-3}]
    some = oxidion.Muon(groups, model=model, lr=0.02, summary=False)
    assert algorithms_of(some) == {
        name: word for name, word in algorithms_of(whole).items() if name[0] != "0"
    }
    assert {(g["algorithm"], g["weight_decay"], g["lr"]) for g in some.param_groups} == {
        ("muon", 0.3, 0.02),
        ("adamw", 0.3, 0.02),
        ("adamw", 0.0, 1e-3),
    }
    with pytest.raises(
        ValueError, match=r"parameter 0 of group 0, of shape \(40, 24\), is not one of the model"
    ):
        oxidion.Muon(model[3].parameters(), model=model[1], summary=False)


def test_wrapped_models_have_the_names_of_the_model_inside() -> None:
    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.compile
        compiled = torch.compile(model), torch.compile(nn.DataParallel(model))
    for outer in (nn.DataParallel(model), *compiled):
        assert algorithms_of(oxidion.Muon(outer, summary=False)) == algorithms_of(
            oxidion.Muon(model, summary=False)
        )


@pytest.mark.parametrize("cls", [oxidion.GaLoreAdamW, oxidion.APOLLOAdamW])
def test_a_class_that_projects_asks_for_a_rank(cls: Any) -> None:
    with pytest.raises(ValueError, match=rf"oxidion.{cls.__name__}\(model, rank=128\)"):
        cls(network(), summary=False)
    assert cls(network(), overrides={"1.weight": {"rank": 4}}, summary=False).param_groups[0]["rank"] == 4


# ------------------------------------------------------------------ errors of first calls


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda m: oxidion.Muon(m.parameters()),
            ValueError,
            r"Muon takes weight matrices.*oxidion\.Muon\(model, lr=.*oxidion\.Muon\(params, model=model\)",
        ),
        (
            lambda m: oxidion.Dion(m.parameters()),
            ValueError,
            r"Dion takes weight matrices.*oxidion\.Dion\(model",
        ),
        (lambda m: oxidion.param_groups(m.parameters()), TypeError, "takes the model itself"),
        (lambda m: oxidion.Muon(m.parameters(), scalar_lr=1e-3), TypeError, "'scalar_lr' .* pass the model"),
        (lambda m: oxidion.Muon(m.parameters(), model=3), TypeError, "model must be an nn.Module"),
        (lambda m: oxidion.Muon(m, scaler_lr=1.0), TypeError, "nearest known argument is 'scalar_lr'"),
        (lambda m: oxidion.Muon(m, scalar_lrr=1.0), TypeError, "nearest one is 'scalar_lr'"),
        (lambda m: oxidion.Muon([m[1].weight], average="ema"), TypeError, "is a key of groups"),
        (lambda m: oxidion.Muon(m, algorithm="dion"), TypeError, "by 'muon', got algorithm='dion'"),
        (lambda m: oxidion.AdamW(m, lr="1e-3"), ValueError, "it is text: pass the number 0.001"),
        (lambda m: oxidion.Muon(m, lr=0.1, weight_decay="0.1"), ValueError, "pass the number 0.1"),
        (lambda m: oxidion.MuonH(m, momentums=0.9), TypeError, r"MuonH\(\) has no argument.*'momentum'"),
        (
            lambda m: oxidion.AdamW([{"params": [m[1].weight], "differentiable": True}]),
            RuntimeError,
            "does not support differentiable=True",
        ),
        (
            lambda m: oxidion.param_groups(m, algorithm=torch.optim.AdamW),
            TypeError,
            "class torch.optim.*AdamW",
        ),
        (lambda m: oxidion.param_groups(m, algorithm="doin"), ValueError, "the nearest is 'dion'"),
        (
            lambda m: oxidion.param_groups(m, scalar_algorithm=3),
            TypeError,
            "scalar_algorithm must be a class",
        ),
    ],
)
def test_errors_of_first_calls_say_what_to_do(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call(network())


def test_learning_rate_is_second_in_every_class() -> None:
    for cls in CLASSES:
        assert list(inspect.signature(cls).parameters)[:2] == ["params", "lr"], cls
        if cls is not oxidion.Adafactor:
            assert cls([nn.Parameter(torch.ones(8, 8))], 0.123).param_groups[0]["lr"] == 0.123


@pytest.mark.parametrize("shape", [(64, 8), (8, 64), (2, 64, 8)])
def test_strict_false_warns_of_what_looks_like_an_embedding(shape: tuple[int, ...]) -> None:
    sizes = (shape, (8, 8), (8,), (8, 8))
    long, square, bias, other = (nn.Parameter(torch.zeros(size)) for size in sizes)
    for params in ([long, square, bias], [square, long, bias]):
        with pytest.warns(UserWarning, match=r"looks like an embedding.*oxidion\.Muon\(model\)") as seen:
            oxidion.Muon(params, strict=False)
        assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        oxidion.Muon([square, bias, long, other], strict=False)  # neither first nor last
        oxidion.Muon([long, square])  # no vectors: these may be adapters
        oxidion.Muon(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)), strict=False, summary=False)


def test_class_whose_algorithm_no_group_has_says_so(caplog: pytest.LogCaptureFixture) -> None:
    groups = oxidion.param_groups(network(), algorithm="dion", summary=False)
    oxidion.Dion(groups)
    oxidion.AdamW(oxidion.param_groups(network(), algorithm="dion", summary=False))
    assert not caplog.records
    oxidion.Muon(oxidion.param_groups(network(), algorithm="dion", summary=False))
    (said,) = caplog.messages
    assert said.startswith("no group of this Muon has its algorithm, 'muon'")
    assert said.endswith("'adamw', 'dion'")


# ------------------------------------------------------------------ names of algorithms


@every_class
def test_classes_and_any_case_name_an_algorithm(cls: Any) -> None:
    name = cls.__name__
    for word in (cls, name, name.lower(), name.upper()):
        optimizer = cls(oxidion.param_groups(network(), word, summary=False, **needed(cls)), **needed(cls))
        usual = cls(network(), summary=False, **needed(cls))
        for group, other in zip(optimizer.param_groups, usual.param_groups, strict=True):
            assert {k: v for k, v in group.items() if k != "params"} == {
                k: v for k, v in other.items() if k != "params"
            }, word


def test_algorithms_of_groups_and_overrides_have_any_case() -> None:
    weight, other = (nn.Parameter(torch.ones(8, 8)) for _ in range(2))

    def group(word: Any) -> dict[str, Any]:
        """The group of an AdamW that names an algorithm by this word."""
        made = oxidion.AdamW([{"params": [weight], "algorithm": word}, {"params": [other]}])
        return made.param_groups[0]

    for word in ("Lion", "LION", "lion", oxidion.Lion):
        assert group(word)["algorithm"] == "lion"
        groups = oxidion.param_groups(network(), "muon", overrides={"1.weight": word}, summary=False)
        assert groups.decisions["1.weight"].startswith("lion")
    held = group(oxidion.MuonH)
    assert (held["algorithm"], held["weight_norm"], held["nesterov"]) == ("muon", "hyperball", True)
    optimizer = oxidion.Muon([weight])
    optimizer.param_groups[0]["algorithm"] = "Muon"
    weight.grad = torch.ones(8, 8)
    optimizer.step()
    optimizer.param_groups[0]["algorithm"] = "moun"
    with pytest.raises(
        ValueError, match=r"algorithm must be one of.*'moun' \(group 0\); the nearest is 'muon'"
    ):
        optimizer.step()


# ------------------------------------------------------------------ output layers, rates


class Perceptron(nn.Module):
    """Layers in a container of any name."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


@pytest.mark.parametrize(
    ("model", "head"),
    [
        (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10)), "2.weight"),
        (nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 24), nn.Linear(24, 32)), "2.weight"),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(72, 10)), "2.weight"),
        (
            nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Sequential(nn.Linear(16, 3))),
            "1.0.weight",
        ),
        (Perceptron(8, 16, 16, 5), "net.2.weight"),
        (nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 5)]), "1.weight"),
        # Its outputs are what another layer takes, or there is no other.
        (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), None),
        (nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 24), nn.Linear(24, 16)), None),
        (Perceptron(8, 16), None),
    ],
)
def test_layer_of_outputs_of_a_plain_stack(model: nn.Module, head: str | None) -> None:
    groups = oxidion.param_groups(model, "muon", summary=False)
    found = [name for name, said in groups.decisions.items() if "output layer" in said]
    last = [name for name in groups.decisions if name.endswith("weight")][-1]
    assert found == ([head] if head else [])
    assert ("no output layer was found" in groups.summary.note) == (head is None)
    if head is None:
        assert last in str(groups.summary).splitlines()[-1]


def test_trained_head_of_a_frozen_body_is_a_layer_of_outputs() -> None:
    model = network().requires_grad_(False)
    model[3].requires_grad_(True)
    groups = oxidion.param_groups(model, "muon", summary=False)
    assert groups.decisions["3.weight"] == "adamw (output layer, the last one)"
    model.requires_grad_(True)[3].requires_grad_(False)
    assert not oxidion.param_groups(model, "muon", summary=False).summary.note


def test_names_of_groups_that_are_given_again_stay() -> None:
    groups = oxidion.Muon(network(), summary=False).param_groups
    names = [group["param_names"] for group in groups]
    assert [group["param_names"] for group in oxidion.Muon(groups).param_groups] == names


def test_type_of_algorithms_has_all_names() -> None:
    assert set(typing.get_args(AlgorithmName)) == set(OxOptimizer._registry)


def rates(optimizer: Optimizer) -> dict[str, float]:
    """Learning rates by the name of the parameter."""
    return {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}


def test_rest_has_the_base_rate_and_a_head_under_lion_less() -> None:
    assert set(rates(oxidion.Muon(network(), lr=0.02, summary=False)).values()) == {0.02}
    assert set(rates(oxidion.Dion(network(), summary=False)).values()) == {0.01}
    with_lion = rates(oxidion.Muon(network(), lr=0.02, scalar_algorithm="Lion", summary=False))
    assert with_lion.pop("3.weight") == pytest.approx(0.02 / 24**0.5)
    assert set(with_lion.values()) == {0.02}
    for given in ({"scalar_lr": 0.02}, {"head_lr": 0.02}):
        found = rates(oxidion.Muon(network(), lr=0.02, scalar_algorithm="lion", summary=False, **given))
        assert found["3.weight"] == 0.02, given
    assert set(rates(oxidion.Lion(network(), lr=1e-4, summary=False)).values()) == {1e-4}


def test_summary_shows_the_rate_of_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(33, 16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 41))
    oxidion.Muon(model, lr=0.0625, scalar_algorithm="lion")
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].split()[:3] == ["rule", "algorithm", "lr"]
    assert any(
        line.startswith("linear layers ") and " muon " in line and " 0.0625 " in line for line in lines
    )
    assert any(line.startswith("output layer") and f"{0.0625 / 24**0.5:.3g}" in line for line in lines)
    summary = oxidion.param_groups(model, lr=torch.tensor(0.5), summary=False).summary
    assert set(summary.to_dict()["lr"]) == {0.5}
    assert set(oxidion.param_groups(model, summary=False).summary.to_dict()["lr"]) == {"default"}


# ------------------------------------------------------------------ keys of other algorithms

VALUES: tuple[Any, ...] = (
    *(0.123, 7, 16, 1.5, -0.1, 1, True, False, "float64"),
    *((2, 3), (0.1, 0.2), (0.1, 0.2, 0.3), {"x": 1.0}),
)


def other_value(key: str, field: Any) -> Any:
    """A value that a key may have and that is no algorithm's default; None where there is none."""
    usual = [own[key].default for own in OxOptimizer._schemas().values() if key in own]
    return next(
        (value for value in (*field.words, *VALUES) if field.check(value) and value not in usual), None
    )


def pairs() -> list[tuple[str, str, Any]]:
    """Algorithms with keys that only others have, and a value for each."""
    schemas = OxOptimizer._schemas()
    spelled = {*schema.SPELLINGS, "beta1", "beta2"}  # one class's word for what another has
    fields = {key: field for own in schemas.values() for key, field in own.items()}
    return [
        (algorithm, key, other_value(key, field))
        for algorithm, own in schemas.items()
        for key, field in fields.items()
        if key not in {*own, *schema.COMMON, *OxOptimizer._registry[algorithm]._WORDS} | spelled
        and other_value(key, field) is not None
    ]


def test_keys_that_an_algorithm_does_not_read_are_refused() -> None:
    found = pairs()
    assert len(found) > 400
    weight = nn.Parameter(torch.ones(8, 8))
    for algorithm, key, value in found:
        cls: Any = OxOptimizer._registry[algorithm]
        said = rf"{key}=.* is not read by '{algorithm}'"
        for made in (cls, oxidion.AdamW, oxidion.Muon):
            with pytest.raises(ValueError, match=said):
                made([{"params": [weight], "algorithm": algorithm, key: value}], **needed(made))
        with pytest.raises(ValueError, match=said):
            oxidion.param_groups(network(), algorithm, summary=False, **{key: value})
        with pytest.raises(ValueError, match=f"scalar_{said}"):
            oxidion.param_groups(
                network(), "muon", scalar_algorithm=algorithm, summary=False, **{f"scalar_{key}": value}
            )


@pytest.mark.parametrize(
    ("algorithm", "key", "near"),
    [("dion", "rank", "rank_fraction"), ("dion2", "mu", "ef_decay"), ("muon", "ef_decay", "mu")],
)
def test_error_for_a_key_of_another_algorithm_names_the_nearest(algorithm: str, key: str, near: str) -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    with pytest.raises(ValueError, match=f"the nearest key that it has is '{near}'"):
        oxidion.AdamW([{"params": [weight], "algorithm": algorithm, key: 1}])


def test_redundant_keys_and_those_of_other_optimizers_are_kept() -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    fields = {key: field for own in OxOptimizer._schemas().values() for key, field in own.items()}
    for algorithm, key, _ in pairs():
        for value in (None, fields[key].default):
            cls: Any = OxOptimizer._registry[algorithm]
            cls([{"params": [weight], key: value}], **needed(cls))
    groups = oxidion.Muon(network(), mu=0.9, nesterov=True, summary=False).param_groups
    again = oxidion.Muon(groups)
    assert again.param_groups[0]["mu"] == 0.9
    saved = oxidion.Muon(network(), summary=False).state_dict()
    saved["param_groups"][1]["max_grad_norm"] = 0.5
    loaded = oxidion.Muon(network(), summary=False)
    loaded.load_state_dict(saved)
    assert loaded.param_groups[1]["max_grad_norm"] == 0.5


# ------------------------------------------------------------------ names of parameters


def test_bare_parameters_get_names_where_others_have_some() -> None:
    model = network()
    optimizer = oxidion.Muon(model[:2], summary=False)
    optimizer.add_param_group({"params": [model[3].weight]})
    optimizer.add_param_group({"params": model[3].bias, "algorithm": "adamw"})
    count = len(optimizer.param_groups)
    assert [g["param_names"] for g in optimizer.param_groups[-2:]] == [
        [f"group{count - 2}.0"],
        [f"group{count - 1}.0"],
    ]
    step(model, optimizer)


def test_names_are_unique_over_the_groups() -> None:
    model = network()
    optimizer = oxidion.Muon(oxidion.param_groups(model[1], "muon", summary=False))
    with pytest.raises(
        ValueError, match=r"'weight' is the name of a parameter of another group.*prefix='part'"
    ):
        optimizer.add_param_group({"params": [("weight", model[3].weight)]})
    for group in oxidion.param_groups(model[3], "muon", prefix="head", summary=False):
        optimizer.add_param_group(group)
    assert set(algorithms_of(optimizer)) == {"weight", "bias", "head.weight", "head.bias"}
    with pytest.raises(ValueError, match="'a' is the name of a parameter of another group"):
        oxidion.AdamW([{"params": [("a", model[1].weight)]}, {"params": [("a", model[3].weight)]}])
    with pytest.raises(
        ValueError, match="cannot add param group with names to the optimizer, whose groups have none"
    ):
        oxidion.AdamW([model[1].weight]).add_param_group({"params": [("a", model[3].weight)]})


def test_prefix_stands_before_the_names() -> None:
    for prefix in ("encoder", "encoder."):
        groups = oxidion.param_groups(
            network(), "muon", prefix=prefix, overrides={"encoder.1.*": "lion"}, summary=False
        )
        assert groups.decisions["encoder.1.weight"].startswith("lion")
        assert all(name.startswith("encoder.") for group in groups for name, _ in group["params"])


# ------------------------------------------------------------------ what a shell completes


def test_completion_shows_what_is_for_users() -> None:
    assert {name for name in dir(oxidion) if not name.startswith("_")} == set(oxidion.__all__) - {
        "__version__"
    }
    usual = set(dir(Optimizer))
    for cls in CLASSES:
        assert {name for name in dir(cls) if not name.startswith("_")} - usual == {
            *("averaged", "averaged_state_dict", "compare_every", "eval", "explain", "init_state", "metrics"),
            *("plan", "synchronize_for_checkpoint", "train", "verify"),
        }
