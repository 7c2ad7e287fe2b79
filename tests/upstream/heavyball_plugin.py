"""pytest plugin: HomebrewML/HeavyBall's tests over the classes of this package, on a CPU.

Its names of optimizers become those of this package. What its tests put on a CUDA device stays on the CPU,
and ``lightbench.utils.get_optim``, which they import, hands a class the arguments that it has.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

import oxidion
from conformance.arguments import LEAST, OWN
from upstream.skips import unskip

BIASES = {"strict": False}


class _OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on a CUDA device."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _lenient(cls: Any) -> type[Optimizer]:
    """A class like another one, with the arguments that every parameter of a model needs."""
    least = LEAST.get(cls.__name__, BIASES)

    @functools.wraps(cls.__init__)
    def __init__(self: Any, params: Any, **kwargs: Any) -> None:
        kwargs.pop("warmup_steps", None)
        cls.__init__(self, params, **{**least, **kwargs})

    return type(cls.__name__, (cls,), {"__init__": __init__})


def _get_optim(cls: Any, params: Any, **kwargs: Any) -> Optimizer:
    """The optimizer of a class, with what it knows of some arguments."""
    known = inspect.signature(cls).parameters
    made: Optimizer = cls(params, **{key: value for key, value in kwargs.items() if key in known})
    return made


def install() -> None:
    """Replaces the package's own classes, before a module of tests reads their names."""
    heavyball: Any = importlib.import_module("heavyball")
    tables: Any = importlib.import_module("utils")  # of its tests, which makes all of its own optimizers
    tables.REPRESENTATIVE_OPTS = list(OWN)
    heavyball.__all__ = list(OWN)
    vars(heavyball).update({name: _lenient(getattr(oxidion, name)) for name in OWN})
    helpers: Any = ModuleType("lightbench.utils")
    helpers.get_optim = _get_optim
    sys.modules.update({"lightbench": ModuleType("lightbench"), helpers.__name__: helpers})
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    _OnCpu().__enter__()


def pytest_configure() -> None:
    """Before anything is collected."""
    install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs on the CPU what asks for a CUDA device only because its package compiles for one."""
    unskip(items, "CUDA is required")
