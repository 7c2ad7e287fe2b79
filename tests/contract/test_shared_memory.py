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


def averages(params: list[Parameter], optimizer: oxidion.AdamW) -> list[torch.Tensor]:
    """The first moments, which tell what gradients were read."""
    return [optimizer.state[param]["exp_avg"].clone() for param in params]


@pytest.mark.parametrize("late", [False, True])
def test_gradient_in_another_parameter_is_read_as_it_was(late: bool) -> None:
    params = [with_gradient(torch.full((8,), value), torch.zeros(8)) for value in (1.0, 3.0)]
    optimizer = oxidion.AdamW(params, lr=0.5, betas=(0.9, 0.95), weight_decay=0.0)
    if late:  # all memory was looked at in a step before
        optimizer.step()
    for param, other in zip(params, reversed(params), strict=True):
        param.grad = other.data
    optimizer.step()
    for average, value in zip(averages(params, optimizer), (3.0, 1.0), strict=True):
        torch.testing.assert_close(average, torch.full((8,), 0.1 * value))


def test_gradient_that_moves_into_a_state_is_read_as_it_was() -> None:
    params = [with_gradient(torch.ones(8), torch.full((8,), value)) for value in (1.0, 2.0)]
    optimizer = oxidion.AdamW(params, lr=0.5, betas=(0.9, 0.95))
    optimizer.step()
    params[1].grad = optimizer.state[params[0]]["exp_avg"]  # 0.1, and 0.19 after this step
    optimizer.step()
    torch.testing.assert_close(averages(params, optimizer)[1], torch.full((8,), 0.9 * 0.2 + 0.1 * 0.1))


def test_parameters_that_come_to_share_memory_are_refused_and_stay() -> None:
    params = [with_gradient(torch.ones(8)), with_gradient(torch.zeros(8))]
    optimizer = oxidion.Lion(params, lr=1.0)
    optimizer.step()
    params[1].data = params[0].data
    before = params[0].detach().clone()
    with pytest.raises(oxidion.LayoutError, match=r"parameter 0.*parameter 1"):
        optimizer.step()
    assert params[0].equal(before)
    params[1].data = torch.zeros(8)
    optimizer.step()
    assert params[1].eq(-1).all()
