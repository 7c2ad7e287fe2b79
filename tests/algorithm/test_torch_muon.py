"""Muon in the words of torch.optim.Muon: arguments, group keys, and the steps that follow from them."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import oxidion
from oxidion import functional
from support.inputs import gaussian
from support.torch_muon import RULES, TRIPLE, torch_step

SHAPES = ((9, 5), (4, 11), (6, 6), (1, 7))
WORDS: dict[str, Any] = {
    "lr": 0.05,
    "weight_decay": 0.2,
    "momentum": 0.9,
    "ns_coefficients": TRIPLE,
    "ns_steps": 5,
    "eps": 1e-7,
}
STEPS = 4
EXACT = 1e-13
"""Distance from torch's formulas as a share of what was learnt, in float64 and with an eps of 0: rounding."""
EPS_ASIDE = 2e-7
"""The same with an eps of 1e-7: the core adds it to the norm of the sum of gradients, 3 or more here; torch
bounds the norm of their average, a tenth of it, from below, which changes nothing. What is
orthonormalized is 3e-8 smaller here, and an update differs by some times as much."""
BFLOAT16 = 0.03
"""The same from torch's class, which multiplies in bfloat16."""

TorchMuon: Any = getattr(torch.optim, "Muon", None)
needs_torch_muon = pytest.mark.skipif(TorchMuon is None, reason="this torch has no Muon")


def start(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [gaussian(shape, 1, index).to(dtype) for index, shape in enumerate(SHAPES)]


def gradients(step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [gaussian(shape, 2, step, index).to(dtype) for index, shape in enumerate(SHAPES)]


def by_torch_formulas(*, rule: str | None, nesterov: bool, **words: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and averages after some steps."""
    params = start()
    averages = [torch.zeros_like(x) for x in params]
    for step in range(STEPS):
        for x, grad, average in zip(params, gradients(step), averages, strict=True):
            torch_step(x, grad, average, rule=rule, nesterov=nesterov, **words)
    return params, averages


def stepped(make: Callable[[list[Any]], Any], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Parameters after some steps of an optimizer."""
    params = [nn.Parameter(x) for x in start(dtype)]
    optimizer = make(params)
    for step in range(STEPS):
        for param, grad in zip(params, gradients(step, dtype), strict=True):
            param.grad = grad
        optimizer.step()
    return [param.detach() for param in params]


def assert_near(got: list[Tensor], expected: list[Tensor], bound: float) -> None:
    for mine, theirs, old in zip(got, expected, start(), strict=True):
        learnt = (theirs.double() - old).norm()
        assert float((mine.double() - theirs.double()).norm() / learnt) <= bound


@pytest.mark.parametrize(("eps", "bound"), [(0.0, EXACT), (1e-7, EPS_ASIDE)], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_steps_in_words_of_torch_are_those_of_its_formulas(
    rule: str | None, nesterov: bool, eps: float, bound: float
) -> None:
    settings = {**WORDS, "eps": eps}
    expected, _ = by_torch_formulas(rule=rule, nesterov=nesterov, **settings)
    words = {**settings, "adjust_lr_fn": rule, "nesterov": nesterov}
    got = stepped(lambda params: oxidion.Muon(params, orth_dtype="float64", **words))
    assert_near(got, expected, bound)
    groups = stepped(lambda params: oxidion.Muon([{"params": params, **words}], orth_dtype="float64"))
    assert all(map(torch.equal, got, groups))


@pytest.mark.parametrize("words", [{"ns_steps": 3}, {"eps": 0.5}, {"momentum": 0.0}, {"weight_decay": 0.0}])
def test_every_word_acts(words: dict[str, Any]) -> None:
    rule: Any = {"rule": None, "nesterov": True}
    usual = {**WORDS, "adjust_lr_fn": None, "nesterov": True}
    changed = stepped(lambda params: oxidion.Muon(params, **{**usual, **words}))
    unchanged = stepped(lambda params: oxidion.Muon(params, **usual))
    assert all(not torch.equal(x, y) for x, y in zip(changed, unchanged, strict=True))
    if "eps" not in words:  # added to a norm, where torch bounds the norm
        assert_near(changed, by_torch_formulas(**rule, **{**WORDS, **words})[0], EPS_ASIDE)


@needs_torch_muon
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_steps_are_those_of_torch_up_to_bfloat16(rule: str | None, nesterov: bool) -> None:
    words = {**WORDS, "adjust_lr_fn": rule, "nesterov": nesterov}
    if rule == "spectral_unclamped" and rule not in TorchMuon.__doc__:
        pytest.skip("this torch's Muon is older than the rule")
    theirs = stepped(lambda params: TorchMuon(params, **words), torch.float32)
    ours = stepped(lambda params: oxidion.Muon(params, orth_dtype="float32", **words), torch.float32)
    assert_near(ours, theirs, BFLOAT16)
    other = stepped(lambda params: oxidion.Muon(params, **{**words, "ns_steps": 4}), torch.float32)
    with pytest.raises(AssertionError):
        assert_near(other, theirs, BFLOAT16)


@pytest.mark.parametrize(
    "cls", [oxidion.Dion, oxidion.Muon, oxidion.NorMuon, oxidion.Dion2, oxidion.NorDion2]
)
def test_spectral_unclamped_is_torchs_name_for_spectral_norm(cls: Any) -> None:
    def steps(rule: str) -> list[Tensor]:
        return stepped(lambda params: cls(params, adjust_lr=rule))

    assert all(map(torch.equal, steps("spectral_unclamped"), steps("spectral_norm")))
    assert not torch.equal(steps("spectral_unclamped")[0], steps("original")[1])
    assert not torch.equal(steps("spectral_unclamped")[1], steps("original")[1])


@pytest.mark.parametrize("steps", [None, 1, 5, 7])
def test_one_triple_is_a_row_for_every_step(steps: int | None) -> None:
    x = gaussian((6, 9), 3)
    rows = [TRIPLE] * (steps or 5)
    expected = functional.newton_schulz(x, coefficients=rows)
    for one in (TRIPLE, list(TRIPLE)):
        assert torch.equal(functional.newton_schulz(x, coefficients=one, steps=steps), expected)
    # A list of one triple has one row.
    assert torch.equal(
        functional.newton_schulz(x, coefficients=[TRIPLE]),
        functional.newton_schulz(x, coefficients=TRIPLE, steps=1),
    )
    whole = functional.newton_schulz(x, coefficients=(2, -1, 0), steps=steps)
    assert torch.equal(whole, functional.newton_schulz(x, coefficients=[(2.0, -1.0, 0.0)] * (steps or 5)))


@pytest.mark.parametrize("cls", [oxidion.Muon, oxidion.NorMuon])
def test_verify_knows_one_triple_and_the_words(cls: Any) -> None:
    params = [nn.Parameter(x) for x in start()]
    optimizer = cls(params, momentum=0.9, adjust_lr_fn="spectral_unclamped", ns_coefficients=TRIPLE)
    for param, grad in zip(params, gradients(0), strict=True):
        param.grad = grad
    assert all(error <= 1e-6 for error in optimizer.verify().to_dict()["update_error"])


def matrix() -> nn.Parameter:
    return nn.Parameter(gaussian((4, 6), 5))


@pytest.mark.parametrize("cls", [oxidion.Muon, oxidion.NorMuon])
def test_groups_keep_the_keys_of_the_class(cls: Any) -> None:
    words = {"momentum": 0.75, "adjust_lr_fn": None, "eps": 1e-5}
    kept = {"mu": 0.75, "adjust_lr": "original", "epsilon": 1e-5}
    given = cls([matrix()], **words)
    grouped = cls([{"params": [matrix()], **words}])
    added = cls([matrix()])
    added.add_param_group({"params": [matrix()], **words})
    elsewhere = oxidion.AdamW([{"params": [matrix()], "algorithm": cls._ALGORITHM, **words}])
    for optimizer in (given, grouped, added):
        group = optimizer.param_groups[-1]
        assert {key: group[key] for key in kept} == kept
        assert not words.keys() & group.keys()
    assert given.defaults["mu"] == 0.75
    assert added.param_groups[0]["mu"] == 0.95
    # AdamW's word for the third is eps.
    own = elsewhere.param_groups[0]
    assert (own["mu"], own["adjust_lr"], own["eps"], "epsilon" in own) == (0.75, "original", 1e-5, False)


def test_defaults_of_the_words_are_left_out() -> None:
    parameters = inspect.signature(oxidion.Muon).parameters
    left = {name: parameters[name].default for name in ("momentum", "adjust_lr_fn", "eps")}
    assert [repr(value) for value in left.values()] == ["<left out>"] * 3
    group = oxidion.Muon([matrix()], **left).param_groups[0]
    assert (group["mu"], group["adjust_lr"], group["epsilon"]) == (0.95, "spectral_norm", 1e-8)
    group = oxidion.Muon([matrix()], mu=0.5, **left).param_groups[0]
    assert group["mu"] == 0.5


BOTH = (
    ({"mu": 0.95, "momentum": 0.9}, "momentum=0.9 and mu=0.95"),
    ({"adjust_lr": "spectral_norm", "adjust_lr_fn": None}, "adjust_lr_fn=None and adjust_lr='spectral_norm'"),
    ({"adjust_lr": None, "adjust_lr_fn": "original"}, "adjust_lr_fn='original' and adjust_lr=None"),
    ({"epsilon": 1e-8, "eps": 1e-7}, "eps=1e-07 and epsilon=1e-08"),
)


@pytest.mark.parametrize(("both", "says"), BOTH, ids=[says for _, says in BOTH])
def test_two_words_for_one_setting_must_be_equal(both: dict[str, Any], says: str) -> None:
    cls: Any = oxidion.Muon
    with pytest.raises(ValueError, match=f"{says} .arguments.: leave one of them out"):
        cls([matrix()], **both)
    with pytest.raises(ValueError, match=f"{says} .group 0.: leave one of them out"):
        cls([{"params": [matrix()], **both}])
    optimizer = cls([matrix()])
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(both)
    before = {**optimizer.param_groups[0]}
    with pytest.raises(ValueError, match=f"{says} .group 0 of the state dict.: leave one of them out"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0] == before


def test_two_equal_words_are_one() -> None:
    cls: Any = oxidion.Muon
    assert cls([matrix()], 0.01, 0.5, momentum=0.5).param_groups[0]["mu"] == 0.5
    with pytest.raises(ValueError, match=r"momentum=0.25 and mu=0.5"):
        cls([matrix()], 0.01, 0.5, momentum=0.25)
    group = cls([matrix()], adjust_lr="original", adjust_lr_fn=None, eps=1e-8, epsilon=1e-8).param_groups[0]
    assert (group["adjust_lr"], group["epsilon"]) == ("original", 1e-8)


WRONG = (
    (
        {"adjust_lr_fn": "spectral_unclampt"},
        "adjust_lr_fn must be one of None, .*; the nearest is 'spectral_unclamped'",
    ),
    (
        {"adjust_lr_fn": "spectral_norm"},
        "adjust_lr_fn must be one of None, 'original', .*, got 'spectral_norm'",
    ),
    ({"adjust_lr": "match_rms_adam"}, "adjust_lr must be one of .*; the nearest is 'match_rms_adamw'"),
    (
        {"ns_coefficients": "keller_jordon"},
        "ns_coefficients must be one of .*; the nearest is 'keller_jordan'",
    ),
    ({"momentum": -0.5}, "momentum must be a finite number >= 0, got -0.5"),
    ({"momentum": None}, "momentum must be a finite number >= 0, got None"),
    ({"eps": math.nan}, "eps must be a finite number >= 0, got nan"),
    (
        {"ns_coefficients": (1.0, 2.0)},
        r"ns_coefficients must be .*a triple \(a, b, c\) or .*, got \(1.0, 2.0\)",
    ),
    ({"ns_coefficients": (1.0, math.inf, 2.0)}, "ns_coefficients must be .*finite"),
)


@pytest.mark.parametrize(("wrong", "says"), WRONG, ids=[str(wrong) for wrong, _ in WRONG])
@pytest.mark.parametrize("place", ["arguments", "group"])
def test_error_for_a_wrong_value_names_the_word_that_was_used(
    wrong: dict[str, Any], says: str, place: str
) -> None:
    cls: Any = oxidion.Muon
    with pytest.raises(ValueError, match=says):
        cls([matrix()], **wrong) if place == "arguments" else cls([{"params": [matrix()], **wrong}])


def test_a_word_that_is_like_nothing_has_no_nearest() -> None:
    with pytest.raises(ValueError, match=r"got 'qr' \(defaults\)$"):
        oxidion.Muon([matrix()], orth_method="qr")


@pytest.mark.parametrize(("wrong", "near"), [("momentun", "momentum"), ("adjust_lr_func", "adjust_lr_fn")])
def test_error_for_a_wrong_word_names_the_nearest(wrong: str, near: str) -> None:
    cls: Any = oxidion.Muon
    with pytest.raises(TypeError, match=f"no argument '{wrong}', .* argument is '{near}'"):
        cls([matrix()], **{wrong: 0.5})
    with pytest.raises(ValueError, match=f"unknown group key '{wrong}' .* key is '{near}'"):
        cls([{"params": [matrix()], wrong: 0.5}])


@pytest.mark.parametrize("algorithm", ["dion", "dion2", "nordion2", "adamw", "lion"])
def test_momentum_is_no_key_of_algorithms_with_another_meaning(algorithm: str) -> None:
    with pytest.raises(ValueError, match="unknown group key 'momentum'"):
        oxidion.Muon([{"params": [matrix()], "algorithm": algorithm, "momentum": 0.5}])
    words = {"params": [matrix()], "algorithm": algorithm, "eps": 1e-4}
    if algorithm == "lion":
        with pytest.raises(ValueError, match=r"eps=0\.0001 is not read by 'lion'"):
            oxidion.Muon([words])
    else:
        assert oxidion.Muon([words]).param_groups[0]["epsilon"] == 1e-4


def test_momentum_written_between_steps_is_used_in_the_next_step() -> None:
    """Loops that warm the momentum up write it into the groups."""

    def run(word: str) -> list[Tensor]:
        params = [nn.Parameter(x) for x in start()]
        optimizer = oxidion.Muon(params)
        for step in range(STEPS):
            optimizer.param_groups[0][word] = 0.5 + 0.1 * step
            for param, grad in zip(params, gradients(step), strict=True):
                param.grad = grad
            optimizer.step()
            assert "momentum" not in optimizer.param_groups[0]
        return [param.detach() for param in params]

    assert all(map(torch.equal, run("momentum"), run("mu")))
    constant = stepped(oxidion.Muon)
    assert not any(map(torch.equal, run("momentum"), constant))


def test_words_written_between_steps_reach_plans_and_checkpoints() -> None:
    optimizer = oxidion.Muon([matrix()])
    group = optimizer.param_groups[0]
    group["momentum"] = 0.25
    assert copy.deepcopy(optimizer).param_groups[0]["mu"] == 0.25
    group["momentum"] = 0.5
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["mu"] == 0.5
    group["momentum"] = 0.75
    saved = optimizer.state_dict()["param_groups"][0]
    assert saved["mu"] == 0.75
    assert "momentum" not in saved
    group["adjust_lr_fn"] = "match_rms_adamw"
    assert optimizer.explain().to_dict()["lr_factor"] == [0.2 * math.sqrt(6)]
    group["momentum"] = -1.0
    with pytest.raises(ValueError, match=r"momentum must be a finite number >= 0, got -1.0 .group 0"):
        optimizer.step()


def test_state_dict_with_words_of_torch_is_loaded() -> None:
    optimizer = oxidion.Muon([matrix()])
    saved = optimizer.state_dict()
    words = {"momentum": 0.5, "adjust_lr_fn": None, "eps": 1e-5, "ns_coefficients": TRIPLE, "ns_steps": 4}
    group = {"params": saved["param_groups"][0]["params"], "lr": 0.5, **words}
    given = {"state": {}, "param_groups": [dict(group)]}
    optimizer.load_state_dict(given)
    loaded = optimizer.param_groups[0]
    assert (loaded["mu"], loaded["adjust_lr"], loaded["epsilon"], loaded["lr"]) == (
        0.5,
        "original",
        1e-5,
        0.5,
    )
    assert (loaded["ns_coefficients"], loaded["ns_steps"]) == (TRIPLE, 4)
    assert not {"momentum", "adjust_lr_fn", "eps"} & loaded.keys()
    assert given["param_groups"] == [group], "what was given is left as it is"
    loaded["params"][0].grad = gaussian((4, 6), 6)
    optimizer.step()


def test_schedulers_write_what_they_write_without_the_words() -> None:
    """OneCycleLR cycles a key of the defaults: betas, which mu follows."""
    weight, bias = matrix(), nn.Parameter(torch.zeros(6, dtype=torch.float64))
    optimizer = oxidion.Muon([{"params": [weight]}, {"params": [bias], "algorithm": "adamw"}], momentum=0.5)
    cycle = OneCycleLR(optimizer, max_lr=0.05, total_steps=6)
    seen = set()
    for step in range(4):
        weight.grad, bias.grad = gaussian((4, 6), 7, step), gaussian((6,), 8, step)
        optimizer.step()
        assert optimizer.param_groups[0]["mu"] == optimizer.param_groups[0]["betas"][0]
        cycle.step()
        seen.add(optimizer.param_groups[1]["betas"][0])
    assert len(seen) == 4
    scheduler = LambdaLR(oxidion.Muon([matrix()], lr=1.0, momentum=0.5), lambda step: 1 / (1 + step))
    scheduler.optimizer.step()
    scheduler.step()
    assert scheduler.optimizer.param_groups[0]["lr"] == 0.5


def test_classes_of_users_may_have_a_momentum_of_their_own() -> None:
    class Own(oxidion.Muon):
        """Muon by its momentum.

        Args:
            params: of the model.
            momentum: halved before use.
        """

        def __init__(self, params: Any, momentum: float = 0.5) -> None:
            super().__init__(params, momentum=momentum / 2)

    assert Own([matrix()]).param_groups[0]["mu"] == 0.25
    assert Own([matrix()], momentum=1.0).param_groups[0]["mu"] == 0.5


def test_average_of_torch_is_not_taken_for_no_momentum() -> None:
    """A checkpoint of torch.optim.Muon that is loaded as it is: its groups fit, its states do not."""
    param = matrix()
    param.grad = gaussian((4, 6), 6)
    optimizer = oxidion.Muon([param])
    group = {"params": [0], "lr": 0.5, "momentum": 0.5, "adjust_lr_fn": None, "eps": 1e-7}
    state = {0: {"momentum_buffer": gaussian((4, 6), 7)}}
    kept = param.detach().clone()
    with pytest.raises(
        ValueError,
        match=r"has torch's 'momentum_buffer' and no 'momentum': .*import_state_dict",
    ):
        optimizer.load_state_dict({"state": state, "param_groups": [group]})
    assert not optimizer.state
    assert optimizer.param_groups[0]["mu"] == 0.95
    whole = {"weight_decay": 0.0, "nesterov": True, "ns_coefficients": TRIPLE, "ns_steps": 5}
    saved = {"state": state, "param_groups": [{**group, **whole}]}
    optimizer.load_state_dict(oxidion.checkpoint.import_state_dict(saved, "torch-muon"))
    optimizer.step()
    assert not torch.equal(param, kept)
