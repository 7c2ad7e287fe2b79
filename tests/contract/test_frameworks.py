"""What Lightning, Accelerate and Megatron do to an optimizer, without those packages (contract.md 4.8)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from .snapshot import assert_params_equal, assert_same, params_of, snapshot
from .table import Case, every_case, every_matrix_case, make_model, run_steps, set_grads


class LightningLike:
    """The wrapper pattern of lightning: shares the attributes of the optimizer and forwards its step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.__dict__ = {
            key: value for key, value in optimizer.__dict__.items() if key not in ("step", "__del__")
        }
        self.__class__ = type("Lightning" + type(optimizer).__name__, (LightningLike, type(optimizer)), {})
        self._optimizer = optimizer
        self.calls = 0

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Forward to the wrapped optimizer as lightning does: by keyword."""
        self.calls += 1
        return self._optimizer.step(closure=closure, **kwargs)


@every_case
def test_class_assignment_as_in_lightning_works_and_trains(case: Case) -> None:
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    wrapped: Any = LightningLike(optimizer)
    assert isinstance(wrapped, case.cls)
    assert type(wrapped).__name__ == f"Lightning{case}"
    for seed in range(3):
        set_grads(same, seed)
        reference.step()

        def closure(seed: int = seed) -> Tensor:
            wrapped.zero_grad()
            set_grads(model, seed)
            return torch.tensor(float(seed))

        assert wrapped.step(closure=closure) == float(seed)
    assert wrapped.calls == 3
    assert_same(snapshot(optimizer), snapshot(reference))
    assert_same(wrapped.state_dict(), optimizer.state_dict(), "state dict of the wrapper")
    assert repr(wrapped).startswith(f"Lightning{case} (")


@every_case
def test_plain_class_assignment_to_a_subclass_steps(case: Case) -> None:
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    optimizer.__class__ = type("Patched", (case.cls,), {})
    run_steps(optimizer, model, range(2))
    run_steps(reference, same, range(2))
    assert_same(snapshot(optimizer), snapshot(reference))


@every_case
def test_accelerate_round_trip_before_any_step_changes_nothing(case: Case) -> None:
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    saved = optimizer.state_dict()
    assert saved["state"] == {}
    optimizer.load_state_dict(saved)
    run_steps(optimizer, model, range(3))
    run_steps(reference, same, range(3))
    assert_same(snapshot(optimizer), snapshot(reference))


@every_case
def test_step_replaced_on_the_instance_is_called_and_not_copied(case: Case) -> None:
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    inner = optimizer.step
    calls: list[int] = []

    def patched(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    optimizer.step = patched
    run_steps(optimizer, model, range(2))
    run_steps(reference, same, range(2))
    assert len(calls) == 2
    assert_params_equal(model.parameters(), same.parameters())
    twin_model, twin = copy.deepcopy((model, optimizer))
    run_steps(twin, twin_model, range(2, 3))
    run_steps(reference, same, range(2, 3))
    assert len(calls) == 2
    assert_params_equal(twin_model.parameters(), same.parameters())


@every_case
def test_megatron_style_init_group_is_callable(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    init_group = getattr(optimizer, "_init_group", None)
    assert init_group is not None, "megatron-core calls _init_group(group, skip_non_grad_params=False)"
    for group in optimizer.param_groups:
        init_group(group, skip_non_grad_params=False)
    for param in params_of(optimizer):
        assert set(optimizer.state[param]) == case.state_keys(param)


@every_case
def test_two_optimizers_of_one_class_over_two_models_do_not_meet(case: Case) -> None:
    models = [make_model(seed=seed) for seed in range(2)]
    alone = [make_model(seed=seed) for seed in range(2)]
    together = [case.build(model) for model in models]
    for seed in range(3):
        for optimizer, model in zip(together, models, strict=True):
            set_grads(model, seed)
            optimizer.step()
    for model, expected in zip(models, alone, strict=True):
        run_steps(case.build(expected), expected, range(3))
        assert_params_equal(model.parameters(), expected.parameters())


@every_case
def test_groups_split_by_decay_as_in_hugging_face_trainer_step(case: Case) -> None:
    model = make_model()
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.25}, {"params": rest, "weight_decay": 0.0}]
    optimizer = case.new(groups, lr=0.125, **({"strict": False} if case.is_matrix else {}))
    before = [param.detach().clone() for param in params_of(optimizer)]
    set_grads(model, 0)
    case.step(optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
    assert all(not torch.equal(p, b) for p, b in zip(params_of(optimizer), before, strict=True))


@every_case
def test_parameters_of_deepspeed_zero_3_are_refused_by_name(case: Case) -> None:
    kept = torch.nn.Parameter(torch.randn(4, 3))
    taken: Any = torch.nn.Parameter(torch.empty(0))
    taken.ds_id, taken.ds_shape = 7, torch.Size((4, 3))  # as deepspeed.zero.Init leaves them
    message = r"block\.weight: DeepSpeed ZeRO-3 flattens.*use FSDP2"
    with pytest.raises(TypeError, match=message):
        case.new([("head.weight", kept), ("block.weight", taken)], lr=0.125)
    optimizer = case.new([("head.weight", kept)], lr=0.125)
    with pytest.raises(TypeError, match=message):
        optimizer.add_param_group({"params": [("block.weight", taken)]})
    assert len(optimizer.param_groups) == 1


@every_matrix_case
def test_parameters_that_deepspeed_flattened_are_no_matrices(case: Case) -> None:
    with pytest.raises(ValueError, match=r"takes weight matrices, got shape \(12,\)"):
        case.new([torch.nn.Parameter(torch.randn(4, 3).flatten())], lr=0.125)


def flatten_as_zero(optimizer: Optimizer, ranks: int = 1) -> None:
    """Replaces each group's parameters by the first of ``ranks`` equal parts of their flat copy."""
    for group in optimizer.param_groups:
        flat = torch.cat([param.detach().flatten() for param in group["params"]])
        held = flat[: len(flat) // ranks].clone().requires_grad_()
        held.grad = torch.ones_like(held)
        group["params"] = [held]


@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
@pytest.mark.parametrize("ranks", [1, 2])
@every_case
def test_flat_deepspeed_partitions_step_by_element_or_raise(case: Case, ranks: int, named: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4))
    given = list(model.named_parameters() if named else model.parameters())
    optimizer = case.new(given, lr=0.125, **({"strict": False} if case.is_matrix else {}))
    flatten_as_zero(optimizer, ranks)
    (flat,) = params_of(optimizer)
    before = flat.detach().clone()
    if case.cls._COMMUNICATES:
        message = f"a vector of {flat.numel()} elements replaces its.*ZeRO.*cannot tell their.*FSDP2"
        for _ in range(2):
            with pytest.raises(TypeError, match=message):
                optimizer.step()
        assert torch.equal(flat, before)
        return
    expected = torch.nn.Parameter(before.clone())
    expected.grad = torch.ones_like(before)
    case.step(case.new([expected], lr=0.125))
    case.step(optimizer)
    assert not torch.equal(flat, before)
    assert torch.equal(flat, expected)
    assert optimizer.state_dict()["state"].keys() == {0}


@every_case
def test_vectors_that_replace_vectors_of_their_shape_are_stepped(case: Case) -> None:
    strict = {"strict": False} if case.is_matrix else {}
    optimizer = case.new([{"params": [torch.nn.Parameter(torch.ones(8))]}], lr=0.125, **strict)
    for made in (optimizer, copy.deepcopy(optimizer)):
        other = torch.nn.Parameter(torch.ones(8))
        other.grad = torch.linspace(1, 2, 8)
        made.param_groups[0]["params"] = [other]
        case.step(made)
        assert not torch.equal(other, torch.ones(8))
