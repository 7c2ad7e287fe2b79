"""Mixed-precision loss scaling: the attributes and torch.amp.GradScaler (contract.md 4.4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from .snapshot import assert_params_equal, assert_same, snapshot
from .table import STEP_KEYS, Case, every_case, make_model, run_steps, set_grads

SCALE = 2.0**10  # a power of two: dividing by it is exact


def make_scaler(**kwargs: Any) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000, **kwargs)


def scaled_step(scaler: Any, optimizer: Any, model: nn.Module, seed: int, *, unscale: bool = False) -> None:
    """One step through the scaler with the scaled gradients of a seed."""
    scaler.scale(torch.zeros(()))  # creates the scale tensor
    set_grads(model, seed, scale=float(scaler.get_scale()))
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


@every_case
def test_class_says_that_it_supports_scaling(case: Case) -> None:
    assert case.cls._step_supports_amp_scaling is True
    assert "_step_supports_amp_scaling" in dir(case.build(make_model()))


@every_case
def test_grad_scale_divides_gradients_without_writing_them(case: Case) -> None:
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    for seed in range(3):
        set_grads(model, seed, scale=SCALE)
        set_grads(same, seed)
        held = [param.grad.clone() for param in model.parameters()]
        optimizer.grad_scale = torch.tensor(SCALE)
        optimizer.found_inf = torch.tensor(0.0)
        optimizer.step()
        reference.step()
        assert_same([param.grad for param in model.parameters()], held, "gradients")
    assert_params_equal(model.parameters(), same.parameters())
    assert_same(snapshot(optimizer)["state"], snapshot(reference)["state"])
    assert not torch.equal(model.first.weight, make_model().first.weight)


@every_case
@pytest.mark.parametrize("found", [1.0, 2.0])
@pytest.mark.parametrize("scale", [None, SCALE])
@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
def test_found_inf_makes_the_step_a_no_op_with_counters_unmoved(
    case: Case, found: float, scale: float | None, warm: bool
) -> None:
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    if warm:
        run_steps(optimizer, model, range(2))
        run_steps(reference, same, range(2))
    before = snapshot(optimizer)
    set_grads(model, 9)
    model.first.weight.grad[0, 0] = float("inf")
    optimizer.grad_scale = None if scale is None else torch.tensor(scale)
    optimizer.found_inf = torch.tensor(found)
    optimizer.step()
    after = snapshot(optimizer)
    assert_same(after["params"], before["params"])
    assert_same(after["groups"], before["groups"])
    if warm:
        assert_same(after["state"], before["state"])
    del optimizer.grad_scale, optimizer.found_inf
    run_steps(optimizer, model, range(2, 4))
    run_steps(reference, same, range(2, 4))
    assert_same(snapshot(optimizer), snapshot(reference))


@every_case
def test_grad_scale_of_none_means_already_unscaled(case: Case) -> None:
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    optimizer.grad_scale = None
    optimizer.found_inf = torch.tensor(0.0)
    run_steps(optimizer, model, range(2))
    run_steps(reference, same, range(2))
    assert_same(snapshot(optimizer), snapshot(reference))


@every_case
@pytest.mark.parametrize("mode", ["fused", "unscaled first", "default path"])
def test_grad_scaler_run_with_a_skipped_step_equals_a_plain_run(case: Case, mode: str) -> None:
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    if mode == "default path":
        optimizer._step_supports_amp_scaling = False
    scaler = make_scaler()
    for seed in range(2):
        scaled_step(scaler, optimizer, model, seed, unscale=mode == "unscaled first")
    assert scaler.get_scale() == SCALE

    before = snapshot(optimizer)
    set_grads(model, 7, scale=SCALE)
    model.square.bias.grad[2] = float("nan")
    if mode == "unscaled first":
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert_same(snapshot(optimizer), before)
    assert scaler.get_scale() == SCALE / 2
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")

    for seed in range(2, 4):
        scaled_step(scaler, optimizer, model, seed, unscale=mode == "unscaled first")
    run_steps(reference, same, range(4))
    assert_params_equal(model.parameters(), same.parameters())
    assert_same(snapshot(optimizer)["state"], snapshot(reference)["state"])
    counters = [state[key] for state in optimizer.state.values() for key in STEP_KEYS & set(state)]
    assert all(counter == 4 for counter in counters)


@every_case
def test_inf_in_the_very_first_scaled_step_leaves_nothing_behind(case: Case) -> None:
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    scaler = make_scaler()
    scaler.scale(torch.zeros(()))
    set_grads(model, 0, scale=SCALE)
    model.again.weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert_params_equal(model.parameters(), make_model().parameters())
    scaled_step(scaler, optimizer, model, 1)
    run_steps(reference, same, range(1, 2))
    assert_same(snapshot(optimizer), snapshot(reference))


@every_case
def test_closure_with_a_scaler_raises(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    scaler = make_scaler()
    scaler.scale(torch.zeros(()))
    set_grads(model, 0)
    with pytest.raises(RuntimeError, match=r"[Cc]losure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: torch.zeros(()))


@every_case
def test_autocast_training_with_a_scaler_moves_every_parameter(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    scaler = make_scaler()
    start = [param.detach().clone() for param in model.parameters()]
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(5, 6)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert all(not torch.equal(p, s) for p, s in zip(model.parameters(), start, strict=True))
    assert all(bool(param.isfinite().all()) for param in model.parameters())


@every_case
def test_step_inside_autocast_equals_the_step_outside(case: Case) -> None:
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run_steps(optimizer, model, range(2))
    run_steps(reference, same, range(2))
    assert_same(snapshot(optimizer), snapshot(reference))
