"""Table rows of classes without handwritten ones: every key of their schema at some values."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from oxidion import optim
from oxidion._core.base import OxOptimizer
from oxidion._core.validate import Field
from oxidion._reference.registry import REFERENCE

RATES = (0.5, 0.75, 0.875)
#: Values that some kinds of keys refuse.
SUSPECTS = (-0.125, math.nan, math.inf, 0, -1, 1.5, "no such word")


def idle(cls: type[OxOptimizer]) -> int:
    """The number of first gradients that leave a parameter where it is, by the naive step."""
    group = {**cls([nn.Parameter(torch.ones(4))]).param_groups[0], "weight_decay": 0.0}
    param, state = torch.ones(4, dtype=torch.float64), dict[str, Tensor]()
    for count in range(4):
        REFERENCE[cls._ALGORITHM](param, torch.ones_like(param), state, group)
        if not torch.equal(param, torch.ones_like(param)):
            return count
    raise AssertionError(f"{cls.__name__} does not move")


def classes_without(algorithms: Collection[str]) -> list[type[OxOptimizer]]:
    """Exported classes for parameters of any shape, of other algorithms than these."""
    exported = [getattr(optim, name) for name in optim.__all__]
    return [
        cls
        for cls in exported
        if isinstance(cls, type)
        and issubclass(cls, OxOptimizer)
        and cls._ALGORITHM not in algorithms
        and not cls._MATRIX
    ]


def samples(field: Field) -> tuple[Any, ...]:
    """Legal values of a key, other than its default."""
    default = field.default
    if field.wanted == "True or False":
        found: tuple[Any, ...] = (not default,)
    elif field.wanted.startswith("one of "):
        words = ast.literal_eval(f"({field.wanted.removeprefix('one of ')},)")
        found = tuple(word for word in words if word != default)
    elif isinstance(default, tuple):
        found = (RATES[: len(default)],)
    elif "integer" in field.wanted:
        found = (3, 1000)
    else:
        found = tuple(value for value in (0.25, 2.0) if field.check(value))[:1]
    assert found, field
    assert all(field.check(value) for value in found), field
    return found


def refused(field: Field) -> tuple[Any, ...]:
    """Values that a key must not have."""
    if field.wanted == "True or False":
        return ()
    if isinstance(field.default, tuple):
        good = RATES[: len(field.default)]
        return (good[:-1], (-0.1, *good[1:]), (*good[:-1], math.nan), (*good[:-1], 1.0))
    return tuple(value for value in SUSPECTS if not field.check(value))


def settings(cls: type[OxOptimizer]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arguments of a class other than its defaults: every key of its own at each sample, with a name."""
    for key, field in cls._SCHEMA.items():
        for number, value in enumerate(samples(field)):
            yield f"{key}{number or ''}", {key: value}


def live(cls: type[OxOptimizer]) -> dict[str, Any]:
    """Another value of every number of a class's own."""
    return {
        key: samples(field)[-1]
        for key, field in cls._SCHEMA.items()
        if field.wanted != "True or False" and not field.wanted.startswith("one of ")
    }


def bad(cls: type[OxOptimizer]) -> tuple[tuple[str, Any], ...]:
    """Keys of a class's own with values that are refused."""
    return tuple((key, value) for key, field in cls._SCHEMA.items() for value in refused(field))


def arguments(cls: type[OxOptimizer], kind: Any) -> dict[str, Any]:
    """Names and defaults of the arguments of a constructor that are of a kind, without ``params``."""
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is kind and p.name != "params"}


def counts_steps(cls: type[OxOptimizer]) -> bool:
    """Whether a class says that it keeps the number of steps."""
    return bool(re.search(r"^ *State:[^.]*``step``", cls.__doc__ or "", re.MULTILINE))
