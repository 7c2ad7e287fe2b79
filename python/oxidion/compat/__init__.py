"""Other packages' names for what this one has: one module for each of them, imported when it is asked for."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["axolotl", "colossalai", "dion", "hf", "megatron", "titan", "torch"]


def __getattr__(name: str) -> ModuleType:
    """A module of this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    """The modules, which editors and shells complete."""
    return __all__
