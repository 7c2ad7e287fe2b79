"""Checkpoints of other packages: structure as their optimizers write it, values from naive steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion._reference.registry import REFERENCE
from oxidion.checkpoint import SOURCES, import_state_dict
from support.asserts import assert_tensors_close, update_relative_error
from support.inputs import Shape, gaussian

SHAPES: tuple[Shape, ...] = ((16, 12), (7, 5), (13,), (4, 6, 10))
HF = {"eps": (1e-30, 1e-3), "clip_threshold": 1.0, "decay_rate": -0.8, "beta1": None, "weight_decay": 0.125}
HF |= {"lr": None, "scale_parameter": True, "relative_step": True, "warmup_init": False}
CAME = {"lr": 0.01, "eps": (1e-30, 1e-16), "clip_threshold": 1.0, "betas": (0.9, 0.999, 0.9999)}
LAMB = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.125}
FACTORS = {"row": "exp_avg_sq_row", "col": "exp_avg_sq_col"}
NAMES = {"momentum": "exp_avg", "variance": "exp_avg_sq", **FACTORS}
NAMES |= {f"res_{part}": f"exp_avg_res_{part}" for part in ("row", "col")}

SETTINGS: dict[str, tuple[str, type, dict[str, Any], dict[str, Any]]] = {
    "adafactor-relative": ("hf-adafactor", oxidion.Adafactor, HF, {}),
    "adafactor-beta1": (
        "hf-adafactor",
        oxidion.Adafactor,
        {**HF, "lr": 0.01, "relative_step": False, "scale_parameter": False, "beta1": 0.9},
        {},
    ),
    "came": ("came-pytorch", oxidion.CAME, {**CAME, "weight_decay": 0.125}, {}),
    "lamb": ("colossalai-lamb", oxidion.Lamb, LAMB, {"debias": "none", "always_adapt": True}),
    "lamb-corrected": (
        "colossalai-lamb",
        oxidion.Lamb,
        {**LAMB, "bias_correction": True, "weight_decay": 0.0},
        {"debias": "step", "always_adapt": True},
    ),
}
every_setting = pytest.mark.parametrize("name", SETTINGS)


class Theirs:
    """What another package's optimizer would hold after some steps, taken naively in float64."""

    def __init__(self, name: str, shapes: tuple[Shape, ...] = SHAPES) -> None:
        self.source, self.cls, self.group, more = SETTINGS[name]
        self.algorithm = self.cls._ALGORITHM  # type: ignore[attr-defined]
        self.reference = {**self.group, **more}
        self.params = [gaussian(shape, 1, index, scale=0.1) for index, shape in enumerate(shapes)]
        self.states: list[dict[str, Tensor]] = [{} for _ in shapes]

    def gradients(self, step: int) -> list[Tensor]:
        return [gaussian(tuple(p.shape), 2, step, i) * 10.0 ** -(step % 3) for i, p in enumerate(self.params)]

    def steps(self, numbers: range) -> None:
        for number in numbers:
            for param, grad, state in zip(self.params, self.gradients(number), self.states, strict=True):
                REFERENCE[self.algorithm](param, grad, state, self.reference)

    def state_dict(self) -> dict[str, Any]:
        """Steps are numbers, means are not kept, and there are scalars that mean nothing."""
        states = {
            index: {
                "step": int(state["step"]),
                "RMS": 0,
                **{NAMES[role]: value.clone() for role, value in state.items() if role in NAMES},
            }
            for index, state in enumerate(self.states)
        }
        return {"state": states, "param_groups": [{**self.group, "params": list(range(len(self.params)))}]}

    def ours(self) -> Any:
        needs = {"lr": 1.0} if self.cls is oxidion.CAME else {}
        return self.cls([nn.Parameter(param.clone()) for param in self.params], **needs)


@every_setting
@pytest.mark.parametrize("with_optimizer", [False, True])
def test_training_goes_on_as_it_would_have_there(name: str, with_optimizer: bool) -> None:
    theirs = Theirs(name)
    theirs.steps(range(4))
    optimizer = theirs.ours()
    saved = theirs.state_dict()
    held = copy.deepcopy(saved)
    optimizer.load_state_dict(
        import_state_dict(saved, theirs.source, optimizer=optimizer if with_optimizer else None)
    )
    start = [param.clone() for param in theirs.params]
    mine = optimizer.param_groups[0]["params"]
    for number in range(4, 7):
        for param, grad in zip(mine, theirs.gradients(number), strict=True):
            param.grad = grad.clone()
        optimizer.step()
        theirs.steps(range(number, number + 1))
        for param, expected, old in zip(mine, theirs.params, start, strict=True):
            assert update_relative_error(param, old, expected - old) <= 1e-10
    assert str(saved) == str(held), "the imported state dict has changed"
    for param, state in zip(mine, theirs.states, strict=True):
        assert optimizer.state[param]["step"].item() == 7
        assert optimizer.state[param]["step"].dtype == torch.float32
        assert_tensors_close(
            optimizer.state[param].get("exp_avg_sq_mean", torch.zeros(())),
            state.get("mean", torch.zeros(())),
            1e-10,
        )


@every_setting
def test_hyper_parameters_come_along(name: str) -> None:
    theirs = Theirs(name)
    theirs.steps(range(2))
    optimizer = theirs.ours()
    optimizer.load_state_dict(import_state_dict(theirs.state_dict(), theirs.source))
    (group,) = optimizer.param_groups
    expected = {key: value for key, value in theirs.reference.items() if key != "bias_correction"}
    assert {key: group[key] for key in expected} == expected
    assert "bias_correction" not in group
    assert group["algorithm"] == theirs.algorithm
    assert group["step"] == 2
    assert set(optimizer.defaults) <= set(group)


def test_numbers_of_numpy_are_numbers() -> None:
    theirs = Theirs(next(iter(SETTINGS)))
    theirs.steps(range(2))
    saved = theirs.state_dict()
    held = copy.deepcopy(saved)
    for state in held["state"].values():
        state["step"] = np.int64(state["step"])
    for group in held["param_groups"]:
        kinds = {bool: np.bool_, float: np.float64, int: np.int64}
        group.update({key: kinds[type(v)](v) for key, v in group.items() if type(v) in kinds})
    wanted, found = (import_state_dict(given, theirs.source) for given in (saved, held))
    assert str(found) == str(wanted)


def test_lr_that_a_schedule_shows_does_not_stop_relative_steps() -> None:
    theirs = Theirs("adafactor-relative")
    theirs.steps(range(2))
    saved = theirs.state_dict()
    saved["param_groups"][0]["lr"] = 0.0  # AdafactorSchedule
    assert import_state_dict(saved, "hf-adafactor")["param_groups"][0]["lr"] is None


def test_parameters_without_state_and_other_groups_are_separate() -> None:
    theirs = Theirs("came")
    theirs.steps(range(3))
    saved = theirs.state_dict()
    del saved["state"][1]
    group = saved["param_groups"][0]
    saved["param_groups"] = [{**group, "params": [0, 1]}, {**group, "params": [2, 3], "lr": 0.5}]
    params = [nn.Parameter(param.clone()) for param in theirs.params]
    optimizer = oxidion.CAME([{"params": params[:2], "maximize": True}, {"params": params[2:]}], lr=1.0)
    made = import_state_dict(saved, "came-pytorch", optimizer=optimizer)
    with pytest.raises(ValueError, match="parameter 1 of group 0: the state dict has no states of it"):
        optimizer.load_state_dict(made)
    params[1].requires_grad_(False)
    optimizer.load_state_dict(made)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.5]
    assert [group["maximize"] for group in optimizer.param_groups] == [True, False]
    assert not optimizer.state.get(params[1])
    assert optimizer.state[params[3]]["exp_avg_res_mean"].shape == (4,)


def test_factors_in_16_bits_become_float32() -> None:
    theirs = Theirs("came")
    theirs.steps(range(2))
    saved = theirs.state_dict()
    saved["state"][0] = {k: v.bfloat16() if k.endswith("row") else v for k, v in saved["state"][0].items()}
    made = import_state_dict(saved, "came-pytorch")["state"][0]
    assert made["exp_avg_sq_row"].dtype == made["exp_avg_sq_mean"].dtype == torch.float32


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_torch_muon_goes_on_with_the_sum_of_its_average(adjust: str | None) -> None:
    shapes = ((8, 6), (5, 9))
    theirs = [nn.Parameter(gaussian(shape, 1, index)) for index, shape in enumerate(shapes)]
    torch_muon = torch.optim.Muon(theirs, lr=0.05, weight_decay=0.25, adjust_lr_fn=adjust)

    def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], number: int) -> None:
        for index, param in enumerate(params):
            param.grad = gaussian(tuple(param.shape), 2, number, index)
        optimizer.step()

    for number in range(3):
        step(torch_muon, theirs, number)
    ours = [nn.Parameter(param.detach().clone()) for param in theirs]
    optimizer = oxidion.Muon(ours)
    optimizer.load_state_dict(import_state_dict(torch_muon.state_dict(), "torch-muon", optimizer=optimizer))
    group = optimizer.param_groups[0]
    assert (group["lr"], group["mu"], group["nesterov"], group["ns_steps"]) == (0.05, 0.95, True, 5)
    start = [param.detach().clone() for param in ours]
    for number in range(3, 6):
        step(torch_muon, theirs, number)
        step(optimizer, ours, number)
    for mine, other, old in zip(ours, theirs, start, strict=True):
        # torch multiplies in bfloat16.
        assert update_relative_error(mine, old, other.detach() - old) <= 0.05


def test_microsoft_dion_state_dict_is_taken_as_it_is() -> None:
    saved = {
        "state": {0: {"momentum": gaussian((4, 3), 1)}},
        "param_groups": [{"params": [0], "algorithm": "muon", "lr": 0.25, "mu": 0.5, "step": 7}],
    }
    made = import_state_dict(saved, "microsoft-dion")
    assert torch.equal(made["state"][0]["momentum"], saved["state"][0]["momentum"])
    assert made["state"][0]["momentum"] is not saved["state"][0]["momentum"]
    assert made["param_groups"] == saved["param_groups"]
    assert made["param_groups"][0]["params"] is not saved["param_groups"][0]["params"]


def test_microsoft_dion_betas_are_those_it_computes_with() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    group = {"params": [0], "algorithm": "adamw", "lr": 0.25, "step": 7, "beta1": 0.5, "beta2": 0.75}
    optimizer = oxidion.Muon([{"params": [param], "algorithm": "adamw"}], betas=(0.1, 0.2))
    for betas in ({}, {"betas": (0.95, 0.98)}):
        saved = {"state": {}, "param_groups": [{**group, **betas}]}
        optimizer.load_state_dict(import_state_dict(saved, "microsoft-dion", optimizer=optimizer))
        (own,) = optimizer.param_groups
        assert (own["betas"], own["beta1"], own["beta2"]) == ((0.5, 0.75), 0.5, 0.75)


Spoil = Callable[[dict[str, Any]], Any]
WRONG: dict[str, tuple[str, Spoil, str]] = {
    "source": ("adafactor", lambda sd: sd, "'hf-adafactor', 'came-pytorch'.*got 'adafactor'"),
    "no groups": ("came-pytorch", lambda sd: sd["state"], r"came-pytorch .* a dict with 'state', got \[0, 1"),
    "no dict": ("came-pytorch", lambda sd: [sd], r"a came-pytorch state dict must be a dict, got \["),
    "group key": (
        "came-pytorch",
        lambda sd: {**sd, "param_groups": [{"params": [0], "lr": 0.1}]},
        r"group 0 of a came-pytorch .* must have \['betas', 'eps', 'weight_decay', 'clip_threshold'\]",
    ),
    "state key": (
        "came-pytorch",
        lambda sd: sd["state"][0].pop("exp_avg_res_col"),
        "parameter 0 of group 0.*expected.*'exp_avg_res_col'.*got",
    ),
    "step": ("came-pytorch", lambda sd: sd["state"][2].pop("step"), "parameter 2 of group 0.*'step'"),
    "key of a group": (
        "came-pytorch",
        lambda sd: {**sd, "param_groups": [{"params": [(0, [])]}]},
        "'params' of group 0 of a came-pytorch state dict must be a list of keys of states",
    ),
    "group": (
        "came-pytorch",
        lambda sd: {**sd, "param_groups": [None]},
        "group 0 of a came-pytorch state dict must be a dict, got None",
    ),
    "names": (
        "came-pytorch",
        lambda sd: {**sd, "param_groups": [{**sd["param_groups"][0], "param_names": ["a"]}]},
        r"param_names must be 4 strings, got \['a'\] \(group 0",
    ),
    "value": (
        "came-pytorch",
        lambda sd: {**sd, "param_groups": [{**sd["param_groups"][0], "betas": (0.9, "x", 0.9)}]},
        r"betas must be three numbers .*, got \(0.9, 'x', 0.9\) \(group 0 of a came-pytorch",
    ),
    "state": (
        "came-pytorch",
        lambda sd: {**sd, "state": {**sd["state"], 1: [1.0]}},
        r"the state of parameter 1 of group 0 of a came-pytorch .* must be a dict, got \[1.0\]",
    ),
    "keys as JSON has them": (
        "came-pytorch",
        lambda sd: {**sd, "state": {str(key): state for key, state in sd["state"].items()}},
        r"has states under \['0', .*, and its groups list \[0, .* keys the type that they were saved with",
    ),
    "step that is not a number": (
        "came-pytorch",
        lambda sd: {**sd, "state": {0: {**sd["state"][0], "step": float("nan")}}},
        r"step must be a finite number >= 0, got nan \(the state of parameter 0 of group 0",
    ),
    "text for a tensor": (
        "came-pytorch",
        lambda sd: {**sd, "state": {0: {**sd["state"][0], "exp_avg": "x"}}},
        r"exp_avg must be a dense tensor of float16, .*, got 'x' \(the state of parameter 0",
    ),
    "sparse": (
        "came-pytorch",
        lambda sd: {**sd, "state": {0: {**sd["state"][0], "exp_avg": torch.eye(3).to_sparse()}}},
        r"exp_avg must be a dense tensor .*, got a tensor of shape \(3, 3\), torch.float32, torch.sparse_coo",
    ),
    "on meta": (
        "came-pytorch",
        lambda sd: {**sd, "state": {0: {**sd["state"][0], "exp_avg": torch.ones(2, device="meta")}}},
        "exp_avg must be a dense tensor .* on meta",
    ),
    "complex": (
        "came-pytorch",
        lambda sd: {**sd, "state": {0: {**sd["state"][0], "exp_avg": torch.ones(2) * 1j}}},
        "exp_avg must be a dense tensor .*, torch.complex64",
    ),
    "without memory": (
        "came-pytorch",
        lambda sd: {**sd, "state": {0: {**sd["state"][0], "exp_avg": torch.ones(1).expand(2**20, 2**20)}}},
        r"exp_avg must be a dense tensor .* of shape \(1048576, 1048576\)",
    ),
    "other package": ("hf-adafactor", lambda sd: sd, "hf-adafactor state dict must have .*'decay_rate'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_state_dict_raises_and_says_what_was_expected(name: str) -> None:
    theirs = Theirs("came")
    theirs.steps(range(1))
    source, spoil, message = WRONG[name]
    saved = theirs.state_dict()
    spoilt = spoil(saved)
    with pytest.raises(ValueError, match=message):
        import_state_dict(spoilt if name not in ("state key", "step") else saved, source)


def test_optimizer_that_does_not_fit_raises() -> None:
    theirs = Theirs("came")
    theirs.steps(range(1))
    saved = theirs.state_dict()

    def params(*shapes: Shape) -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(shape)) for shape in shapes]

    with pytest.raises(ValueError, match=r"groups of \[4\] parameters, the optimizer \[1\]"):
        import_state_dict(saved, "came-pytorch", optimizer=oxidion.CAME(params((16, 12)), lr=1.0))
    optimizer = oxidion.CAME(params((16, 12), (7, 6), (13,), (4, 6, 10)), lr=1.0)
    saved["state"][1]["exp_avg"] = torch.zeros(7, 6)
    with pytest.raises(ValueError, match="exp_avg_sq_col of a parameter of shape"):
        import_state_dict(saved, "came-pytorch", optimizer=optimizer)
    with pytest.raises(ValueError, match="for algorithm 'came', the optimizer is Lamb"):
        import_state_dict(theirs.state_dict(), "came-pytorch", optimizer=oxidion.Lamb(params(*SHAPES)))


def test_foreign_state_dict_is_not_taken_without_the_import() -> None:
    theirs = Theirs("adafactor-relative")
    theirs.steps(range(2))
    optimizer = theirs.ours()
    with pytest.raises(ValueError, match=r"no 'exp_avg_sq_mean'.*import_state_dict"):
        optimizer.load_state_dict(theirs.state_dict())
    assert not optimizer.state


def test_every_source_is_tested() -> None:
    elsewhere = {"galore-torch", "torch-muon", "keller-jordan-muon", "microsoft-dion", "soap", "fused-adam"}
    sources = {source for source, *_ in SETTINGS.values()} | elsewhere
    assert sources == set(SOURCES)
