"""Averages of a training that goes on: other rules and settings, checkpoints, and what is refused."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion

SHAPE, LR = (4, 3), 0.05
RULES: dict[str | None, dict[str, Any]] = {
    None: {},
    "ema": {"average_decay": 0.9},
    "schedule_free": {"average_beta": 0.8},
}


def start(count: int = 40) -> tuple[nn.Parameter, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    param, *grads = torch.randn(count + 1, *SHAPE, dtype=torch.float64, generator=generator)
    return nn.Parameter(param), list(grads)


def made(param: nn.Parameter, rule: str | None, **more: Any) -> Any:
    """Signs of gradients: of its steps an average and a decay are all that has a memory."""
    group = {"params": [param], **RULES[rule], **more}
    if rule is not None:
        group["average"] = rule
    return oxidion.Lion([group], lr=LR, betas=(0.0, 0.0), weight_decay=0.0)


def run(optimizer: Any, param: nn.Parameter, grads: list[Tensor]) -> None:
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()


class Naive:
    """An average by its formulas, which begins with the weights that are there."""

    def __init__(self, rule: str | None, weights: Tensor) -> None:
        self.rule, self.settings = rule, RULES[rule]
        self.y, self.z, self.mean, self.total = (*(weights.clone() for _ in range(3)), 0.0)
        self.steps = 0

    def step(self, grad: Tensor) -> None:
        """One step of length ``LR`` along the sign of a gradient."""
        self.steps += 1
        self.z = self.z - LR * grad.sign()
        self.total += LR**2
        share = {
            None: 1.0,
            "ema": 0.1,
            "schedule_free": LR**2 / self.total,
        }[self.rule]
        self.mean = (1.0 - share) * self.mean + share * self.z
        beta = self.settings.get("average_beta", 0.0)
        self.y = (1.0 - beta) * self.z + beta * self.mean


def close(found: Tensor, expected: Tensor) -> bool:
    return float((found.detach() - expected).abs().max()) <= 1e-12


@pytest.mark.parametrize("after", RULES)
@pytest.mark.parametrize("before", RULES)
@pytest.mark.parametrize("way", ["written", "through none", "in eval", "loaded"])
def test_other_rule_begins_with_the_weights_that_are_there(
    before: str | None, after: str | None, way: str
) -> None:
    if before == after and way != "through none":
        pytest.skip("the same rule goes on")
    param, grads = start()
    optimizer = made(param, before)
    first = Naive(before, param.detach())
    run(optimizer, param, grads[:20])
    for grad in grads[:20]:
        first.step(grad)
    assert close(param, first.y)
    weights = first.y
    if way == "in eval":
        optimizer.eval()
        weights = first.mean if before == "schedule_free" else first.y
        assert close(param, weights)
    if way == "through none":
        optimizer.param_groups[0]["average"] = None
        run(optimizer, param, grads[20:30])
        for grad in grads[20:30]:
            weights = weights - LR * grad.sign()
        assert close(param, weights)
    optimizer.param_groups[0].update(RULES[after], average=after)
    if way == "loaded":
        saved = copy.deepcopy(optimizer.state_dict())
        param = nn.Parameter(param.detach().clone())
        optimizer = made(param, after)
        optimizer.load_state_dict(saved)
    second = Naive(after, weights)
    run(optimizer, param, grads[30:])
    for grad in grads[30:]:
        second.step(grad)
    assert close(param, second.y)
    with optimizer.averaged():
        assert close(param, second.mean if after is not None else second.y)
    assert close(param, second.y)
    assert (after is not None) == ("average" in optimizer.state[param])
    assert optimizer.state[param].get("average_step", 0) == (10 if after else 0)


@pytest.mark.parametrize("way", ["between steps", "before eval", "in eval", "in averaged"])
def test_other_share_moves_the_weights_and_keeps_the_average(way: str) -> None:
    param, grads = start()
    optimizer = made(param, "schedule_free")
    naive = Naive("schedule_free", param.detach())
    run(optimizer, param, grads[:20])
    for grad in grads[:20]:
        naive.step(grad)
    group = optimizer.param_groups[0]
    if way == "in eval":
        optimizer.eval()
    if way == "in averaged":
        with optimizer.averaged():
            group["average_beta"] = 0.3
    group["average_beta"] = 0.3
    if way == "before eval":
        optimizer.eval()
    if "eval" in way:
        assert close(param, naive.mean)
        optimizer.train()
        assert close(param, 0.7 * naive.z + 0.3 * naive.mean)
    naive.settings = {**naive.settings, "average_beta": 0.3}
    run(optimizer, param, grads[20:])
    for grad in grads[20:]:
        naive.step(grad)
    assert close(param, naive.y)
    optimizer.eval()
    assert close(param, naive.mean)


@pytest.mark.parametrize("rule", ["ema", "schedule_free"])
def test_checkpoint_that_was_taken_among_averages_goes_on(rule: str) -> None:
    param, grads = start()
    optimizer = made(param, rule)
    run(optimizer, param, grads[:5])
    with optimizer.averaged():
        saved, weights = copy.deepcopy(optimizer.state_dict()), param.detach().clone()
        optimizer.train()
        with pytest.raises(RuntimeError, match=r"train\(\), or leave the context"):
            run(optimizer, param, grads[:1])
    other = nn.Parameter(weights)
    resumed = made(other, rule)
    resumed.load_state_dict(saved)
    resumed.train()
    run(resumed, other, grads[5:10])
    assert bool(other.isfinite().all())
    run(optimizer, param, grads[5:10])
    if rule == "schedule_free":
        assert close(other, param.detach())


@pytest.mark.parametrize(
    ("rule", "key", "value"),
    [
        ("ema", "average_beta", 0.5),
        ("ema", "average_lr_power", 1.0),
        ("ema", "average_step_power", 1.0),
        ("schedule_free", "average_decay", 0.5),
        ("schedule_free", "average_start", 5),
    ],
)
def test_settings_of_other_rules_are_refused_in_a_new_group(rule: str, key: str, value: object) -> None:
    param, _ = start(1)
    with pytest.raises(ValueError, match=rf"{key} means nothing with average='{rule}', got .*group 0"):
        oxidion.AdamW([{"params": [param], "average": rule, key: value}])
    default = oxidion.AdamW([param]).param_groups[0][key]
    oxidion.AdamW([{"params": [param], "average": rule, key: default}])


def test_average_that_a_state_dict_does_not_have_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    param, grads = start()
    plain, other = made(param, None), made(nn.Parameter(param.detach().clone()), "ema")
    run(plain, param, grads[:2])
    with caplog.at_level(logging.WARNING, "oxidion"):
        other.load_state_dict(plain.state_dict())
        assert "group 0 had average='ema' and has average=None from here on" in caplog.text
        caplog.clear()
        plain.load_state_dict(plain.state_dict())
        averaged = made(param, "ema")
        averaged.load_state_dict(averaged.state_dict())
        assert not caplog.text


def test_adafactor_without_a_rate_is_refused_for_schedule_free() -> None:
    param, grads = start()
    said = r"weighs by lr, which must be a number and is None \(group 0\).*relative_step=False"
    with pytest.raises(ValueError, match=said):
        oxidion.Adafactor([{"params": [param], "average": "schedule_free"}])
    optimizer = oxidion.Adafactor([param])
    run(optimizer, param, grads[:1])
    before = param.detach().clone()
    optimizer.param_groups[0]["average"] = "schedule_free"
    with pytest.raises(ValueError, match=said):
        run(optimizer, param, grads[1:2])
    assert torch.equal(param, before)
    optimizer.param_groups[0]["average"] = "ema"
    run(optimizer, param, grads[1:2])
    keys: dict[str, Any] = {"lr": 0.1, "relative_step": False}
    run(oxidion.Adafactor([{"params": [param], "average": "schedule_free"}], **keys), param, grads[:2])
