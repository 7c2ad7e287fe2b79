"""The step: closures, hooks, profiler, gradients (contract.md 4.2)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .snapshot import assert_params_equal, assert_same, params_of, snapshot
from .table import Case, every_case, make_model, run_steps, set_grads


@every_case
def test_closure_runs_once_with_gradients_and_returns_its_loss(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    x = torch.randn(5, 6)
    calls: list[bool] = []
    losses: list[Tensor] = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        losses.append(model(x).square().mean())
        losses[-1].backward()
        return losses[-1]

    before = snapshot(optimizer)["params"]
    with torch.no_grad():
        assert optimizer.step(closure=closure) is losses[0]
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert optimizer.step(closure) is losses[1]
    assert calls == [True, True]
    assert all(not torch.equal(p, b) for p, b in zip(params_of(optimizer), before, strict=True))
    assert all(p.grad_fn is None and p.requires_grad for p in params_of(optimizer))


@every_case
def test_step_without_closure_returns_none(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    set_grads(model, 0)
    assert optimizer.step() is None
    assert optimizer.step(closure=None) is None


@every_case
def test_closure_that_raises_leaves_a_usable_unchanged_optimizer(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    run_steps(optimizer, model, range(2))
    before = snapshot(optimizer)

    def closure() -> Tensor:
        raise KeyError("no batch")

    with pytest.raises(KeyError, match="no batch"):
        optimizer.step(closure)
    assert_same(snapshot(optimizer), before)
    optimizer.step()
    assert not torch.equal(params_of(optimizer)[0], before["params"][0])


@every_case
def test_hooks_fire_once_in_order_and_stop_after_removal(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    set_grads(model, 0)
    fired: list[str] = []
    for _ in range(case.idle):
        optimizer.step()
    weight = params_of(optimizer)[0]
    start = weight.detach().clone()

    def hook(name: str) -> Any:
        def record(opt: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            assert opt is optimizer
            fired.append(f"{name}:{'moved' if not torch.equal(weight, start) else 'unmoved'}")

        return record

    handles = [
        register_optimizer_step_pre_hook(hook("global pre")),
        register_optimizer_step_post_hook(hook("global post")),
        optimizer.register_step_pre_hook(hook("pre")),
        optimizer.register_step_post_hook(hook("post")),
    ]
    try:
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert fired == ["global pre:unmoved", "pre:unmoved", "post:moved", "global post:moved"]
    optimizer.step()
    assert len(fired) == 4


@every_case
def test_hooks_fire_once_in_a_subclass(case: Case) -> None:
    parent_model, model = make_model(), make_model()
    parent = case.build(parent_model)
    optimizer = type("Derived", (case.cls,), {})(case.groups(model), **case.required)
    fired: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append(0))
    optimizer.register_step_post_hook(lambda *_: fired.append(1))
    run_steps(parent, parent_model, range(1))
    run_steps(optimizer, model, range(1))
    assert fired == [0, 1]


@every_case
def test_pre_hook_may_replace_the_arguments(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    set_grads(model, 0)

    def hook(
        opt: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "closure": lambda: torch.tensor(7.0)}

    optimizer.register_step_pre_hook(hook)
    assert optimizer.step() == torch.tensor(7.0)


@every_case
def test_profiler_records_step_and_zero_grad_by_the_class_name(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    set_grads(model, 0)
    with torch.autograd.profiler.profile() as profile:
        optimizer.step()
        optimizer.zero_grad()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts[f"Optimizer.step#{case}.step"] == 1
    assert counts[f"Optimizer.zero_grad#{case}.zero_grad"] == 1


@every_case
@pytest.mark.parametrize("foreach", [None, False, True])
def test_zero_grad_honours_set_to_none(case: Case, foreach: bool | None) -> None:
    model = make_model()
    optimizer = case.build(model, foreach=foreach)
    set_grads(model, 0)
    held = [p.grad for p in params_of(optimizer)]
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is grad for p, grad in zip(params_of(optimizer), held, strict=True))
    assert all(grad is not None and not grad.any() for grad in held)
    optimizer.zero_grad()
    assert all(p.grad is None for p in params_of(optimizer))


@every_case
@pytest.mark.parametrize("maximize", [False, True])
def test_gradients_are_never_mutated(case: Case, maximize: bool) -> None:
    model = make_model()
    optimizer = case.build(model, maximize=maximize)
    for seed in range(3):
        set_grads(model, seed)
        held = [p.grad for p in model.parameters()]
        expected = [grad.clone() for grad in held]
        versions = [grad._version for grad in held]
        optimizer.step()
        assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))
        assert_same(held, expected, "gradients")
        assert [grad._version for grad in held] == versions


@every_case
def test_step_without_any_gradient_leaves_parameters_and_state(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model, weight_decay=0.5)
    before = snapshot(optimizer)["params"]
    optimizer.step()
    assert_params_equal(params_of(optimizer), before)
    run_steps(optimizer, model, range(2))
    optimizer.zero_grad()
    after = snapshot(optimizer)
    optimizer.step()
    assert_same(snapshot(optimizer)["params"], after["params"])
    assert_same(snapshot(optimizer)["state"], after["state"])


@every_case
def test_parameter_without_gradient_is_skipped_without_effects(case: Case) -> None:
    model, whole = make_model(), make_model()
    optimizer = case.build(model, weight_decay=0.5)
    reference = case.build(whole, weight_decay=0.5)
    skipped = {"square.weight", "norm.bias"}
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for seed in range(3):
        set_grads(model, seed)
        set_grads(whole, seed)
        for name, param in model.named_parameters():
            if name in skipped:
                param.grad = None
        optimizer.step()
        reference.step()
    expected = dict(whole.named_parameters())
    for name, param in model.named_parameters():
        assert torch.equal(param, start[name] if name in skipped else expected[name]), name
        for key, value in optimizer.state[param].items():
            if name in skipped and key != "Q":
                assert not torch.as_tensor(value).any(), f"{name}: {key} advanced without a gradient"
