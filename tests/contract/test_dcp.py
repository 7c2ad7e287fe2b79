"""torch.distributed.checkpoint without a process group (contract.md 4.6)."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from .snapshot import assert_params_equal, assert_same, snapshot
from .table import STEP_KEYS, Case, every_case, make_model, run_steps

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

OPTIONS = {
    "plain": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "cpu": StateDictOptions(cpu_offload=True),
    "full": StateDictOptions(full_state_dict=True, cpu_offload=True),
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


@every_case
@every_option
def test_state_dict_by_name_restores_a_fresh_optimizer(case: Case, options: StateDictOptions) -> None:
    model, other = make_model(), make_model(seed=1)
    optimizer, resumed = case.build(model), case.build(other)
    run_steps(optimizer, model, range(2))
    optimizer.zero_grad()
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, saved, options=options)
    assert_same(snapshot(resumed)["state"], snapshot(optimizer)["state"])
    assert_same(_with_tuples(snapshot(resumed)["groups"]), _with_tuples(snapshot(optimizer)["groups"]))
    run_steps(optimizer, model, range(2, 4))
    run_steps(resumed, other, range(2, 4))
    assert_params_equal(other.parameters(), model.parameters())


def _with_tuples(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gathering a full state dict turns the tuples of a group into lists."""
    return [
        {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
        for group in groups
    ]


@every_case
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float lr", "tensor lr"])
def test_state_made_by_dcp_is_complete_and_keeps_parameter_bits(case: Case, tensor_lr: bool) -> None:
    model = make_model()
    lr = torch.tensor(0.25) if tensor_lr else 0.25
    optimizer = case.build(model, lr=lr, weight_decay=0.5)
    unused = model.again.weight
    saved = get_optimizer_state_dict(model, optimizer)
    assert_params_equal(model.parameters(), make_model().parameters())
    assert all(param.grad is None for param in model.parameters())
    assert set(saved["state"]) == {name for name, _ in model.named_parameters()}
    for name, param in model.named_parameters():
        assert set(saved["state"][name]) == case.state_keys(param), name
    assert {id(p) for p in optimizer.state} == {id(p) for p in model.parameters()}
    assert set(optimizer.state[unused]) == case.state_keys(unused)
    for group in optimizer.param_groups:
        assert isinstance(group["lr"], Tensor) == tensor_lr
        assert float(group["lr"]) == 0.25
    for state in optimizer.state.values():
        assert all(bool(value.isfinite().all()) for value in state.values())


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
@pytest.mark.parametrize("cautious", [False, True], ids=["plain", "cautious"])
def test_zero_gradient_zero_lr_step_creates_state_only(
    case: Case, dtype: torch.dtype, lr: float | Tensor, cautious: bool
) -> None:
    model = make_model(dtype)
    optimizer = case.build(model, lr=lr, weight_decay=0.5)
    for group in optimizer.param_groups:
        group["cautious_wd"] = cautious
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step(closure=None)
    assert_params_equal(model.parameters(), make_model(dtype).parameters())
    for param in model.parameters():
        state = optimizer.state[param]
        assert set(state) == case.state_keys(param)
        for key, value in state.items():
            assert bool(value.isfinite().all()), key
            # What a class adds to squared gradients shows in their averages.
            floor = 1e-16 if "eps" in case.other and isinstance(case.other["eps"], tuple) else 0.0
            assert key in STEP_KEYS | {"Q"} or value.abs().max() <= floor, key
        if "Q" in state:
            assert state["Q"].any(), "the zero step must not lose the start of the power iteration"


@every_case
def test_state_of_a_frozen_and_of_a_late_parameter_is_handled(case: Case) -> None:
    model, other = make_model(), make_model()
    for net in (model, other):
        net.square.weight.requires_grad_(False)
    optimizer, resumed = case.build(model), case.build(other)
    for seed in range(2):
        for name, param in model.named_parameters():
            param.grad = torch.full_like(param, 0.5 + seed) if name.startswith("first") else None
        optimizer.step()
    optimizer.zero_grad()
    live = {name for name, param in model.named_parameters() if param.requires_grad}
    saved = get_optimizer_state_dict(model, optimizer)
    assert set(saved["state"]) == live
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, saved)
    assert_same(snapshot(resumed)["state"], snapshot(optimizer)["state"])


@every_case
def test_flat_keys_name_parameter_states_and_hold_simple_values(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    run_steps(optimizer, model, range(1))
    optimizer.zero_grad()
    flat = get_optimizer_state_dict(model, optimizer, options=OPTIONS["flat"])
    expected = {
        f"state.{name}.{key}" for name, param in model.named_parameters() for key in case.state_keys(param)
    }
    assert {key for key in flat if key.startswith("state.")} == expected
    assert "param_groups.first.weight.lr" in flat
    assert "param_groups.first.bias.algorithm" in flat
    for key, value in flat.items():
        assert value is None or isinstance(value, (Tensor, int, float, bool, str, tuple, list)), key


@every_case
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["own state", "float32 state"])
def test_save_and_load_through_files_resumes_bit_by_bit(
    case: Case, flat: bool, dtype: torch.dtype, wide: bool, tmp_path: pathlib.Path
) -> None:
    precision = case.float32_state if wide else {}
    options = OPTIONS["flat" if flat else "plain"]
    model, other = make_model(dtype), make_model(dtype, seed=1)
    optimizer, resumed = case.build(model, **precision), case.build(other, lr=0.5, **precision)
    run_steps(optimizer, model, range(2))
    optimizer.zero_grad()
    dcp.save(_both(model, optimizer, options), checkpoint_id=tmp_path, no_dist=True)

    target = _both(other, resumed, options)
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(
        other,
        resumed,
        model_state_dict=target["model"],
        optim_state_dict=target["optimizer"],
        options=options,
    )
    assert_same(snapshot(resumed), snapshot(optimizer))
    run_steps(optimizer, model, range(2, 5))
    run_steps(resumed, other, range(2, 5))
    assert_same(snapshot(resumed), snapshot(optimizer))


def _both(model: nn.Module, optimizer: Any, options: StateDictOptions) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    return {"model": model_state, "optimizer": optimizer_state}
