"""state_dict and load_state_dict: layout, dtypes, isolation, hooks, resumption (contract.md 4.3)."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

from .snapshot import assert_params_equal, assert_same, frozen_copy, snapshot, storages
from .table import STEP_KEYS, Case, every_case, make_model, run_steps

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def through_file(value: Any) -> Any:
    """Save and load with ``weights_only=True``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@every_case
@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
def test_layout_is_torchs(case: Case, named: bool) -> None:
    model = make_model()
    optimizer = case.build(model, named=named)
    assert optimizer.state_dict()["state"] == {}
    run_steps(optimizer, model, range(1))
    saved = optimizer.state_dict()
    assert set(saved) == {"state", "param_groups"}
    counts = [len(group["params"]) for group in optimizer.param_groups]
    assert [group["params"] for group in saved["param_groups"]] == [
        list(range(counts[0])),
        list(range(counts[0], sum(counts))),
    ]
    assert set(saved["state"]) == set(range(sum(counts)))
    for group, live in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        assert set(group) == set(live)
        assert ("param_names" in group) == named
        for key, value in group.items():
            if key not in ("params", "param_names"):
                assert value is None or isinstance(value, (int, float, bool, str, tuple, Tensor)), key
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in enumerate(params):
        assert set(saved["state"][index]) == case.state_keys(param)
        for key, value in saved["state"][index].items():
            assert isinstance(value, (Tensor, int, float)), key
            assert value is optimizer.state[param][key], "state_dict() returns live references"


@every_case
@every_dtype
@pytest.mark.parametrize(
    "medium", [through_file, copy.deepcopy, lambda saved: saved], ids=["file", "copy", "live"]
)
def test_resumed_run_equals_the_uninterrupted_one_bit_by_bit(
    case: Case, dtype: torch.dtype, medium: Any
) -> None:
    model, other = make_model(dtype), make_model(dtype, seed=1)
    optimizer, resumed = case.build(model), case.build(other)
    run_steps(optimizer, model, range(3))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(medium(optimizer.state_dict()))
    assert_same(snapshot(resumed), snapshot(optimizer))
    run_steps(optimizer, model, range(3, 6))
    run_steps(resumed, other, range(3, 6))
    assert_same(snapshot(resumed), snapshot(optimizer))
    assert bool(model.first.weight.isfinite().all())


@every_case
def test_load_into_a_used_optimizer_discards_its_past(case: Case) -> None:
    model, other = make_model(), make_model(seed=1)
    optimizer, used = case.build(model), case.build(other, lr=0.5)
    run_steps(optimizer, model, range(2))
    run_steps(used, other, range(7, 12))
    other.load_state_dict(model.state_dict())
    used.load_state_dict(optimizer.state_dict())
    run_steps(optimizer, model, range(2, 5))
    run_steps(used, other, range(2, 5))
    assert_same(snapshot(used), snapshot(optimizer))


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_state_of_narrow_parameters_survives_bit_by_bit(case: Case, dtype: torch.dtype) -> None:
    model, other = make_model(dtype), make_model(dtype)
    optimizer, resumed = case.build(model, **case.float32_state), case.build(other, **case.float32_state)
    run_steps(optimizer, model, range(2))
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    assert len(tensors) >= 8
    assert {value.dtype for value in tensors} == {torch.float32}
    assert any(not torch.equal(value, value.to(dtype).float()) for value in tensors), (
        "the test needs more than 8 bits"
    )
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    assert_same(snapshot(resumed), snapshot(optimizer))
    run_steps(optimizer, model, range(2, 5))
    run_steps(resumed, other, range(2, 5))
    assert_same(snapshot(resumed), snapshot(optimizer))


@every_case
def test_parameters_of_mixed_dtypes_keep_theirs(case: Case) -> None:
    def mixed() -> Any:
        model = make_model()
        model.square.to(torch.bfloat16)
        model.again.to(torch.float64)
        return model

    model, other = mixed(), mixed()
    optimizer, resumed = case.build(model), case.build(other)
    run_steps(optimizer, model, range(2))
    for param, state in optimizer.state.items():
        # Moments of a projected gradient are float32 at least.
        low_rank = {"proj", "update_norm"} & set(state)
        for key in state.keys() - STEP_KEYS:
            wide = torch.promote_types(param.dtype, torch.float32)
            assert state[key].dtype == (wide if low_rank else case.state_type(param.dtype)), key
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    run_steps(optimizer, model, range(2, 4))
    run_steps(resumed, other, range(2, 4))
    assert_same(snapshot(resumed), snapshot(optimizer))


@every_case
def test_optimizers_loaded_from_one_dict_share_no_memory(case: Case) -> None:
    models = [make_model() for _ in range(3)]
    source, first, second = (case.build(model) for model in models)
    run_steps(source, models[0], range(2))
    saved = source.state_dict()
    held = frozen_copy(saved)
    first.load_state_dict(saved)
    second.load_state_dict(saved)
    places = [storages(list(opt.state.values())) for opt in (source, first, second)]
    assert all(places)
    assert not places[0] & places[1]
    assert not places[0] & places[2]
    assert not places[1] & places[2]
    run_steps(first, models[1], range(2, 4))
    assert_same(saved, held, "the saved dict")
    assert_same([*second.state.values()], [*held["state"].values()], "the second optimizer")
    first.param_groups[0]["lr"] = 123.0
    assert saved["param_groups"][0]["lr"] != 123.0
    assert second.param_groups[0]["lr"] != 123.0


@every_case
def test_load_does_not_modify_the_incoming_dict(case: Case) -> None:
    model, other = make_model(torch.bfloat16), make_model(torch.bfloat16)
    optimizer = case.build(model)
    run_steps(optimizer, model, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        del group["maximize"]
    held = frozen_copy(saved)
    case.build(other).load_state_dict(saved)
    assert_same(saved, held, "the saved dict")


@every_case
def test_hooks_run_in_order_and_may_replace_the_dict(case: Case) -> None:
    model, other = make_model(), make_model()
    optimizer, target = case.build(model), case.build(other)
    run_steps(optimizer, model, range(1))
    fired: list[str] = []

    def note(name: str) -> Any:
        return lambda *_: fired.append(name)

    optimizer.register_state_dict_pre_hook(note("save pre"))
    optimizer.register_state_dict_pre_hook(note("save first"), prepend=True)
    optimizer.register_state_dict_post_hook(lambda opt, saved: {**saved, "extra": 1})
    optimizer.register_state_dict_post_hook(note("save post first"), prepend=True)
    saved = optimizer.state_dict()
    assert fired == ["save first", "save pre", "save post first"]
    assert saved.pop("extra") == 1

    def halve(opt: Any, saved: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": 0.125} for group in saved["param_groups"]]
        return {**saved, "param_groups": groups}

    fired.clear()
    target.register_load_state_dict_pre_hook(halve)
    target.register_load_state_dict_pre_hook(note("load first"), prepend=True)
    target.register_load_state_dict_post_hook(note("load post"))
    target.register_load_state_dict_post_hook(note("load post first"), prepend=True)
    target.load_state_dict(saved)
    assert fired == ["load first", "load post first", "load post"]
    assert [group["lr"] for group in target.param_groups] == [0.125, 0.125]
    assert_same([*target.state.values()], [*optimizer.state.values()], "state")


@every_case
def test_post_hook_sees_the_restored_state(case: Case) -> None:
    model, other = make_model(torch.bfloat16), make_model(torch.bfloat16)
    optimizer, target = case.build(model, **case.float32_state), case.build(other, **case.float32_state)
    run_steps(optimizer, model, range(1))
    seen: list[set[torch.dtype]] = []
    target.register_load_state_dict_post_hook(
        lambda opt: seen.append({value.dtype for state in opt.state.values() for value in state.values()})
    )
    target.load_state_dict(optimizer.state_dict())
    assert seen == [{torch.float32}]


@every_case
def test_group_keys_missing_in_the_checkpoint_get_their_defaults(case: Case) -> None:
    model, other = make_model(), make_model()
    optimizer, resumed = case.build(model), case.build(other)
    run_steps(optimizer, model, range(2))
    other.load_state_dict(model.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    kept = {"lr", "params", "step", "algorithm", "rank_fraction", "betas"}
    for group in saved["param_groups"]:
        for key in set(group) - kept:
            del group[key]
    resumed.load_state_dict(saved)
    for group in resumed.param_groups:
        assert set(resumed.defaults) <= set(group)
    run_steps(optimizer, model, range(2, 4))
    run_steps(resumed, other, range(2, 4))
    assert_params_equal(other.parameters(), model.parameters())


@every_case
def test_group_keys_unknown_to_the_class_are_kept(case: Case) -> None:
    model, other = make_model(), make_model()
    optimizer, resumed = case.build(model), case.build(other)
    run_steps(optimizer, model, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    for index, group in enumerate(saved["param_groups"]):
        group["tag_of_the_user"] = index
    resumed.load_state_dict(saved)
    run_steps(resumed, other, range(1, 2))
    assert [group["tag_of_the_user"] for group in resumed.state_dict()["param_groups"]] == [0, 1]


@every_case
def test_wrong_group_or_parameter_count_raises_without_changes(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    run_steps(optimizer, model, range(1))
    saved = optimizer.state_dict()
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({**saved, "param_groups": saved["param_groups"][:1]})
    short = [{**group, "params": group["params"][:1]} for group in saved["param_groups"]]
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict({**saved, "param_groups": short})
    assert_same(snapshot(optimizer), before)


@every_case
def test_named_checkpoint_loads_into_unnamed_optimizer_and_back(case: Case) -> None:
    model, other = make_model(), make_model()
    named, unnamed = case.build(model, named=True), case.build(other)
    run_steps(named, model, range(2))
    unnamed.load_state_dict(named.state_dict())
    assert unnamed.param_groups[0]["param_names"] == named.param_groups[0]["param_names"]
    plain = case.build(make_model())
    names = [list(group["param_names"]) for group in named.param_groups]
    named.load_state_dict(plain.state_dict())
    assert [group["param_names"] for group in named.param_groups] == names


@every_case
def test_tensor_lr_survives_the_round_trip(case: Case) -> None:
    model, other = make_model(), make_model()
    optimizer = case.build(model, lr=torch.tensor(0.03125))
    resumed = case.build(other, lr=torch.tensor(0.5))
    run_steps(optimizer, model, range(1))
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    for group in resumed.param_groups:
        assert float(group["lr"]) == 0.03125
    assert all(float(group["lr"]) == 0.03125 for group in optimizer.param_groups)


@every_case
def test_load_by_keyword_and_of_an_ordered_dict(case: Case) -> None:
    model, other = make_model(), make_model()
    optimizer, resumed = case.build(model), case.build(other)
    run_steps(optimizer, model, range(1))
    resumed.load_state_dict(state_dict=OrderedDict(optimizer.state_dict()))
    assert_same([*resumed.state.values()], [*optimizer.state.values()], "state")
