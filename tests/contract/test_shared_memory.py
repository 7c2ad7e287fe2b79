"""Parameters that share memory: what a step writes must not alias, what it reads may."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import oxidion


def with_gradient(x: torch.Tensor, grad: torch.Tensor | None = None) -> Parameter:
    param = Parameter(x)
    param.grad = torch.ones_like(x) if grad is None else grad
    return param


def test_parameters_sharing_memory_are_refused_with_both_names() -> None:
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


def test_weights_that_come_to_share_memory_are_refused_unchanged() -> None:
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


VIEWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "transposed": (lambda room: room, lambda room: room.t()),
    "columns of all": (lambda room: room, lambda room: room[:, :4]),
    "every second row": (lambda room: room, lambda room: room[::2]),
    "columns that overlap": (lambda room: room[:, :5], lambda room: room[:, 4:]),
    "columns and rows": (lambda room: room[:, 2:4], lambda room: room[3:5]),
    "columns around the end": (lambda room: room[1:, 7:], lambda room: room[:, 6:]),
    "diagonal and all": (lambda room: room.diagonal(), lambda room: room),
    "diagonal and column": (lambda room: room.diagonal(), lambda room: room[:, 3]),
    "both transposed": (lambda room: room.t()[1:], lambda room: room.t()[:2]),
    "blocks": (lambda room: room[:4, :4], lambda room: room[3:, 3:]),
    "every second and third": (lambda room: room.view(-1)[::2], lambda room: room.view(-1)[::3]),
    "another shape": (lambda room: room.view(4, 16)[:, :9], lambda room: room.t()),
}
DISJOINT: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "columns": (lambda room: room[:, :4], lambda room: room[:, 4:]),
    "columns, transposed": (lambda room: room[:, :3].t(), lambda room: room[:, 3:].t()),
    "rows": (lambda room: room[::2], lambda room: room[1::2]),
    "blocks": (lambda room: room[:4, 4:], lambda room: room[4:, :4]),
    "blocks side by side": (lambda room: room[:, 2:4], lambda room: room[:5, 4:6]),
    "diagonal and triangle": (lambda room: room.diagonal(), lambda room: room.view(-1)[1::9]),
    "odd and even": (lambda room: room.view(-1)[::2], lambda room: room.view(-1)[1::4]),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_tied_views_are_refused_with_both_names(name: str, late: bool) -> None:
    room = torch.zeros(8, 8)
    views = [view(room) for view in VIEWS[name]]
    params = [
        with_gradient(torch.zeros_like(view) if late else view, torch.ones_like(view)) for view in views
    ]
    optimizer = None
    if late:
        optimizer = oxidion.AdamW(params)
        optimizer.step()
        for param, view in zip(params, views, strict=True):
            param.data = view
    optimizer = optimizer or oxidion.AdamW(params)
    for _ in range(2):  # also where the error was caught
        with pytest.raises(oxidion.LayoutError, match=r"parameter 0.*parameter 1"):
            optimizer.step()
    assert not room.any()


@pytest.mark.parametrize(
    "before", [lambda room: room[:16].view(4, 4), lambda room: room.view(8, 8)[:4, :2].t()]
)
def test_view_that_grows_into_another_from_its_start_is_refused(before: Any) -> None:
    room = torch.zeros(64)
    other = room[18:22].view(2, 2)
    params = [with_gradient(view, torch.ones_like(view)) for view in (before(room), other)]
    optimizer = oxidion.Lion(params, lr=1.0)
    optimizer.step()
    params[0].data = room.as_strided(params[0].shape, (17 if len(params[0]) == 2 else 8, 1))
    with pytest.raises(oxidion.LayoutError, match=r"parameter 0.*parameter 1"):
        optimizer.step()
    assert other.eq(-1).all()


@pytest.mark.parametrize("name", DISJOINT)
def test_views_without_an_element_in_common_are_stepped(name: str) -> None:
    room = torch.zeros(8, 8)
    views = [view(room) for view in DISJOINT[name]]
    optimizer = oxidion.Lion([with_gradient(view, torch.ones_like(view)) for view in views], lr=1.0)
    for _ in range(2):
        optimizer.step()
    assert all(view.eq(-2).all() for view in views)
    assert int(room.sum()) == -2 * sum(view.numel() for view in views)


def test_matrix_weight_tied_to_its_transposed_is_refused() -> None:
    encoder, decoder = torch.nn.Linear(16, 4, bias=False), torch.nn.Linear(4, 16, bias=False)
    decoder.weight.data = encoder.weight.data.t()
    for layer in (encoder, decoder):
        layer.weight.grad = torch.ones_like(layer.weight)
    with pytest.raises(oxidion.LayoutError, match=r"parameter 0.*parameter 1"):
        oxidion.Muon([encoder.weight, decoder.weight]).step()
