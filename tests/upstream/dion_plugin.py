"""pytest plugin: microsoft/dion's tests with the classes of this package, on a machine without a CUDA device.

`dion` is replaced by a package of the same public names, of which Muon, NorMuon, Dion2 and NorDion2 make
their states when they are constructed, as they do there. What is not public cannot be imported.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

import oxidion
from oxidion import graph
from upstream.skips import unskip

EAGER = ("Muon", "NorMuon", "Dion2", "NorDion2")


def _eager(cls: Any) -> type:
    """A class like another one, with states that are made when it is constructed."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **{"init_state": True, **kwargs})

    return type(cls.__name__, (cls,), {"__init__": __init__})


def install() -> None:
    """Puts the package in the place of `dion`."""
    package: Any = ModuleType("dion")
    package.__path__ = []
    classes = {name: _eager(getattr(oxidion, name)) for name in EAGER}
    classes |= {"Dion": oxidion.Dion, "Dion3": classes["NorDion2"]}
    vars(package).update(
        classes,
        DionMixedPrecisionConfig=oxidion.DionMixedPrecisionConfig,
        CudaGraphOptimizer=graph.CudaGraphOptimizer,
    )
    sys.modules["dion"] = package
    for name, cls in classes.items():
        module = ModuleType(f"dion.{name.lower()}")
        setattr(module, name, cls)
        sys.modules[module.__name__] = module
        setattr(package, name.lower(), module)


def pytest_configure() -> None:
    """Before anything is collected."""
    install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs on the CPU what asks for a CUDA device only because its package has no other kernels."""
    unskip(items, "CUDA required")
