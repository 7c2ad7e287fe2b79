"""The table of all optimizer classes that the contract suite runs over; a new class is one more row.

A row says what the constructor looks like, which state each algorithm keeps, which values are refused and
which hyper-parameters must be read again at every step. The values are copied manually from the documents; an
elementwise class without a row gets one by its schema.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oxidion._core.base import OxOptimizer
from oxidion._oxidion import state_names
from support import derived

from .case import MATRIX_ALGORITHMS, STEP_KEYS, Case
from .memory_rows import MEMORY_CASES
from .rows import BAD_LR_AND_DECAY, EXTRA
from .rows import CASES as OTHER_CASES

__all__ = [
    "CASES",
    "ELEMENTWISE_CASES",
    "MATRIX_ALGORITHMS",
    "MATRIX_CASES",
    "STEP_KEYS",
    "Case",
    "case_of",
    "every_case",
    "every_matrix_case",
    "make_model",
    "optimizer_classes",
    "pairs_of",
    "run_steps",
    "set_grads",
]

BY_HAND = (*OTHER_CASES, *MEMORY_CASES)


def _derived(cls: type[OxOptimizer]) -> Case:
    """The row of a class by its schema and signature."""
    keywords = derived.arguments(cls, inspect.Parameter.KEYWORD_ONLY)
    own = keywords.keys() - EXTRA
    assert keywords.keys() >= EXTRA
    assert own <= {"cautious_wd", *cls._SCHEMA}
    states = {*state_names()[cls._ALGORITHM].values(), *({"step"} if derived.counts_steps(cls) else ())}
    return Case(
        cls=cls,
        algorithm=cls._ALGORITHM,
        positional=tuple(derived.arguments(cls, inspect.Parameter.POSITIONAL_OR_KEYWORD).items()),
        keyword_only=frozenset(keywords),
        state={cls._ALGORITHM: frozenset(states)},
        bad=(*BAD_LR_AND_DECAY, *derived.bad(cls)),
        other={"lr": 0.03, "weight_decay": 0.3, **derived.live(cls)},
        idle=derived.idle(cls),
    )


CASES = (*BY_HAND, *map(_derived, derived.classes_without({case.algorithm for case in BY_HAND})))
MATRIX_CASES = tuple(case for case in CASES if case.is_matrix)
ELEMENTWISE_CASES = tuple(case for case in CASES if not case.is_matrix)

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_matrix_case = pytest.mark.parametrize("case", MATRIX_CASES, ids=str)


def case_of(name: str) -> Case:
    """The row of a class, by the name of the class."""
    (case,) = (case for case in CASES if case.cls.__name__ == name)
    return case


def pairs_of(attribute: Callable[[Case], Any]) -> pytest.MarkDecorator:
    """Parametrize a test by every (case, entry) of one attribute of the table."""
    pairs = [(case, *_as_tuple(entry)) for case in CASES for entry in attribute(case)]
    names = ("case", "key", "value")[: len(pairs[0])]
    return pytest.mark.parametrize(names, pairs, ids=["-".join(map(_label, pair)) for pair in pairs])


def optimizer_classes(module: Any) -> Iterator[type[Optimizer]]:
    """Every optimizer class that a module exports, but MuonH: it is Muon with other defaults."""
    for name in module.__all__:
        exported = getattr(module, name)
        is_optimizer = isinstance(exported, type) and issubclass(exported, Optimizer)
        if is_optimizer and "step" in dir(exported) and exported.__name__ != "MuonH":
            yield exported


def _as_tuple(entry: object) -> tuple[object, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


def _label(item: object) -> str:
    return str(item).replace(" ", "")


class Net(nn.Module):
    """A small model: wide, square (twice the same shape) and tall matrices, biases and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.square = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, 6] to [batch, 3]."""
        return self.last(self.norm(torch.tanh(self.again(torch.tanh(self.square(self.first(x)))))))


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> Net:
    """A `Net` with reproducible random values in every parameter, also in those that start constant."""
    generator = torch.Generator().manual_seed(seed)
    model = Net().to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))
    return model


def set_grads(model_or_params: nn.Module | list[Tensor], seed: int, scale: float = 1.0) -> None:
    """Give every parameter a reproducible gradient (the same for equal shapes, seeds and order)."""
    params = model_or_params.parameters() if isinstance(model_or_params, nn.Module) else model_or_params
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator, dtype=torch.float64) * scale).to(
            param.dtype
        )


def run_steps(optimizer: Optimizer, model: nn.Module, seeds: range) -> None:
    """Take one step for every seed, each with the gradients of `set_grads`."""
    for seed in seeds:
        set_grads(model, seed)
        optimizer.step()
