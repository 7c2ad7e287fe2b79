"""Construction, groups and repr (contract.md 4.1)."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import oxidion

from .snapshot import params_of
from .table import CASES, MATRIX_CASES, Case, every_case, make_model, optimizer_classes, set_grads


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 3))


def test_table_covers_every_exported_optimizer_class() -> None:
    exported = set(optimizer_classes(oxidion))
    listed = [case.cls for case in CASES]
    assert exported, "oxidion exports no optimizer class"
    assert len(listed) == len(set(listed))
    assert exported - {Optimizer} == set(listed)


@every_case
def test_signature_is_the_documented_one(case: Case) -> None:
    parameters = list(inspect.signature(case.cls).parameters.values())
    assert parameters[0].name == "params"
    positional = [p for p in parameters[1:] if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert tuple((p.name, p.default) for p in positional) == case.positional
    keyword_only = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert {p.name for p in keyword_only} == case.keyword_only
    assert all(p.default is not inspect.Parameter.empty for p in keyword_only)


@every_case
def test_class_is_a_plain_python_optimizer_subclass(case: Case) -> None:
    assert issubclass(case.cls, Optimizer)
    assert inspect.isfunction(case.cls.step), "step must be a Python function on the class"
    mixin = type("Mixin", (), {})
    assert issubclass(type("Derived", (mixin, case.cls), {}), case.cls)


@every_case
@pytest.mark.parametrize(
    "form", ["list", "tuple", "generator", "dicts", "named", "named_generator", "dict_of_generator"]
)
def test_params_of_any_iterable_form_are_taken_in_order(case: Case, form: str) -> None:
    first, second = matrix(), matrix()
    params: Any = {
        "list": [first, second],
        "tuple": (first, second),
        "generator": (p for p in (first, second)),
        "dicts": [{"params": first}, {"params": [second], "lr": 0.5}],
        "named": [("first", first), ("second", second)],
        "named_generator": (pair for pair in (("first", first), ("second", second))),
        "dict_of_generator": [{"params": (p for p in (first, second))}],
    }[form]
    optimizer = case.new(params)
    held = params_of(optimizer)
    assert len(held) == 2
    assert held[0] is first
    assert held[1] is second
    if form.startswith("named"):
        assert optimizer.param_groups[0]["param_names"] == ["first", "second"]
    else:
        assert "param_names" not in optimizer.param_groups[0]
    if form == "dicts":
        assert [group["lr"] for group in optimizer.param_groups] == [optimizer.defaults["lr"], 0.5]


@every_case
def test_groups_are_filled_with_the_defaults(case: Case) -> None:
    optimizer = case.build(make_model())
    for group in optimizer.param_groups:
        missing = set(optimizer.defaults) - set(group)
        assert not missing
    vectors = case.vector_algorithm if case.is_matrix else case.algorithm
    assert [group["algorithm"] for group in optimizer.param_groups] == [case.algorithm, vectors]


@every_case
def test_empty_parameter_list_raises(case: Case) -> None:
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        case.new([])
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        case.new(p for p in ())


@every_case
def test_empty_group_next_to_a_filled_one_is_legal(case: Case) -> None:
    param = matrix()
    optimizer = case.new([{"params": []}, {"params": [param]}])
    set_grads([param], 0)
    before = param.detach().clone()
    case.step(optimizer)
    assert not torch.equal(param, before)


@every_case
def test_bare_tensor_raises_type_error(case: Case) -> None:
    with pytest.raises(TypeError, match="iterable of Tensors or dicts"):
        case.new(matrix())


@every_case
@pytest.mark.parametrize("wrong", [["weight"], [3.0], [{"params": [None]}], [{"params": {1, 2}}]], ids=str)
def test_params_of_wrong_type_raise_type_error(case: Case, wrong: Any) -> None:
    with pytest.raises(TypeError):
        case.new(wrong)


@every_case
def test_duplicate_in_one_group_warns(case: Case) -> None:
    param = matrix()
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        case.new([param, param])


@every_case
def test_duplicate_across_groups_raises(case: Case) -> None:
    param = matrix()
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        case.new([{"params": param}, {"params": param}])


@every_case
def test_non_leaf_parameter_raises(case: Case) -> None:
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        case.new([matrix() * 2])


@every_case
def test_named_and_unnamed_mixed_in_one_group_raises(case: Case) -> None:
    with pytest.raises(ValueError, match="all optimizer params should be with/without names"):
        case.new([("first", matrix()), matrix()])


@every_case
def test_named_and_unnamed_groups_raise(case: Case) -> None:
    with pytest.raises(
        ValueError, match="cannot add param group with names to the optimizer, whose groups have none"
    ):
        case.new([{"params": [matrix()]}, {"params": [("second", matrix())]}])


@every_case
def test_repr_lists_groups_without_parameters(case: Case) -> None:
    param = nn.Parameter(torch.full((40, 30), 123.5))
    optimizer = case.new([{"params": [param]}, {"params": [matrix()], "lr": 0.125}])
    text = repr(optimizer)
    first, *groups, last = text.splitlines()
    assert (first, last) == (f"{case} (", ")")
    assert [line.split("  ")[0] for line in groups] == ["Parameter Group 0", "Parameter Group 1"]
    assert "elements: 1200  lr: " in groups[0]
    assert "lr: 0.125" in groups[1]
    assert "123.5" not in text
    assert max(map(len, groups)) < 200


@every_case
def test_foreach_together_with_fused_raises(case: Case) -> None:
    parameters = inspect.signature(case.cls).parameters
    if "fused" not in parameters:
        with pytest.raises(TypeError, match="fused"):
            case.new([matrix()], fused=True)
        return
    with pytest.raises(RuntimeError, match=r"fused.*foreach|foreach.*fused"):
        case.new([matrix()], foreach=True, fused=True)


@every_case
def test_differentiable_raises(case: Case) -> None:
    with pytest.raises(RuntimeError, match="differentiable"):
        case.new([matrix()], differentiable=True)


@every_case
def test_unknown_constructor_argument_raises(case: Case) -> None:
    with pytest.raises(TypeError, match="learning_rate"):
        case.new([matrix()], learning_rate=0.1)


@every_case
def test_requires_grad_false_parameters_are_accepted_unchanged(case: Case) -> None:
    frozen = nn.Parameter(torch.randn(4, 3), requires_grad=False)
    live = matrix()
    before = frozen.detach().clone()
    optimizer = case.new([frozen, live], weight_decay=0.5)
    set_grads([live], 0)
    optimizer.step()
    assert torch.equal(frozen, before)
    assert not optimizer.state.get(frozen)


def test_matrix_cases_are_not_empty() -> None:
    assert len(MATRIX_CASES) >= 2


@every_case
def test_construction_of_legal_groups_warns_nothing(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case.build(make_model())
        case.build(make_model(), named=True)
