"""Checkpoints of Keller Jordan's Muon: structure as its classes write it, values from naive steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion.checkpoint import import_state_dict
from support.asserts import update_relative_error
from support.inputs import Shape, gaussian

MATRICES: tuple[Shape, ...] = ((8, 6), (5, 9))
VECTORS: tuple[Shape, ...] = ((7,), (3, 4))
MUON = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.25, "use_muon": True}
ADAM = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.125, "use_muon": False}
QUINTIC = (3.4445, -4.775, 2.0315)


class Theirs:
    """Parameters and what the classes keep of them: an average of gradients, Adam's moments, a counter."""

    def __init__(self) -> None:
        self.params = [gaussian(shape, 1, i, scale=0.1) for i, shape in enumerate((*MATRICES, *VECTORS))]
        self.states: list[dict[str, Any]] = [{"momentum_buffer": torch.zeros(s)} for s in MATRICES]
        for shape in VECTORS:
            self.states.append({"step": 0, "exp_avg": torch.zeros(shape), "exp_avg_sq": torch.zeros(shape)})

    def step(self, grads: list[Tensor]) -> None:
        for index, (param, grad, state) in enumerate(zip(self.params, grads, self.states, strict=True)):
            group = MUON if index < len(MATRICES) else ADAM
            update = (muon_update if group is MUON else adam_update)(grad, state)
            param *= 1 - group["lr"] * group["weight_decay"]  # type: ignore[operator]
            param -= group["lr"] * update

    def state_dict(self) -> dict[str, Any]:
        count = len(MATRICES)
        groups = [
            {**MUON, "params": list(range(count))},
            {**ADAM, "params": list(range(count, len(self.params)))},
        ]
        return {"state": dict(enumerate(self.states)), "param_groups": groups}


def muon_update(grad: Tensor, state: dict[str, Any]) -> Tensor:
    mu = MUON["momentum"]
    state["momentum_buffer"] = average = mu * state["momentum_buffer"].to(grad.dtype) + (1 - mu) * grad
    x = mu * average + (1 - mu) * grad
    x = x / (x.norm() + 1e-7)
    a, b, c = QUINTIC
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x * math.sqrt(max(1.0, x.shape[0] / x.shape[1]))


def adam_update(grad: Tensor, state: dict[str, Any]) -> Tensor:
    betas: Any = ADAM["betas"]
    state["step"] += 1
    corrected = []
    for key, beta, value in zip(("exp_avg", "exp_avg_sq"), betas, (grad, grad.square()), strict=True):
        state[key] = beta * state[key].to(grad.dtype) + (1 - beta) * value
        corrected.append(state[key] / (1 - beta ** state["step"]))
    return corrected[0] / (corrected[1].sqrt() + ADAM["eps"])


def gradients(number: int) -> list[Tensor]:
    return [gaussian(shape, 2, number, index) for index, shape in enumerate((*MATRICES, *VECTORS))]


@pytest.fixture
def theirs() -> Theirs:
    """After three steps."""
    made = Theirs()
    for number in range(3):
        made.step(gradients(number))
    return made


def optimizer_of(params: list[nn.Parameter]) -> oxidion.Muon:
    count = len(MATRICES)
    rest = {"params": params[count:], "algorithm": "adamw"}
    return oxidion.Muon([{"params": params[:count]}, rest], orth_dtype="float64")


def test_training_goes_on_as_it_would_have_there(theirs: Theirs) -> None:
    params = [nn.Parameter(param.clone()) for param in theirs.params]
    optimizer = optimizer_of(params)
    saved = theirs.state_dict()
    optimizer.load_state_dict(import_state_dict(saved, "keller-jordan-muon", optimizer=optimizer))
    muon, adam = optimizer.param_groups
    assert (muon["lr"], muon["mu"], muon["weight_decay"], muon["nesterov"]) == (0.05, 0.9, 0.25, True)
    assert (adam["algorithm"], adam["lr"], tuple(adam["betas"])) == ("adamw", 0.01, (0.8, 0.95))
    assert (adam["epsilon"], adam["weight_decay"]) == (1e-10, 0.125)
    assert not {"momentum", "eps", "use_muon"} & {*muon, *adam}
    start = [param.clone() for param in theirs.params]
    for number in range(3, 6):
        theirs.step(gradients(number))
        for param, grad in zip(params, gradients(number), strict=True):
            param.grad = grad
        optimizer.step()
        for mine, other, old in zip(params, theirs.params, start, strict=True):
            assert update_relative_error(mine, old, other - old) <= 1e-10


def test_groups_without_a_flag_are_those_of_the_plain_class(theirs: Theirs) -> None:
    saved = theirs.state_dict()
    plain = {key: value for key, value in saved["param_groups"][0].items() if key != "use_muon"}
    made = import_state_dict({"state": saved["state"], "param_groups": [plain]}, "keller-jordan-muon")
    (group,) = made["param_groups"]
    assert group["algorithm"] == "muon"
    held = saved["state"][0]["momentum_buffer"]
    torch.testing.assert_close(made["state"][0]["momentum"], held / 0.1, rtol=1e-12, atol=0)
    assert set(made["state"]) == set(range(len(MATRICES)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda sd: sd["param_groups"][0].pop("momentum"), r"group 0 of a .* must have \['momentum'\]"),
        (lambda sd: sd["param_groups"][1].pop("betas"), r"must have \['betas'\]"),
        (lambda sd: sd["param_groups"][0].update(momentum=1.0), "momentum of 1 never"),
        (lambda sd: sd["state"][2].pop("exp_avg_sq"), "parameter 0 of group 1 .*'exp_avg_sq'"),
        (lambda sd: sd["state"][3].update(exp_avg_sq=torch.zeros(4, 3)), r"variance of .* shape \(3, 4\)"),
    ],
    ids=["momentum", "betas", "1", "moment", "shape"],
)
def test_what_the_classes_do_not_write_is_named(theirs: Theirs, spoil: Any, message: str) -> None:
    saved = theirs.state_dict()
    spoil(saved)
    params = [nn.Parameter(param.clone()) for param in theirs.params]
    with pytest.raises(ValueError, match=message):
        import_state_dict(saved, "keller-jordan-muon", optimizer=optimizer_of(params))
