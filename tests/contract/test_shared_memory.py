"""Parameters that share memory: what a step writes must be apart, what it reads need not."""

import pytest
import torch
from torch.nn import Parameter

import oxidion


def with_gradient(x: torch.Tensor, grad: torch.Tensor | None = None) -> Parameter:
    param = Parameter(x)
    param.grad = torch.ones_like(x) if grad is None else grad
    return param


def test_parameters_that_share_memory_are_refused_with_both_names() -> None:
    room = torch.zeros(64)
    params = [with_gradient(room[:40]), with_gradient(room[32:])]
    with pytest.raises(oxidion.LayoutError, match=r"parameter 0.*parameter 1.*\.clone\(\)") as said:
        oxidion.AdamW(params).step()
    assert isinstance(said.value, ValueError)
    assert not room.any()


def test_parameters_side_by_side_in_one_tensor_are_stepped() -> None:
    room = torch.zeros(64)
    oxidion.Lion([with_gradient(room[:32]), with_gradient(room[32:])], lr=1.0).step()
    assert room.eq(-1).all()


def test_parameters_interleaved_in_one_tensor_are_stepped() -> None:
    room = torch.zeros(8, 8)
    oxidion.Lion([with_gradient(room[:, :4]), with_gradient(room[:, 4:])], lr=1.0).step()
    assert room.eq(-1).all()


def test_empty_parameters_share_nothing() -> None:
    params = [with_gradient(torch.zeros(0, 4)), with_gradient(torch.zeros(0)), with_gradient(torch.zeros(4))]
    oxidion.Lion(params, lr=1.0).step()
    assert params[-1].eq(-1).all()


def test_gradients_may_share_memory() -> None:
    grad = torch.ones(8, 8)
    params = [with_gradient(torch.zeros(8, 8), grad) for _ in range(2)]
    oxidion.Lion(params, lr=1.0).step()
    assert all(param.eq(-1).all() for param in params)


def test_gradient_in_its_own_parameter_is_read_as_it_was() -> None:
    own, other = Parameter(torch.ones(8)), with_gradient(torch.ones(8), torch.ones(8))
    own.grad = own.data
    for param in (own, other):
        oxidion.AdamW([param], lr=0.5).step()
    assert own.equal(other)
