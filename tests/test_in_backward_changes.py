"""Steps in the backward pass when weights thaw, a second optimizer comes, or gradients are dropped."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import oxidion
from oxidion.backward import BackwardOptimizer

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def backward(model: nn.Module, step: int = 0) -> None:
    model(X + step).square().sum().backward()


def take(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


# -------------------------------------------------------------------------------- weights that thaw


@pytest.mark.parametrize("per", ["module", "parameter"])
@pytest.mark.parametrize("late", ["0.", "0.weight", "2.bias"])
@pytest.mark.parametrize("rule", [None, "ema", "schedule_free"])
def test_thawed_weights_step_as_with_an_ordinary_optimizer(per: str, late: str, rule: str | None) -> None:
    models = [net(), net()]
    for model in models:
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(late))

    def made(model: nn.Module) -> Any:
        named = list(model.named_parameters())
        group: dict[str, Any] = {"params": named} if rule is None else {"params": named, "average": rule}
        return oxidion.AdamW([group], lr=0.05)

    optimizers: list[Any] = [
        made(models[0]),
        oxidion.in_backward(models[1], lambda _: made(models[1]), per=per),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        take(model, optimizer, range(3))
        model.requires_grad_(True)
        take(model, optimizer, range(3, 6))
        backward(model, 6)
    assert all(param.grad is None for param in models[1].parameters()), "stepped in the hooks"
    for optimizer in optimizers:
        optimizer.step()
    assert same(*models)
    assert not any(map(torch.equal, models[1].parameters(), net().parameters()))
    one, other = (optimizer.state_dict() for optimizer in optimizers)
    assert one["param_groups"] == other["param_groups"]
    for key, own in one["state"].items():
        assert all(torch.equal(value, other["state"][key][role]) for role, value in own.items())


def test_thawed_weights_in_no_group_raise_with_a_remedy() -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = oxidion.in_backward(model, partial(oxidion.AdamW, lr=0.1))
    take(model, optimizer, range(2))
    model[0].requires_grad_(True)
    backward(model)
    before = weights(model)[:2]
    with pytest.raises(
        RuntimeError, match=r"0\.weight: there is a gradient, and no group has.*add_param_group"
    ):
        optimizer.step()
    model.zero_grad()
    optimizer.step()
    optimizer.add_param_group({"params": [*model[0].named_parameters(prefix="0")]})
    backward(model)
    assert not any(map(torch.equal, before, weights(model)[:2]))
    optimizer.step()


def test_gradients_that_another_optimizer_steps_are_left_to_it() -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = oxidion.in_backward(model, partial(oxidion.AdamW, lr=0.1))
    model[0].requires_grad_(True)
    other = torch.optim.SGD(model[0].parameters(), lr=0.1)
    for step in range(2):
        backward(model, step)
        other.step()
        other.zero_grad()
        optimizer.step()


# ------------------------------------------------------------------------------- second optimizers


def test_second_optimizer_of_the_same_weights_is_refused() -> None:
    model = net()
    first = oxidion.in_backward(model, partial(oxidion.AdamW, lr=0.1))
    with pytest.raises(ValueError, match=r"0\.weight: another optimizer of in_backward.*remove_hooks\(\)"):
        oxidion.in_backward(model, partial(oxidion.AdamW, lr=0.0))
    before = weights(model)
    take(model, first, range(1))
    assert not any(map(torch.equal, before, weights(model))), "the first one goes on"
    first.remove_hooks()
    second = oxidion.in_backward(model, partial(oxidion.AdamW, lr=0.0, weight_decay=0.0))
    before = weights(model)
    take(model, second, range(1))
    assert all(map(torch.equal, before, weights(model)))
    second.param_groups[0]["lr"] = 0.1
    take(model, second, range(1))
    assert not any(map(torch.equal, before, weights(model)))


@pytest.mark.parametrize("schedule", [False, True])
def test_optimizer_that_was_deleted_steps_nothing(schedule: bool) -> None:
    model = net()
    first: BackwardOptimizer | None = oxidion.in_backward(model, partial(oxidion.AdamW, lr=0.5))
    scheduler = torch.optim.lr_scheduler.StepLR(first, 1) if schedule and first is not None else None
    take(model, first, range(1))
    del first, scheduler
    if schedule:
        gc.collect()
    before = weights(model)
    backward(model)
    assert all(map(torch.equal, before, weights(model)))
    assert all(param.grad is not None for param in model.parameters())
    model.zero_grad()
    second = oxidion.in_backward(model, partial(oxidion.AdamW, lr=0.5))
    take(model, second, range(1))
    assert not any(map(torch.equal, before, weights(model)))


def test_ddp_is_refused_once_where_the_optimizer_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer: BackwardOptimizer | None = oxidion.in_backward(model, oxidion.AdamW)
    monkeypatch.setattr("oxidion.backward.is_inside_ddp", lambda: True)
    for _ in range(2):
        with pytest.raises(TypeError, match="DistributedDataParallel has not averaged"):
            model(X)
    assert optimizer is not None
    optimizer.remove_hooks()
    model(X)
    optimizer = oxidion.in_backward(model, oxidion.AdamW)
    del optimizer
    with pytest.raises(TypeError, match=r"in_backward\(\) returned is gone"):
        model(X)
    model(X)


def test_second_optimizer_collects_one_that_its_schedule_keeps() -> None:
    model = net()
    gc.disable()
    try:
        first: BackwardOptimizer | None = oxidion.in_backward(model, oxidion.AdamW)
        scheduler = torch.optim.lr_scheduler.StepLR(first, 1)  # type: ignore[arg-type]
        del first, scheduler
        second = oxidion.in_backward(model, oxidion.AdamW)
    finally:
        gc.enable()
    take(model, second, range(2))


def test_two_optimizers_of_other_weights_step_both() -> None:
    model, plain = net(), net()

    def of(layer: int) -> Any:
        return oxidion.in_backward(
            model, lambda named: oxidion.AdamW([row for row in named if row[0].startswith(str(layer))])
        )

    both = [of(0), of(2)]
    ordinary = oxidion.AdamW(plain.named_parameters())
    for step in range(3):
        backward(model, step)
        for optimizer in both:
            optimizer.step()
    take(plain, ordinary, range(3))
    assert same(model, plain)


# ------------------------------------------------------------------------------- gradients dropped


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_ends_a_pass_in_which_nothing_was_stepped(set_to_none: bool) -> None:
    models = [net(), net()]
    optimizers = [
        oxidion.in_backward(
            model, lambda named: oxidion.AdamW([{"params": named, "average": "schedule_free"}], lr=0.1)
        )
        for model in models
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        take(model, optimizer, range(3))
    optimizers[0].eval()
    with pytest.raises(RuntimeError, match=r"call train\(\)"):
        backward(models[0])
    optimizers[0].zero_grad(set_to_none)
    optimizers[0].train()
    optimizers[0].state_dict()
    optimizers[1].eval()
    optimizers[1].train()
    for model, optimizer in zip(models, optimizers, strict=True):
        take(model, optimizer, range(3, 6))
    assert same(*models)


def test_zero_grad_drops_gradients_of_an_unstepped_module() -> None:
    model = net()
    optimizer = oxidion.in_backward(model, partial(oxidion.AdamW, lr=0.1))
    (X @ model[0].weight.T).sum().backward()
    optimizer.zero_grad()
    before = weights(model)
    optimizer.step()
    assert all(map(torch.equal, before, weights(model)))
    take(model, optimizer, range(2))


def test_zero_grad_before_step_counts_what_was_stepped() -> None:
    models = [net(), net()]
    optimizers = [oxidion.in_backward(model, partial(oxidion.AdamW, lr=0.1)) for model in models]
    backward(models[0])
    optimizers[0].zero_grad()
    with pytest.raises(RuntimeError, match="second gradient"):
        backward(models[0])
    before = weights(models[0])
    with pytest.raises(RuntimeError, match=r"a second gradient came, and a step was taken with the first"):
        optimizers[0].step()
    optimizers[0].zero_grad()
    optimizers[0].step()
    assert all(map(torch.equal, before, weights(models[0])))
    take(models[1], optimizers[1], range(1))
    for model, optimizer in zip(models, optimizers, strict=True):
        take(model, optimizer, range(1, 3))
    assert same(*models)


# --------------------------------------------------------------------------------------- averages


@pytest.mark.parametrize("after", [None, "ema", "schedule_free"])
@pytest.mark.parametrize("before", [None, "ema", "schedule_free"])
@pytest.mark.parametrize("pop", [False, True])
def test_other_averages_are_those_of_ordinary_steps(before: str | None, after: str | None, pop: bool) -> None:
    models = [net(), net()]
    models[1].register_module("rare", nn.Linear(2, 2))  # gets no gradient
    models[0].register_module("rare", nn.Linear(2, 2))
    models[1].load_state_dict(models[0].state_dict())

    def made(named: Any) -> Any:
        group: dict[str, Any] = {"params": list(named)}
        if before is not None:
            group |= {"average": before}
        return oxidion.AdamW([group], lr=0.05)

    optimizers: list[Any] = [made(models[0].named_parameters()), oxidion.in_backward(models[1], made)]

    def passed(model: Any, step: int) -> None:
        model[2](model[1](model[0](X + step))).square().sum().backward()

    for model, optimizer in zip(models, optimizers, strict=True):
        for step in range(12):
            group = optimizer.param_groups[0]
            if step == 4:
                group["average"] = after
                if after is None and pop:
                    del group["average"]
            if step == 8 and after == "schedule_free":
                group["average_beta"] = 0.25
            passed(model, step)
            optimizer.step()
            optimizer.zero_grad()
    one, other = (optimizer.state_dict() for optimizer in optimizers)
    assert one["param_groups"] == other["param_groups"]
    for key, own in one["state"].items():
        assert own.keys() == other["state"][key].keys()
        for role, value in own.items():
            assert torch.equal(value, other["state"][key][role]), role
    assert same(*models)
    averages = [
        optimizer.averaged_state_dict(model) for model, optimizer in zip(models, optimizers, strict=True)
    ]
    assert all(torch.equal(value, averages[1][name]) for name, value in averages[0].items())
    if after is not None:
        assert not torch.equal(averages[1]["0.weight"], models[1][0].weight)  # type: ignore[arg-type]


def test_step_among_averages_is_refused_before_any_module_steps() -> None:
    model = net()
    optimizer = oxidion.in_backward(
        model, lambda named: oxidion.AdamW([{"params": named, "average": "ema"}], lr=0.1)
    )
    take(model, optimizer, range(2))
    before = weights(model)
    with optimizer.averaged(), pytest.raises(RuntimeError, match=r"within averaged\(\)"):
        backward(model)
    assert all(map(torch.equal, before, weights(model)))
    optimizer.zero_grad()
    take(model, optimizer, range(2))
    backward(model)
    with pytest.raises(RuntimeError, match=r"averaged_state_dict\(\) in the middle of a step"):
        optimizer.averaged_state_dict(model)


# ----------------------------------------------------------------------------------- introspection


def test_plans_are_those_of_the_units_and_states_are_there() -> None:
    model = net()
    optimizer = oxidion.in_backward(model, partial(oxidion.AdamW, lr=0.1))
    plans = optimizer.plan()
    assert [str(plan) for plan in plans] == [str(unit.plan()) for unit in optimizer.units]
    assert len(plans) == 2
    weight = model[0].weight
    del optimizer.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg_sq"]
    optimizer.init_state()
    assert torch.equal(optimizer.state[weight]["exp_avg"], torch.zeros_like(weight))
