"""Settings that are written into a running group are checked as those of a new one (contract.md 4.2)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion._core import schema
from support.cases import optimizer_classes

Written = dict[str, Any]


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(0)))


def go(optimizer: Any, param: nn.Parameter) -> None:
    param.grad = torch.ones_like(param)
    optimizer.step()


def ball(name: str) -> Callable[[nn.Parameter], Any]:
    cls: Any = getattr(oxidion, name)
    return lambda param: cls([param], weight_norm="hyperball", weight_decay=0.0)


def averaged(rule: str, **more: Any) -> Callable[[nn.Parameter], Any]:
    return lambda param: oxidion.AdamW([{"params": [param], "average": rule, **more}], weight_decay=0.0)


def adamw(param: nn.Parameter) -> Any:
    return oxidion.AdamW([param], lr=0.1, weight_decay=0.5)


@pytest.mark.parametrize("cls", optimizer_classes(), ids=lambda cls: cls.__name__)
def test_integer_beyond_64_bits_is_a_number_or_refused(cls: Any) -> None:
    """No setting of a class ends a step with an OverflowError."""
    for key in cls._SCHEMA.keys() | schema.COMMON.keys():
        for large in (2**63, 2**64, 10**30):
            param = nn.Parameter(torch.ones(4, 4))
            param.grad = torch.ones_like(param)
            optimizer = cls([param], **({"lr": 1e-3} if cls is oxidion.CAME else {}))
            optimizer.param_groups[0][key] = large
            with contextlib.suppress(ValueError, TypeError):
                optimizer.step()


BALLS = ["AdamW", "AdEMAMix", "Lion", "Muon", "NorMuon", "Dion", "Dion2", "NorDion2", "SOAP", "SOAPMuon"]
PAIRS: list[tuple[Callable[[nn.Parameter], Any], Written, str]] = [
    (lambda param: oxidion.MuonH([param]), {"weight_decay": 0.5}, "weight_decay must be 0"),
    *((ball(name), {"weight_decay": 0.5}, "weight_decay must be 0") for name in BALLS),
    (ball("AdamW"), {"weight_decay": torch.tensor(0.5)}, "weight_decay must be 0"),
    (adamw, {"weight_norm": "hyperball"}, "weight_decay must be 0"),
    (
        lambda param: oxidion.Lamb([param]),
        {"weight_norm": "hyperball", "weight_decay": 0.0},
        "lamb takes weight_norm='free' only",
    ),
    (ball("AdamW"), {"capturable": True}, "capturable needs weight_norm='free'"),
    (adamw, {"lr": 1e30, "weight_decay": 1e30}, "weight_decay must be finite"),
    (adamw, {"weight_decay": 3e38, "lr": 3e38}, "weight_decay must be finite"),
    (adamw, {"average": "polyak"}, "average must be one of"),
    (adamw, {"average": "ema", "average_decay": 1.0}, "average_decay must be"),
    (adamw, {"average": "schedule_free", "average_beta": 0.0}, "average_beta must be above 0"),
    (
        adamw,
        {"average": "schedule_free", "stochastic_rounding": True},
        "does not go with stochastic_rounding",
    ),
    (adamw, {"average": "schedule_free", "cautious_wd": True}, "not with cautious_wd"),
    (averaged("schedule_free"), {"average_beta": 0.0}, "average_beta must be above 0"),
    (averaged("schedule_free"), {"average_beta": 1.5}, "average_beta must be"),
    (averaged("schedule_free"), {"stochastic_rounding": True}, "does not go with stochastic_rounding"),
    (averaged("schedule_free", cautious_wd=True), {"weight_decay": 0.1}, "not with cautious_wd"),
    (averaged("schedule_free"), {"average_step_power": 1e38}, "average_step_power must be"),
    (averaged("ema"), {"average_start": -1}, "average_start must be"),
    (averaged("ema"), {"average": 3}, "average must be one of"),
    (lambda param: oxidion.Adafactor([param]), {"lr": 0.1}, "lr must be None with relative_step=True"),
    (lambda param: oxidion.Adafactor([param]), {"relative_step": False}, "lr must be a finite number"),
    (
        lambda param: oxidion.Adafactor([param], lr=0.1, relative_step=False),
        {"warmup_init": True},
        "warmup_init=True requires",
    ),
    (adamw, {"algorithm": "adamv"}, "algorithm must be one of"),
]


def snapshot(optimizer: Any, param: nn.Parameter) -> list[Tensor]:
    own = optimizer.state[param]
    return [param.detach().clone(), *(torch.as_tensor(own[key]).clone() for key in sorted(own))]


@pytest.mark.parametrize("at", range(len(PAIRS)))
def test_written_settings_that_do_not_go_together_are_refused(at: int) -> None:
    build, written, said = PAIRS[at]
    param = weight()
    optimizer = build(param)
    go(optimizer, param)
    go(optimizer, param)
    [group] = optimizer.param_groups
    before, kept = snapshot(optimizer, param), copy.copy(dict(group))
    group.update(written)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{said}.*\(group 0\)"):
            go(optimizer, param)
    assert all(map(torch.equal, before, snapshot(optimizer, param)))
    assert group["step"] == kept["step"]
    group.clear()
    group.update(kept)
    go(optimizer, param)
    assert not torch.equal(before[0], param)
    with pytest.raises((ValueError, TypeError)):
        type(optimizer)([{**kept, "params": [weight()], **written}])


def test_decay_that_is_filled_in_place_is_refused() -> None:
    param = weight()
    decay = torch.tensor(0.0)
    optimizer: Any = oxidion.MuonH([{"params": [param], "weight_decay": decay}])
    go(optimizer, param)
    decay.fill_(0.5)
    with pytest.raises(ValueError, match="weight_decay must be 0"):
        go(optimizer, param)


def test_rate_filled_in_place_is_refused_with_too_large_a_decay() -> None:
    param = weight()
    rate = torch.tensor(0.1)
    optimizer: Any = oxidion.AdamW([param], lr=rate, weight_decay=1e20)
    go(optimizer, param)
    rate.fill_(1e30)
    with pytest.raises(ValueError, match="weight_decay must be finite"):
        go(optimizer, param)


@pytest.mark.parametrize("way", ["eval", "train", "averaged"])
def test_switches_refuse_what_a_step_would(way: str) -> None:
    param = weight()
    optimizer = averaged("schedule_free")(param)
    go(optimizer, param)
    before = param.detach().clone()
    optimizer.param_groups[0]["average_beta"] = 0
    switch = getattr(optimizer, way)
    with pytest.raises(ValueError, match="average_beta must be above 0"):
        (switch().__enter__ if way == "averaged" else switch)()
    assert torch.equal(param, before)


def test_second_group_is_named() -> None:
    params = [weight(), weight()]
    optimizer: Any = oxidion.MuonH([{"params": [param]} for param in params])
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.param_groups[1]["weight_decay"] = 0.5
    before = params[0].detach().clone()
    with pytest.raises(ValueError, match=r"weight_decay must be 0.*\(group 1\)"):
        optimizer.step()
    assert torch.equal(params[0], before)


def test_numbers_of_numpy_and_keys_of_users_are_taken() -> None:
    numpy = pytest.importorskip("numpy")
    param = weight()
    optimizer = adamw(param)
    go(optimizer, param)
    optimizer.param_groups[0].update(lr=numpy.float32(0.5), weight_decay=numpy.float32(0.25), mine=[1, 2])
    before = param.detach().clone()
    go(optimizer, param)
    assert not torch.equal(before, param)


def test_rule_written_in_backward_is_refused_before_units_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def factory(named: Any) -> Any:
        sides = ([row for row in named if row[0].startswith(name)] for name in "01")
        return oxidion.AdamW([{"params": side} for side in sides])

    optimizer = oxidion.in_backward(model, factory)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.param_groups[0]["average"] = "polyak"
    with pytest.raises(ValueError, match=r"average must be one of.*\(group 0\)"):
        model(torch.ones(2, 4)).sum().backward()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
    optimizer.param_groups[0]["average"] = None
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


def test_dtypes_are_taken_as_their_names() -> None:
    param = weight()
    optimizer = adamw(param)
    go(optimizer, param)
    optimizer.param_groups[0].update(average="ema", average_dtype=torch.bfloat16)
    go(optimizer, param)
    assert optimizer.state[param]["average"].dtype == torch.bfloat16


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}], ids=str)
def test_arrays_of_a_user_may_be_replaced(value: Any) -> None:
    param = weight()
    optimizer: Any = oxidion.AdamW([{"params": [param]}], lr=0.1)
    for at in range(3):
        made = torch.full((2,), float(at)).numpy()
        own = [made, value] if isinstance(value, list) else {**value, "b": made}
        optimizer.param_groups[0]["of_the_user"] = own
        go(optimizer, param)
