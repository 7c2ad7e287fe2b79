"""States of parameters in pinned memory, which a machine without a device lacks: what is asked for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion._core import reserve, state

MAKES: dict[str, Any] = {
    "AdamW": lambda params: oxidion.AdamW(params),
    "Muon": lambda params: oxidion.Muon(params),
    "Dion": lambda params: oxidion.Dion(params, rank_fraction=0.5),
    "8-bit": lambda params: oxidion.AdamW(params, state_bits=8),
}
every_class = pytest.mark.parametrize("name", MAKES)
SHAPE = (64, 128)


class Memory:
    """Pinned memory that is not there: tensors that count as pinned, and what was asked for.

    Attributes:
        locked: addresses of storages that count as pinned.
        asked: bytes of the tensors that were asked for.
    """

    def __init__(self) -> None:
        self.locked: set[int] = set()
        self.kept: list[Tensor] = []
        self.asked: list[int] = []

    def lock(self, tensor: Tensor) -> Tensor:
        """Has a tensor count as pinned."""
        self.kept.append(tensor)
        self.locked.add(tensor.untyped_storage().data_ptr())
        return tensor

    def is_locked(self, tensor: Tensor) -> bool:
        """Whether a tensor counts as pinned."""
        return tensor.untyped_storage().data_ptr() in self.locked

    def empty(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """A tensor that counts as pinned."""
        made = torch.full(tuple(shape), 77, dtype=dtype)
        self.asked.append(made.nbytes)
        return self.lock(made)


@pytest.fixture
def memory() -> Iterator[Memory]:
    reserve._say_pageable.cache_clear()
    found = Memory()
    with mock.patch.object(Tensor, "is_pinned", lambda own: found.is_locked(own)):
        yield found
    reserve._say_pageable.cache_clear()


def made(memory: Memory, name: str) -> tuple[nn.Parameter, Any]:
    """A parameter that counts as pinned with a gradient, and its optimizer."""
    param = nn.Parameter(memory.lock(torch.linspace(-1, 1, SHAPE[0] * SHAPE[1]).view(SHAPE)))
    param.grad = torch.linspace(1, -1, SHAPE[0] * SHAPE[1]).view(SHAPE).cos()
    return param, MAKES[name]([param])


def plain(name: str, steps: int) -> Tensor:
    """The parameter after steps in pageable memory."""
    param = nn.Parameter(torch.linspace(-1, 1, SHAPE[0] * SHAPE[1]).view(SHAPE))
    param.grad = torch.linspace(1, -1, SHAPE[0] * SHAPE[1]).view(SHAPE).cos()
    optimizer = MAKES[name]([param])
    for _ in range(steps):
        optimizer.step()
    return param.detach()


def held(optimizer: Any) -> list[Tensor]:
    """States but counters."""
    return [value for own in optimizer.state.values() for value in own.values() if value.ndim]


@every_class
def test_states_are_pinned_as_the_parameter_is_even_after_a_load(memory: Memory, name: str) -> None:
    with (
        mock.patch.object(reserve, "empty_pinned", memory.empty),
        mock.patch.object(state, "empty_pinned", memory.empty),
    ):
        param, optimizer = made(memory, name)
        optimizer.step()
        states = held(optimizer)
        assert states
        assert all(map(memory.is_locked, states))
        assert sorted(memory.asked) == sorted(value.nbytes for value in states)
        optimizer.load_state_dict(optimizer.state_dict())
        assert all(map(memory.is_locked, held(optimizer)))
        assert not {value.data_ptr() for value in states} & {value.data_ptr() for value in held(optimizer)}
        optimizer.step()
    assert torch.equal(param.detach(), plain(name, 2))


@every_class
def test_states_of_pageable_parameters_are_not_pinned(memory: Memory, name: str) -> None:
    with mock.patch.object(reserve, "empty_pinned", memory.empty):
        plain(name, 1)
    assert memory.asked == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinned memory is there")
@every_class
def test_pageable_memory_takes_its_place_with_one_warning(memory: Memory, name: str) -> None:
    param, optimizer = made(memory, name)
    with pytest.warns(UserWarning, match="states of parameters in pinned memory are in pageable") as caught:
        optimizer.step()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    assert not any(map(memory.is_locked, held(optimizer)))
    assert torch.equal(param.detach(), plain(name, 2))


def test_memory_of_pinned_states_is_not_asked_for_ahead(memory: Memory) -> None:
    wanted: list[list[Any]] = []
    with mock.patch.object(state, "Reserve", lambda sizes: wanted.append(list(sizes))):
        for lock in (False, True):
            param = torch.zeros(1024, 1024)
            oxidion.AdamW([nn.Parameter(memory.lock(param) if lock else param)])
    pageable, pinned = wanted
    assert [shape for shape, _ in pageable[1:]].count((1024, 1024)) == 2
    assert pinned == pageable[:1]
