"""State: its keys, shapes, dtypes and counters."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
from torch import nn

import oxidion
from oxidion._core.state import is_own

from .snapshot import assert_same, snapshot
from .table import STEP_KEYS, Case, every_case, make_model, run_steps, set_grads


@every_case
def test_group_step_counts_calls_and_state_counters_updates(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    run_steps(optimizer, model, range(3))
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    counters = [state[key] for state in optimizer.state.values() for key in STEP_KEYS & set(state)]
    has_counters = bool(STEP_KEYS & case.state[case.vector_algorithm])
    assert bool(counters) == has_counters
    for counter in counters:
        assert counter.dtype == torch.float32
        assert counter.shape == ()
        assert counter == 3


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_state_has_the_documented_keys_shapes_and_dtypes(case: Case, dtype: torch.dtype) -> None:
    model = make_model(dtype)
    optimizer = case.build(model)
    run_steps(optimizer, model, range(1))
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        assert set(state) == case.state_keys(param), name
        for key, value in state.items():
            if key in STEP_KEYS:
                continue
            assert not value.requires_grad
            if {"proj", "update_norm"} & set(state):
                # Moments of a projected gradient; the shorter side of a weight is projected.
                wide = dtype if dtype == torch.float64 else torch.float32
                rank, (rows, cols) = optimizer.param_groups[0]["rank"], param.shape
                moment = (rows, rank) if rows >= cols else (rank, cols)
                shapes = {"proj": (min(rows, cols), rank), "update_norm": (), "proj_step": ()}
                assert (value.dtype, tuple(value.shape)) == (wide, shapes.get(key, moment)), f"{name}: {key}"
                continue
            assert value.dtype == case.state_type(dtype), f"{name}: {key}"
            if key != "Q":
                assert value.shape == case.state_shape(key, param), f"{name}: {key}"
        if "Q" in state:
            short, rank = min(param.shape), -(-min(param.shape) // 2)  # rank_fraction 0.5, rounded up
            assert state["Q"].shape == (short, rank)


@every_case
def test_init_state_allocates_every_parameter_once(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    assert not optimizer.state
    optimizer.init_state()
    assert {id(p) for p in optimizer.state} == {id(p) for p in model.parameters()}
    before = snapshot(optimizer)
    held = {id(p): dict(state) for p, state in optimizer.state.items()}
    optimizer.init_state()
    assert_same(snapshot(optimizer), before)
    assert all(optimizer.state[p][key] is held[id(p)][key] for p in model.parameters() for key in held[id(p)])
    assert [group["step"] for group in optimizer.param_groups] == [0, 0]


def test_large_states_are_tensors_like_others() -> None:
    param = nn.Parameter(torch.randn(1100, 1000))
    optimizer = oxidion.AdamW([param], lr=0.01)
    optimizer.init_state()
    state = optimizer.state[param]
    assert not state["exp_avg"].any()
    assert not state["exp_avg_sq"].any()
    assert state["exp_avg"].is_contiguous()
    param.grad = torch.randn_like(param)
    optimizer.step()
    kept = state["exp_avg"].clone()
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    assert buffer.tell() < 2.1 * param.numel() * 4
    twin = nn.Parameter(param.detach().clone())
    other = oxidion.AdamW([twin], lr=0.5)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    copied = copy.deepcopy(optimizer)
    assert torch.equal(copied.state[copied.param_groups[0]["params"][0]]["exp_avg"], kept)
    twin.grad = param.grad.clone()
    optimizer.step()
    other.step()
    assert torch.equal(param, twin)
    values = state["exp_avg"]
    del optimizer, state
    gc.collect()
    assert not torch.equal(values, kept)
    assert values.isfinite().all()


@every_case
def test_default_device_decides_nothing_about_states(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    set_grads(model, 0)
    with torch.device("meta"):
        optimizer.step()
    tensors = [value for own in optimizer.state.values() for value in own.values() if torch.is_tensor(value)]
    assert tensors
    assert all(value.device.type == "cpu" for value in tensors)


@every_case
def test_every_state_of_ours_differs_from_entries_of_the_user(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    run_steps(optimizer, model, range(1))
    assert all(is_own(key) for own in optimizer.state.values() for key in own)
