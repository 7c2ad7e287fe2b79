"""Pickle and deepcopy of optimizers (contract.md 4.1 and 4.3)."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import oxidion
from oxidion._core.table import Table

from .snapshot import assert_params_equal, assert_same, params_of, snapshot, storages
from .table import Case, every_case, make_model, run_steps, set_grads


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


every_copy = pytest.mark.parametrize("duplicate", [copy.deepcopy, _pickled], ids=["deepcopy", "pickle"])


@every_case
@every_copy
@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "used"])
def test_copy_of_model_and_optimizer_goes_on_as_the_original(
    case: Case, duplicate: Callable[[Any], Any], steps: int
) -> None:
    model = make_model()
    optimizer = case.build(model)
    run_steps(optimizer, model, range(steps))
    twin_model, twin = duplicate((model, optimizer))
    assert type(twin) is case.cls
    assert {id(p) for p in params_of(twin)} == {id(p) for p in twin_model.parameters()}
    assert_same(snapshot(twin), snapshot(optimizer))
    run_steps(optimizer, model, range(steps, steps + 3))
    run_steps(twin, twin_model, range(steps, steps + 3))
    assert_same(snapshot(twin), snapshot(optimizer))


@every_case
@every_copy
def test_copy_of_the_optimizer_alone_owns_its_parameters(case: Case, duplicate: Callable[[Any], Any]) -> None:
    model = make_model()
    optimizer = case.build(model)
    run_steps(optimizer, model, range(2))
    before = snapshot(optimizer)
    twin = duplicate(optimizer)
    assert_same(snapshot(twin), before)
    own, theirs = ({*storages(params_of(opt)), *storages([*opt.state.values()])} for opt in (optimizer, twin))
    assert own
    assert not own & theirs
    for param in params_of(twin):
        param.grad = torch.ones_like(param)
    twin.step()
    assert_same(snapshot(optimizer), before)
    assert not torch.equal(params_of(twin)[0], before["params"][0])


@every_case
@every_copy
def test_copy_keeps_public_attributes_defaults_and_amp_support(
    case: Case, duplicate: Callable[[Any], Any]
) -> None:
    model = make_model()
    optimizer = case.build(model)
    run_steps(optimizer, model, range(1))
    twin = duplicate(optimizer)
    public = {name for name in vars(optimizer) if not name.startswith("_")}
    assert {"defaults", "state", "param_groups"} <= public
    assert {name for name in vars(twin) if not name.startswith("_")} == public
    assert_same(dict(twin.defaults), dict(optimizer.defaults), "defaults")
    assert twin._step_supports_amp_scaling is True


@every_case
@every_copy
def test_copy_validates_added_groups_as_the_original(case: Case, duplicate: Callable[[Any], Any]) -> None:
    twin = duplicate(case.build(make_model()))
    with pytest.raises(ValueError, match="lr must be"):
        twin.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2, 2))], "lr": -1.0})
    twin.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 2))]})
    set_grads(params_of(twin), 0)
    case.step(twin)
    assert not torch.equal(params_of(twin)[-1], torch.ones(2, 2))


@every_case
def test_pickle_holds_only_defaults_state_and_groups(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    run_steps(optimizer, model, range(1))
    held = optimizer.__getstate__()
    assert {"defaults", "state", "param_groups"} <= set(held)
    pickle.dumps(held)


@every_case
def test_deepcopy_with_gradients_takes_neither_step_nor_hook(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    fired: list[int] = []
    optimizer.register_step_post_hook(lambda *_: fired.append(1))
    run_steps(optimizer, model, range(1))
    twin_model, twin = copy.deepcopy((model, optimizer))
    run_steps(twin, twin_model, range(1, 2))
    assert fired == [1]
    run_steps(optimizer, model, range(1, 2))
    assert fired == [1, 1]
    assert_params_equal(model.parameters(), twin_model.parameters())


@every_case
def test_old_pickle_without_newer_group_keys_still_steps(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    run_steps(optimizer, model, range(1))
    held = copy.deepcopy((model, optimizer.__getstate__()))
    for group in held[1]["param_groups"]:
        for key in ("maximize", "foreach", "capturable", "cautious_wd"):
            group.pop(key, None)
    twin = case.cls.__new__(case.cls)
    twin.__setstate__(held[1])
    assert all(group["maximize"] is False for group in twin.param_groups)
    run_steps(optimizer, model, range(1, 3))
    run_steps(twin, held[0], range(1, 3))
    assert_params_equal(held[0].parameters(), model.parameters())


@pytest.mark.parametrize(
    ("name", "kind"),
    [(b"coxidion._table\nTable\n.", Table), (b"coxidion._heads\nHeads\n.", oxidion.qk_clip.Heads)],
    ids=["table", "heads"],
)
def test_pickles_that_name_the_modules_of_earlier_versions_load(name: bytes, kind: type) -> None:
    assert pickle.loads(name) is kind
