"""Entries of ``state`` that are not the optimizer's: kept, and left alone by all that walks the state."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn

import oxidion
from oxidion._core.state import is_own

from .snapshot import assert_params_equal
from .table import Case, every_case, make_model, run_steps

STRANGER = nn.Parameter(torch.ones(3, 2))
ENTRIES: dict[str, tuple[Any, Any]] = {
    "text": ("note", True),
    "number": (10_000, {"exp_avg": torch.zeros(3)}),
    "pair": (("a", 1), [torch.ones(2)]),
    "tensor": (torch.ones(2), 3.5),
    "parameter of no group": (STRANGER, {"momentum": torch.zeros(7), "step": "none"}),
    "none": (None, None),
}
every_entry = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES.keys())


def is_held(optimizer: Any, entry: tuple[Any, Any]) -> bool:
    return any(key is entry[0] and value is entry[1] for key, value in optimizer.state.items())


@every_case
@every_entry
def test_entry_of_no_parameter_is_kept_and_left_alone(case: Case, entry: tuple[Any, Any]) -> None:
    model, same = make_model(), make_model()
    optimizer, plain = case.build(model), case.build(same)
    optimizer.state[entry[0]] = entry[1]
    run_steps(optimizer, model, range(2))
    run_steps(plain, same, range(2))
    session = optimizer._session
    optimizer.state["more"] = object()
    run_steps(optimizer, model, range(2, 4))
    run_steps(plain, same, range(2, 4))
    assert optimizer._session is session, "nothing is planned again"
    optimizer.synchronize_for_checkpoint()
    optimizer.plan()
    optimizer.explain()
    optimizer.metrics()
    optimizer.verify()
    assert is_held(optimizer, entry)
    del optimizer.state["more"]
    optimizer.load_state_dict(optimizer.state_dict())
    assert is_held(optimizer, entry)
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.param_groups = groups
    run_steps(optimizer, model, range(4, 6))
    run_steps(plain, same, range(4, 6))
    extra = nn.Parameter(torch.ones(4, 3))
    optimizer.add_param_group({"params": [extra], **case.required})
    extra.grad = torch.ones(4, 3)
    optimizer.step()
    plain.step()
    assert is_held(optimizer, entry)
    assert_params_equal(model.parameters(), same.parameters())


@every_entry
def test_copies_and_pickles_have_the_entry(entry: tuple[Any, Any]) -> None:
    model = make_model()
    optimizer = oxidion.AdamW(model.parameters())
    run_steps(optimizer, model, range(1))
    optimizer.state[entry[0]] = entry[1]
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert len(twin.state) == len(optimizer.state)
        for param in (param for group in twin.param_groups for param in group["params"]):
            param.grad = torch.ones_like(param)
        twin.step()
        assert len(twin.state) == len(optimizer.state)


@pytest.mark.parametrize("key", ["text", "number", "pair"])
def test_state_dict_carries_an_entry_of_no_parameter(key: str) -> None:
    name, value = ENTRIES[key]
    models = make_model(), make_model()
    source, target = (oxidion.AdamW(model.parameters()) for model in models)
    run_steps(source, models[0], range(1))
    source.state[name] = value
    buffer = io.BytesIO()
    torch.save(source.state_dict(), buffer)
    buffer.seek(0)
    target.load_state_dict(torch.load(buffer, weights_only=True))
    assert repr(target.state[name]) == repr(value)
    run_steps(target, models[1], range(1, 2))


@pytest.mark.parametrize(
    "key", [0, 3, True, 1.0, STRANGER, torch.ones(2)], ids=lambda key: type(key).__name__
)
def test_state_dict_leaves_out_what_it_cannot_hold_and_says_so(
    key: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    optimizer = oxidion.AdamW(model.parameters())
    run_steps(optimizer, model, range(1))
    wanted = optimizer.state_dict()["state"]
    optimizer.state[key] = {"exp_avg": "mine"}
    with caplog.at_level(logging.WARNING, "oxidion"):
        saved = optimizer.state_dict()["state"]
    assert "state_dict() leaves out the entries" in caplog.text
    assert saved.keys() == wanted.keys()
    assert all(saved[at]["exp_avg"] is wanted[at]["exp_avg"] for at in wanted)
    assert optimizer.state[key] == {"exp_avg": "mine"}
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[key] == {"exp_avg": "mine"}


def test_states_of_a_parameter_that_left_the_groups_stay() -> None:
    model = make_model()
    optimizer = oxidion.AdamW(model.parameters())
    run_steps(optimizer, model, range(2))
    gone = optimizer.param_groups[0]["params"].pop(1)
    held = {key: value.clone() for key, value in optimizer.state[gone].items()}
    run_steps(optimizer, model, range(2, 4))
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(optimizer.state_dict()["state"]) == len(optimizer.param_groups[0]["params"])
    assert all(torch.equal(optimizer.state[gone][key], value) for key, value in held.items())
    optimizer.add_param_group({"params": [gone]})
    run_steps(optimizer, model, range(4, 5))
    assert optimizer.state[gone]["step"] == 3


@every_case
def test_keys_of_a_parameter_that_are_not_ours_are_left_alone(case: Case) -> None:
    model, same = make_model(), make_model()
    optimizer, plain = case.build(model), case.build(same)
    lock = threading.Lock()  # cannot be copied
    for param in model.parameters():
        optimizer.state[param]["mine"] = torch.ones(2)
        optimizer.state[param][5] = lock
    run_steps(optimizer, model, range(2))
    run_steps(plain, same, range(2))
    session = optimizer._session
    for param in model.parameters():
        optimizer.state[param]["count"] = optimizer.state[param].get("count", 0) + 1
        optimizer.state[param]["mine"] = torch.zeros(3)
    run_steps(optimizer, model, range(2, 3))
    run_steps(plain, same, range(2, 3))
    assert optimizer._session is session
    optimizer.verify()
    optimizer.metrics()
    optimizer.load_state_dict(optimizer.state_dict())
    run_steps(optimizer, model, range(3, 4))
    run_steps(plain, same, range(3, 4))
    for param in model.parameters():
        own = optimizer.state[param]
        assert torch.equal(own["mine"], torch.zeros(3))
        assert own[5] is lock
        assert own["count"] == 1
    assert_params_equal(model.parameters(), same.parameters())


def test_keys_that_are_not_ours_stay_when_the_algorithm_changes() -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    weight.grad = torch.ones(4, 3)
    optimizer = oxidion.Muon([weight])
    optimizer.state[weight]["mine"] = 5
    optimizer.step()
    optimizer.param_groups[0]["algorithm"] = "adamw"
    optimizer.step()
    assert optimizer.state[weight].keys() == {"mine", "momentum", "variance", "step_dev"}
    assert optimizer.state[weight]["step_dev"] == 1


@every_case
def test_state_swapped_for_another_tensor_is_still_found(case: Case) -> None:
    model, same = make_model(torch.float64), make_model(torch.float64)
    optimizer, plain = case.build(model), case.build(same)
    run_steps(optimizer, model, range(2))
    run_steps(plain, same, range(2))
    for param in model.parameters():
        for key, value in optimizer.state[param].items():
            optimizer.state[param][key] = value.clone()
            value.fill_(float("nan"))
    run_steps(optimizer, model, range(2, 4))
    run_steps(plain, same, range(2, 4))
    assert_params_equal(model.parameters(), same.parameters())


@every_case
def test_every_key_of_a_state_is_known_as_ours(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model, state_bits=8)
    for group in optimizer.param_groups:
        group["min_quant_numel"] = 0
    run_steps(optimizer, model, range(1))
    keys = {key for own in optimizer.state.values() for key in own}
    assert keys
    assert all(map(is_own, keys))


def test_state_of_a_parameter_that_is_no_dict_is_refused_by_name() -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    optimizer = oxidion.AdamW([("weight", weight)])
    optimizer.state[weight] = True
    weight.grad = torch.ones(4, 3)
    with pytest.raises(
        TypeError, match="weight: its entry in the optimizer's state must be a dict, got bool"
    ):
        optimizer.step()
