"""Tensors that are replaced between steps: the next step acts on what is there, or says what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion

COUNT, WIDTH = 20, 8


class Tagged(Tensor):
    """A subclass with a dispatch of its own."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = torch.utils._pytree.tree_map_only(cls, lambda x: x.as_subclass(Tensor), (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def problem(optimizer: str) -> tuple[list[nn.Parameter], oxidion.OxOptimizer]:
    """Parameters with gradients, and an optimizer that has taken two steps."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(WIDTH, generator=generator)) for _ in range(COUNT)]
    for param in params:
        param.grad = torch.randn(WIDTH, generator=generator)
    built = getattr(oxidion, optimizer)(params, lr=0.1)
    built.step()
    built.step()
    return params, built


def another(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().mul_(2)


def swap_data(params: list[nn.Parameter], _optimizer: oxidion.OxOptimizer) -> None:
    params[3].data = another(params[3])


def swap_gradient(params: list[nn.Parameter], _optimizer: oxidion.OxOptimizer) -> None:
    assert params[3].grad is not None
    params[3].grad = another(params[3].grad)


def swap_gradient_data(params: list[nn.Parameter], _optimizer: oxidion.OxOptimizer) -> None:
    assert params[3].grad is not None
    params[3].grad.data = another(params[3].grad)


def stride_gradient(params: list[nn.Parameter], _optimizer: oxidion.OxOptimizer) -> None:
    assert params[3].grad is not None
    params[3].grad = torch.stack([params[3].grad * 3, params[3].grad], dim=1)[:, 0]


def stride_data(params: list[nn.Parameter], _optimizer: oxidion.OxOptimizer) -> None:
    params[3].data = torch.stack([params[3].detach() * 3, params[3].detach()], dim=1)[:, 0]


def delete_gradients(params: list[nn.Parameter], _optimizer: oxidion.OxOptimizer) -> None:
    for param in params[::2]:
        param.grad = None


def swap_state_data(params: list[nn.Parameter], optimizer: oxidion.OxOptimizer) -> None:
    for value in optimizer.state[params[3]].values():
        value.data = another(value)


def swap_state(params: list[nn.Parameter], optimizer: oxidion.OxOptimizer) -> None:
    own = optimizer.state[params[3]]
    for key in list(own):
        own[key] = another(own[key])


def move_storage(params: list[nn.Parameter], optimizer: oxidion.OxOptimizer) -> None:
    for tensor in [params[3], *optimizer.state[params[3]].values()]:
        storage, kept = tensor.untyped_storage(), tensor.detach().clone()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size + 4096)
        with torch.no_grad():
            tensor.copy_(kept)


CHANGES = [
    swap_data, swap_gradient, swap_gradient_data, stride_gradient, stride_data, delete_gradients,
    swap_state_data, swap_state, move_storage,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_step_after_a_change_equals_that_of_a_fresh_optimizer(
    name: str, change: Callable[[list[nn.Parameter], oxidion.OxOptimizer], None]
) -> None:
    params, optimizer = problem(name)
    change(params, optimizer)
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    fresh = getattr(oxidion, name)(twins, lr=0.1)
    fresh.load_state_dict(optimizer.state_dict())
    for param, twin in zip(params, twins, strict=True):
        twin.grad = None if param.grad is None else param.grad.clone()
    for _ in range(2):
        optimizer.step()
        fresh.step()
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param, twin)
        for key, value in optimizer.state[param].items():
            assert torch.equal(value, fresh.state[twin][key])


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda grad: grad.double(), TypeError),
        (lambda grad: grad.to_sparse(), TypeError),
        (lambda grad: grad.as_subclass(Tagged), TypeError),
        (lambda grad: torch.zeros(WIDTH, 1), ValueError),
    ],
    ids=["dtype", "sparse", "subclass", "shape"],
)
def test_wrong_gradient_after_good_ones_is_refused_unwritten(
    wrong: Callable[[Tensor], Tensor], error: type[Exception]
) -> None:
    params, optimizer = problem("AdamW")
    good = params[15].grad
    assert good is not None
    before = [param.detach().clone() for param in params]
    bad = wrong(good)
    if bad.shape == good.shape and bad.dtype == good.dtype:
        params[15].grad = bad
    else:
        good.data = bad
    with pytest.raises(error):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    params[15].grad = torch.ones(WIDTH)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(params, before, strict=True))


@pytest.mark.parametrize("with_gradient", [True, False])
def test_step_counts_one_change_of_each_tensor_that_it_writes(*, with_gradient: bool) -> None:
    params, optimizer = problem("AdamW")
    if not with_gradient:
        params[4].grad = None
    tensors = [params[4], *optimizer.state[params[4]].values()]
    before = [tensor._version for tensor in tensors]
    optimizer.step()
    assert [tensor._version - b for tensor, b in zip(tensors, before, strict=True)] == [with_gradient] * 4


def test_gradient_freed_by_the_step_itself_is_not_kept() -> None:
    params, optimizer = problem("AdamW")
    grad = params[0].grad
    assert grad is not None
    optimizer.step()
    uses = grad._use_count()
    optimizer.step()
    assert grad._use_count() == uses == 2  # this frame's and the parameter's
