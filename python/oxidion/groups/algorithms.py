"""Names of algorithms: what users write for them, and what stands for the rest of a model."""

from __future__ import annotations

import inspect
import re
from typing import Any

from oxidion import optim
from oxidion._core import schema
from oxidion._core.base import OxOptimizer
from oxidion._core.constructor import nearest

MATRIX, SCALAR = "matrix", "scalar"
"""Algorithms of groups that were made without naming one: the class's, and the one for the rest."""

VIEWS = {"flatten", "num_heads", "split_sizes", "split_dim", "fan_in_fan_out"}
"""Group keys that say how a parameter is read as matrices, which other algorithms do not read."""


def _plain(word: str) -> str:
    return re.sub(r"[\s_-]", "", word).lower()


def _classes() -> dict[str, type[OxOptimizer]]:
    """Classes by their name and by that of their algorithm, without underscores and in lower case."""
    own = {_plain(name): cls for name, cls in OxOptimizer._registry.items()}
    named = ((name, getattr(optim, name)) for name in optim.__all__)
    return own | {_plain(name): cls for name, cls in named if _is_optimizer(cls)}


def _is_optimizer(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, OxOptimizer) and hasattr(value, "_ALGORITHM")


def find(given: object) -> type[OxOptimizer] | None:
    """The class of an algorithm that is given as such, by its name or by the algorithm's; None: no such."""
    if isinstance(given, str):
        return _classes().get(_plain(given))
    return given if _is_optimizer(given) else None  # type: ignore[return-value]


def wanted(given: object, argument: str) -> type[OxOptimizer]:
    """The class of an algorithm.

    Args:
        given: a class, its name, or the name of its algorithm, in upper or lower case.
        argument: what an error calls it.

    Raises:
        ValueError: for a name that is none.
        TypeError: for anything else.
    """
    cls = find(given)
    if cls is not None:
        return cls
    if not isinstance(given, str):
        shown = f"the class {given.__module__}.{given.__name__}" if isinstance(given, type) else repr(given)
        raise TypeError(f"{argument} must be a class of oxidion or the name of an algorithm, got {shown}")
    names = sorted(OxOptimizer._registry)
    near = nearest(given.lower(), names)
    raise ValueError(
        f"{argument} must be one of {', '.join(names)}, got {given!r}"
        + ("" if near is None else f"; the nearest is {near!r}")
    )


def preset(cls: type[OxOptimizer]) -> dict[str, Any]:
    """The group keys of a class that steps by the algorithm of another one with defaults of its own."""
    made = OxOptimizer._registry[cls._ALGORITHM]
    if cls is made:
        return {}
    own, usual = inspect.signature(cls).parameters, inspect.signature(made).parameters
    keys = [key for key in own if key in usual and key in {*schema.COMMON, *cls._SCHEMA}]
    return {key: own[key].default for key in keys if own[key].default != usual[key].default}


def beside(cls: type[OxOptimizer]) -> str:
    """The algorithm for what is no matrix: AdamW beside a class for matrices, else the class's own."""
    return "adamw" if cls._MATRIX else cls._ALGORITHM


def name_in(group: dict[str, Any], cls: type[OxOptimizer]) -> None:
    """Replaces what a group of a class has as its algorithm by the algorithm's name, in place.

    A word that nothing is known by stays as it is.
    """
    given = group.get("algorithm", cls._ALGORITHM)
    if given == MATRIX:
        group["algorithm"] = cls._ALGORITHM
        for key in VIEWS - cls._SCHEMA.keys():
            group.pop(key, None)
    elif given == SCALAR:
        group["algorithm"] = beside(cls)
    elif (found := find(given)) is not None:
        group["algorithm"] = found._ALGORITHM
        if given != found._ALGORITHM and found is not cls:
            for key, value in preset(found).items():
                group.setdefault(key, value)
