"""Tensors that are swapped under a parameter: nothing of it is held between steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from .snapshot import assert_same
from .table import Case, every_case, make_model, run_steps, set_grads


@pytest.fixture
def swapping() -> Iterator[None]:
    """Modules swap their parameters' tensors when they are converted and loaded."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@every_case
def test_no_reference_to_a_parameter_is_held_between_steps(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    before = {name: param._use_count() for name, param in model.named_parameters()}  # type: ignore[attr-defined]
    run_steps(optimizer, model, range(2))
    optimizer.verify()
    optimizer.zero_grad()
    assert before == {name: param._use_count() for name, param in model.named_parameters()}  # type: ignore[attr-defined]


@every_case
def test_swapped_tensor_is_the_one_that_is_updated(case: Case) -> None:
    model = make_model()
    twin = copy.deepcopy(model)
    optimizer, other = case.build(model), case.build(twin)
    run_steps(optimizer, model, range(2))
    run_steps(other, twin, range(2))
    left = []
    for param in model.parameters():
        fresh = nn.Parameter(param.detach().clone())
        param.grad = None
        torch.utils.swap_tensors(param, fresh)
        left.append((fresh, fresh.detach().clone()))
    run_steps(optimizer, model, range(2, 4))
    run_steps(other, twin, range(2, 4))
    assert_same([*model.parameters()], [*twin.parameters()])
    assert all(torch.equal(fresh, before) for fresh, before in left)
    left.clear()  # the tensors that were watched at first are gone
    run_steps(optimizer, model, range(4, 6))
    run_steps(other, twin, range(4, 6))
    assert_same([*model.parameters()], [*twin.parameters()])


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@every_case
def test_model_is_converted_after_a_step_and_trains_on(case: Case, dtype: torch.dtype) -> None:
    model = make_model()
    optimizer = case.build(model)
    run_steps(optimizer, model, range(2))
    optimizer.zero_grad()
    model.to(dtype)
    before = [param.detach().clone() for param in model.parameters()]
    set_grads(model, 3)
    optimizer.step()
    moved = []
    for param, old in zip(model.parameters(), before, strict=True):
        assert param.dtype == dtype
        assert bool(torch.isfinite(param).all())
        moved.append(not torch.equal(param, old))  # a step may be less than a rounding
    assert any(moved)


@pytest.mark.usefixtures("swapping")
@every_case
def test_model_is_loaded_after_a_step_and_trains_on(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    saved = copy.deepcopy(model.state_dict())
    run_steps(optimizer, model, range(2))
    optimizer.zero_grad()
    model.load_state_dict(saved)
    assert_same(model.state_dict(), saved)
    run_steps(optimizer, model, range(1))
    assert all(not torch.equal(value, saved[name]) for name, value in model.state_dict().items())
