"""Parameters that change under a running optimizer: added groups, swapped objects, saved weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from oxidion._core.schema import COMMON

from .snapshot import assert_params_equal, assert_same, frozen_copy, snapshot
from .table import CASES, MATRIX_ALGORITHMS, Case, every_case, make_model, run_steps, set_grads


@every_case
def test_group_added_after_steps_trains_and_disturbs_no_other(case: Case) -> None:
    model, alone = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(alone)
    run_steps(optimizer, model, range(2))
    run_steps(reference, alone, range(2))
    late = nn.Parameter(torch.randn(8, 8))
    start = late.detach().clone()
    optimizer.add_param_group({"params": [late], "lr": 0.25})
    assert optimizer.param_groups[2]["weight_decay"] == optimizer.defaults["weight_decay"]
    for seed in range(2, 4):
        set_grads(model, seed)
        set_grads(alone, seed)
        set_grads([late], seed)
        optimizer.step()
        reference.step()
    assert_params_equal(model.parameters(), alone.parameters())
    assert set(optimizer.state[late]) == case.state[case.algorithm]
    expected = nn.Parameter(start.clone())
    fresh = case.on(expected, lr=0.25)
    for seed in range(2, 4):
        set_grads([expected], seed)
        fresh.step()
    # Dion and APOLLO draw numbers by the parameter's place in the optimizer.
    if case.algorithm not in ("dion", "apollo_adamw"):
        assert torch.equal(late, expected)
    assert not torch.equal(late, start)


@every_case
def test_named_group_added_after_steps_keeps_names(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model, named=True)
    run_steps(optimizer, model, range(1))
    optimizer.add_param_group({"params": [("late", nn.Parameter(torch.randn(4, 4)))]})
    assert optimizer.param_groups[2]["param_names"] == ["late"]
    with pytest.raises(ValueError, match="'late' is the name of a parameter of another group"):
        optimizer.add_param_group({"params": [("late", nn.Parameter(torch.randn(4, 4)))]})
    assert len(optimizer.param_groups) == 3
    optimizer.add_param_group({"params": [nn.Parameter(torch.randn(4, 4))]})
    assert optimizer.param_groups[3]["param_names"] == ["group3.0"]


@every_case
def test_storage_swapped_through_data_is_followed(case: Case) -> None:
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    for seed in range(4):
        if seed in (0, 2):
            old = [p.data for p in model.parameters()]
            for param in model.parameters():
                param.data = param.data.clone()
            before = frozen_copy(old)
        set_grads(model, seed)
        set_grads(same, seed)
        optimizer.step()
        reference.step()
        assert_same(old, before, "abandoned storage")
    assert_params_equal(model.parameters(), same.parameters())


@every_case
def test_accelerate_placeholder_swap_before_any_step_is_followed(case: Case) -> None:
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    originals = {id(param): param for param in model.parameters()}
    held = [[id(param) for param in group["params"]] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for index in range(len(group["params"])):
            group["params"][index] = torch.empty(1)
    replacement = {key: nn.Parameter(param.detach().clone()) for key, param in originals.items()}
    for group, keys in zip(optimizer.param_groups, held, strict=True):
        group["params"] = [replacement[key] for key in keys]
    for seed in range(2):
        set_grads([replacement[id(param)] for param in model.parameters()], seed)
        set_grads(same, seed)
        optimizer.step()
        reference.step()
    assert_params_equal((replacement[id(param)] for param in model.parameters()), same.parameters())
    assert {id(p) for p in optimizer.state} == {id(p) for p in replacement.values()}
    assert_params_equal(model.parameters(), make_model().parameters())


@every_case
def test_parameter_swapped_after_steps_starts_with_fresh_state(case: Case) -> None:
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    run_steps(optimizer, model, range(2))
    run_steps(reference, same, range(2))
    group = optimizer.param_groups[0]
    (index,) = (i for i, param in enumerate(group["params"]) if param is model.again.weight)
    old, new = group["params"][index], nn.Parameter(torch.randn(5, 7))
    group["params"][index] = new
    abandoned, start = old.detach().clone(), new.detach().clone()
    set_grads(model, 2)
    set_grads(same, 2)
    set_grads([new], 2)
    case.step(optimizer)
    case.step(reference)
    assert torch.equal(old, abandoned)
    assert not torch.equal(new, start)
    assert set(optimizer.state[new]) == case.state[case.algorithm]
    projected = bool({"proj", "update_norm"} & case.state[case.algorithm])
    if projected:
        # The rows are projected.
        assert optimizer.state[new]["exp_avg"].shape == (group["rank"], 7)
    else:
        for key in case.state[case.algorithm] - {"Q", "step"}:
            assert optimizer.state[new][key].shape == case.state_shape(key, new)
    for (name, param), expected in zip(model.named_parameters(), same.parameters(), strict=True):
        if name != "again.weight":
            assert torch.equal(param, expected), name


@every_case
def test_state_tensor_replaced_by_the_user_is_used(case: Case) -> None:
    model, same = make_model(torch.float64), make_model(torch.float64)
    optimizer, reference = case.build(model), case.build(same)
    for opt, net in ((optimizer, model), (reference, same)):
        run_steps(opt, net, range(2))
    for param, twin in zip(model.parameters(), same.parameters(), strict=True):
        for key in optimizer.state[param]:
            optimizer.state[param][key] = optimizer.state[param][key] * 2
            reference.state[twin][key].mul_(2)
    for opt, net in ((optimizer, model), (reference, same)):
        run_steps(opt, net, range(2, 4))
    assert_params_equal(model.parameters(), same.parameters())
    assert_same(snapshot(optimizer)["state"], snapshot(reference)["state"])


@every_case
@pytest.mark.parametrize("shape", [(6, 4), (4,)], ids=["matrix", "vector"])
def test_stepped_weight_saved_for_backward_raises_in_backward(case: Case, shape: tuple[int, ...]) -> None:
    weight = nn.Parameter(torch.randn(shape))
    optimizer = case.on(weight)
    x = torch.randn(shape, requires_grad=True)
    loss = (x * weight).sum()
    set_grads([weight], 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_case
def test_unstepped_weight_saved_for_backward_may_go_backward(case: Case) -> None:
    stepped, skipped = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6, 4))
    optimizer = case.on(stepped, skipped)
    x = torch.randn(6, 4, requires_grad=True)
    loss = (x * skipped).sum()
    set_grads([stepped], 0)
    optimizer.step()
    loss.backward()
    assert torch.equal(x.grad, skipped)


@every_case
def test_non_contiguous_parameters_step_as_contiguous_copies(case: Case) -> None:
    values = [torch.randn(8, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)]
    strided = [
        nn.Parameter(torch.stack([values[0], values[0]], dim=-1)[..., 0]),
        nn.Parameter(torch.stack([values[1], values[1]], dim=-1)[..., 0]),
    ]
    transposed = nn.Parameter(values[0].mT.contiguous().mT)
    assert not any(param.is_contiguous() for param in (*strided, transposed))
    params: list[Tensor] = [*strided, transposed]
    copies = [nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in params]
    optimizer, reference = case.on(*params), case.on(*copies)
    for seed in range(3):
        set_grads(params, seed)
        set_grads(copies, seed)
        optimizer.step()
        reference.step()
    assert_params_equal(params, copies)
    assert not torch.equal(params[0], values[0])


@every_case
@pytest.mark.parametrize("foreign", CASES, ids=str)
def test_group_of_any_algorithm_steps_as_in_its_own_class(case: Case, foreign: Case) -> None:
    hyper = {**foreign.required, **foreign.kwargs, "lr": 0.05, "weight_decay": 0.1}
    if foreign.algorithm not in MATRIX_ALGORITHMS and foreign.has_betas:
        hyper["betas"] = foreign.other["betas"]
    for key in {"eps", "epsilon"} & set(foreign.other):
        hyper[key] = foreign.cls._SCHEMA[key].default
    if {case.algorithm, foreign.algorithm} & {"galore_adamw", "apollo_adamw"}:
        # Keys that mean the same to several algorithms have the defaults of the class.
        hyper |= {"rank": 2, "scale": 0.5, "decay_order": "torch", "scale_type": "tensor"}
    if {case.algorithm, foreign.algorithm} & {"soap", "soap_muon"}:
        hyper |= {"decay_order": "torch", "adjust_lr": "original"}
        if foreign.algorithm == "soap_muon":
            hyper["betas"] = (0.9, 0.9)
    read = {*COMMON, *foreign.cls._SCHEMA, "decay_order"}
    hyper = {key: value for key, value in hyper.items() if key in read}
    shared, own = (nn.Parameter(torch.randn(8, 6, dtype=torch.float64)) for _ in range(2))
    own.data.copy_(shared.data)
    optimizer = case.new([{"params": [shared], "algorithm": foreign.algorithm, **hyper}])
    reference = foreign.new([{"params": [own], **hyper}])
    for seed in range(3):
        set_grads([shared], seed)
        set_grads([own], seed)
        optimizer.step()
        reference.step()
    # float64; two classes may keep the same moments under other names but compute the same.
    torch.testing.assert_close(shared, own, rtol=1e-12, atol=1e-13)
    known = case.state.get(foreign.algorithm)
    if known is not None:
        assert set(optimizer.state[shared]) == known
