"""Refused hyper-parameters, groups and parameters (contract.md 4.1; "Bad input" of the specification)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from .case import MOMENTUM_FACTORS
from .snapshot import assert_same, params_of, snapshot
from .table import CASES, Case, case_of, every_case, every_matrix_case, make_model, pairs_of, set_grads


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 3))


every_bad_value = pairs_of(lambda case: case.bad)


def test_every_row_has_bad_values() -> None:
    assert all(len(case.bad) >= 10 for case in CASES)


@every_bad_value
def test_bad_hyper_parameter_raises_in_constructor_and_any_group(case: Case, key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{key}\b.* must be .*got"):
        case.new([matrix()], **{key: value})
    with pytest.raises(ValueError, match=rf"{key}\b.* must be .*got.*group 1"):
        case.new([{"params": [matrix()]}, {"params": [matrix()], key: value}])
    param = matrix()
    optimizer = case.new([param])
    set_grads([param], 0)
    optimizer.step()
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=rf"{key}\b.* must be"):
        optimizer.add_param_group({"params": [matrix()], key: value})
    assert_same(snapshot(optimizer), before)
    optimizer.step()
    assert not torch.equal(param, before["params"][0])


@every_case
@pytest.mark.parametrize("key", ["lr", "weight_decay", "betas"])
@pytest.mark.parametrize("value", ["fast", [0.1, 0.2, 0.3, 0.4], object()], ids=["str", "list", "object"])
def test_hyper_parameter_of_wrong_type_raises(case: Case, key: str, value: object) -> None:
    with pytest.raises((TypeError, ValueError), match=key):
        case.new([matrix()], **{key: value})


@every_case
def test_zero_lr_and_decay_are_legal_and_leave_parameters_alone(case: Case) -> None:
    param = matrix()
    optimizer = case.new([param], lr=0.0, weight_decay=0.0)
    set_grads([param], 0)
    before = param.detach().clone()
    optimizer.step()
    assert torch.equal(param, before)


@every_case
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_tensor_lr_of_one_element_is_accepted(case: Case, shape: tuple[int, ...]) -> None:
    lr = torch.full(shape, 0.1)
    optimizer = case.new([matrix()], lr=lr)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)


@every_case
def test_tensor_lr_of_two_elements_raises(case: Case) -> None:
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        case.new([matrix()], lr=torch.tensor([0.1, 0.1]))
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        case.new([{"params": [matrix()], "lr": torch.tensor([0.1, 0.1])}])


@every_case
def test_tensor_lr_negative_or_nan_raises(case: Case) -> None:
    for value in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="lr must be"):
            case.new([matrix()], lr=torch.tensor(value))


@every_case
def test_tensor_lr_with_foreach_and_not_capturable_raises(case: Case) -> None:
    message = "lr as a Tensor is not supported for capturable=False and foreach=True"
    with pytest.raises(ValueError, match=message):
        case.new([matrix()], lr=torch.tensor(0.1), foreach=True)
    case.new([matrix()], lr=torch.tensor(0.1), foreach=True, capturable=True)
    case.new([matrix()], lr=torch.tensor(0.1), foreach=False)


@every_case
@pytest.mark.parametrize(
    ("typo", "nearest"),
    [("weight_decai", "weight_decay"), ("lrr", "lr"), ("algoritm", "algorithm"), ("bets", "betas")],
)
def test_unknown_group_key_raises_and_names_the_nearest(case: Case, typo: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=rf"{typo}.*\b{nearest}\b"):
        case.new([{"params": [matrix()], typo: 0.1}])
    optimizer = case.new([matrix()])
    with pytest.raises(ValueError, match=rf"{typo}.*\b{nearest}\b"):
        optimizer.add_param_group({"params": [matrix()], typo: 0.1})
    assert len(optimizer.param_groups) == 1


@every_case
@pytest.mark.parametrize("key", ["initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"])
def test_group_keys_of_schedulers_are_known(case: Case, key: str) -> None:
    optimizer = case.new([{"params": [matrix()], key: 0.25}])
    optimizer.add_param_group({"params": [matrix()], key: 0.75})
    assert [group[key] for group in optimizer.param_groups] == [0.25, 0.75]


@every_case
def test_unknown_algorithm_raises_at_construction(case: Case) -> None:
    with pytest.raises(ValueError, match=r"algorithm.*sgdm"):
        case.new([{"params": [matrix()], "algorithm": "sgdm"}])
    optimizer = case.new([matrix()])
    with pytest.raises(ValueError, match=r"algorithm.*sgdm"):
        optimizer.add_param_group({"params": [matrix()], "algorithm": "sgdm"})
    assert len(optimizer.param_groups) == 1


@every_matrix_case
def test_vector_in_a_matrix_group_raises_and_names_it(case: Case) -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"first\.bias"):
        case.new(model.named_parameters(), strict=True)
    with pytest.raises(ValueError, match=f"parameter 1 of group 0: {case} takes weight matrices"):
        case.new([matrix(), nn.Parameter(torch.randn(5))])
    optimizer = case.new([matrix()])
    with pytest.raises(ValueError, match=f"parameter 0 of group 1: {case} takes weight matrices"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.randn(5))]})
    assert len(optimizer.param_groups) == 1


@every_matrix_case
@pytest.mark.parametrize("shape", [(5,), ()], ids=str)
def test_vector_in_a_matrix_group_without_strict_takes_adamw(case: Case, shape: tuple[int, ...]) -> None:
    # float64: the only difference to torch's AdamW is the order of the operations.
    vector = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    square = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    expected = nn.Parameter(vector.detach().clone())
    optimizer = case.new(
        [square, vector], strict=False, lr=0.05, betas=(0.8, 0.9), weight_decay=0.1, epsilon=1e-6
    )
    reference = torch.optim.AdamW([expected], lr=0.05, betas=(0.8, 0.9), weight_decay=0.1, eps=1e-6)
    for seed in range(4):
        set_grads([square, vector], seed)
        expected.grad = vector.grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(vector, expected, rtol=1e-12, atol=1e-12)
    assert set(optimizer.state[vector]) == case.state["adamw"]
    assert set(optimizer.state[square]) == case.state[case.algorithm]


@every_case
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64], ids=str)
def test_integer_and_complex_parameters_raise_with_their_names(case: Case, dtype: torch.dtype) -> None:
    wrong = torch.zeros(4, 3, dtype=dtype)
    with pytest.raises((TypeError, ValueError), match="labels"):
        case.new([("weight", matrix()), ("labels", wrong)])
    optimizer = case.new([("weight", matrix())])
    with pytest.raises((TypeError, ValueError), match="labels"):
        optimizer.add_param_group({"params": [("labels", wrong)]})
    assert len(params_of(optimizer)) == 1


@every_case
def test_add_param_group_of_a_wrong_type_raises(case: Case) -> None:
    optimizer = case.new([matrix()])
    with pytest.raises(TypeError, match="param_group must be a dict"):
        optimizer.add_param_group([matrix()])
    with pytest.raises(TypeError, match="ordered collections"):
        optimizer.add_param_group({"params": {matrix()}})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("key", "value"), [("power_iters", 0), ("qr_method", "svd"), ("rcqr_oversample", float("nan"))]
)
def test_dion_arguments_out_of_range_raise(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{key.removeprefix('rcqr_')}\b.* must be"):
        case_of("Dion").cls([matrix()], **{key: value})


@every_matrix_case
def test_orth_dtype_out_of_range_raises(case: Case) -> None:
    with pytest.raises(ValueError, match=r"orth_dtype\b.* must be"):
        case.new([matrix()], orth_dtype="int8")


@every_case
@pytest.mark.parametrize("value", [0.5, "float33", torch.int8], ids=str)
def test_state_dtype_of_a_wrong_kind_raises(case: Case, value: object) -> None:
    with pytest.raises((TypeError, ValueError), match="state_dtype"):
        case.new([matrix()], state_dtype=value)


@pytest.mark.parametrize("case", [case for case in CASES if case.has_betas], ids=str)
def test_betas_of_a_group_are_honoured_and_mirrored(case: Case) -> None:
    betas = case.other["betas"]
    keys = {"algorithm": "adamw"} if case.is_matrix else {}
    optimizer = case.new([{"params": [matrix()], "betas": betas, **keys}])
    assert tuple(optimizer.param_groups[0]["betas"]) == betas
    if case.is_matrix:
        assert (optimizer.param_groups[0]["beta1"], optimizer.param_groups[0]["beta2"]) == betas
        named = case.new([{"params": [matrix()], "beta1": 0.5, "beta2": 0.75, **keys}])
        assert tuple(named.param_groups[0]["betas"]) == (0.5, 0.75)
        # Where the first has no other use it shows the momentum factor.
        own = case.new([{"params": [matrix()], "betas": betas}]).param_groups[0]
        factor = own[MOMENTUM_FACTORS[case.algorithm]]
        assert tuple(own["betas"]) == (own["beta1"], own["beta2"]) == (factor, betas[1])
