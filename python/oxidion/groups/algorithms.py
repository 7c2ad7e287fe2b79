"""Names of algorithms: what users write for them, and what stands for the rest of a model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from oxidion import optim
from oxidion._core import schema, validate
from oxidion._core.base import OxOptimizer
from oxidion._core.constructor import nearest

MATRICES, OTHERS = "matrix", "scalar"
"""Words for the algorithms of groups that were made without naming one: the class's, and that of the rest."""


class Deferred(str):
    """The algorithm of a group that depends on the class which takes the group.

    Other optimizers save the groups that they were given: it is pickled as a word alone, which
    ``torch.load(weights_only=True)`` accepts.
    """

    shown: Mapping[str, Any]
    """The keys of the group until then. What differs from them was written by the user, and stays."""
    resolve: Callable[[type[OxOptimizer], Any], dict[str, Any]]
    """Gives the keys for a class and its learning rate."""

    @classmethod
    def of(
        cls, word: str, shown: Mapping[str, Any], resolve: Callable[[type[OxOptimizer], Any], dict[str, Any]]
    ) -> Deferred:
        """A word that stands for an algorithm, and how it is found."""
        made = cls(word)
        made.shown, made.resolve = shown, resolve
        return made

    def __reduce__(self) -> tuple[type[Deferred], tuple[str]]:
        """The word alone."""
        return Deferred, (str(self),)

    def __copy__(self) -> Deferred:
        """Itself: nothing writes into it."""
        return self

    def __deepcopy__(self, _memo: object) -> Deferred:
        """Itself: nothing writes into it."""
        return self

    def resolved(self, group: Mapping[str, Any], cls: type[OxOptimizer], lr: Any) -> dict[str, Any]:
        """The group as it is for a class with a learning rate."""
        own = {key: value for key, value in group.items() if key != "algorithm"}
        written = {
            key: value
            for key, value in own.items()
            if key not in self.shown or not validate.is_same(value, self.shown[key])
        }
        made = self.resolve(cls, lr)
        return {key: made[key] for key in made if key not in self.shown or key in own} | written


torch.serialization.add_safe_globals([Deferred])


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
    """The class of this package that is given as such, by its name or by its algorithm's; None: no such.

    Of a class that inherits from one of this package it is that one.
    """
    if isinstance(given, str):
        return OxOptimizer._registry.get(given) or _classes().get(_plain(given))
    return public(given) if _is_optimizer(given) else None  # type: ignore[arg-type]


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
    """The group keys of a class that steps by the algorithm of another one with defaults of its own.

    The learning rate is no such key: it is that of the class which takes the group, as of any algorithm.
    """
    made = OxOptimizer._registry[cls._ALGORITHM]
    if cls is made:
        return {}
    own, usual = inspect.signature(cls).parameters, inspect.signature(made).parameters
    read = {*schema.COMMON, *cls._SCHEMA} - {"lr"}
    keys = [key for key in own if key in usual and key in read]
    return {key: own[key].default for key in keys if own[key].default != usual[key].default}


def public(cls: type[OxOptimizer]) -> type[OxOptimizer]:
    """Returns the class of this package that a class is or inherits."""
    own = set(_classes().values())
    return next(base for base in cls.__mro__ if base in own)


def word(cls: type[OxOptimizer]) -> str:
    """The name of a class's algorithm; of a class with other defaults for that of another, its own name."""
    return cls._ALGORITHM if cls is OxOptimizer._registry[cls._ALGORITHM] else cls.__name__


def scalar_default(cls: type[OxOptimizer]) -> str:
    """Returns the algorithm of non-matrix parameters: AdamW for a class of matrices, else the class's own."""
    return "adamw" if cls._MATRIX else cls._ALGORITHM


def name_in(group: dict[str, Any], cls: type[OxOptimizer], lr: Any) -> None:
    """Replaces what a group has as its algorithm by the algorithm's name, in place.

    Unknown names are left unchanged.

    Args:
        group: whose algorithm may be a class, its name, or `Deferred`.
        cls: the class that takes it.
        lr: the learning rate of the class.

    Raises:
        TypeError: for an algorithm that is neither a class of this package nor a name.
        ValueError: for a class with other defaults in a group that is complete.
    """
    given = group.get("algorithm", cls._ALGORITHM)
    if isinstance(given, Deferred) and hasattr(given, "resolve"):
        made = given.resolved(group, public(cls), lr)
        group.clear()
        group.update(made)
        given = group["algorithm"]
    elif given in (MATRICES, OTHERS):
        raise ValueError(
            f"algorithm={given!r} stood for that of the class which takes the groups, and became mere text, "
            "as by pickle: name the algorithm, param_groups(model, algorithm=...)"
        )
    found = find(given) if isinstance(given, str) else wanted(given, "algorithm")
    if found is None:
        return
    if not issubclass(cls, found) and (keys := preset(found)):
        if "seed_by" in group:
            raise ValueError(
                f"algorithm cannot become {found.__name__} in a group that is there already: "
                f"{found.__name__} is {found._ALGORITHM!r} with other defaults. Write the keys: "
                + ", ".join(f"{key}={value!r}" for key, value in keys.items())
            )
        for key, value in keys.items():
            group.setdefault(key, value)
    group["algorithm"] = found._ALGORITHM
