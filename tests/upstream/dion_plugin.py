"""pytest plugin: microsoft/dion's tests with the classes of this package, on a machine without a CUDA device.

`dion` is replaced by a package of the same public names, of which Muon, NorMuon, Dion2 and NorDion2 make their
states when they are constructed, as they do there. What has no public counterpart cannot be imported.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType

import pytest

import oxidion

EAGER = ("Muon", "NorMuon", "Dion2", "NorDion2")


def _eager(cls: type) -> type:
    """A class like another one whose ``init_state`` is True by default."""

    class Eager(cls):  # type: ignore[misc]
        @functools.wraps(cls.__init__)
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{"init_state": True, **kwargs})

    Eager.__name__ = Eager.__qualname__ = cls.__name__
    return Eager


def install() -> None:
    """Puts the package in the place of `dion`."""
    package = ModuleType("dion")
    package.__path__ = []
    classes = {name: _eager(getattr(oxidion, name)) for name in EAGER}
    classes |= {"Dion": oxidion.Dion, "Dion3": classes["NorDion2"]}
    names = {**classes, "DionMixedPrecisionConfig": oxidion.DionMixedPrecisionConfig}
    names["CudaGraphOptimizer"] = oxidion.graph.CudaGraphOptimizer
    vars(package).update(names)
    sys.modules["dion"] = package
    for name in classes:
        module = ModuleType(f"dion.{name.lower()}")
        setattr(module, name, classes[name])
        sys.modules[module.__name__] = module
        setattr(package, name.lower(), module)


def pytest_configure() -> None:
    """Before anything is collected."""
    import oxidion.graph  # noqa: F401

    install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs on the CPU what asks for a CUDA device only because its package has no other kernels."""
    for item in items:
        for node in item.listchain():
            node.own_markers = [
                mark
                for mark in node.own_markers
                if not (mark.name == "skipif" and "CUDA" in str(mark.kwargs.get("reason")))
            ]
