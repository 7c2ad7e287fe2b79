"""Group keys of a parameter: from its kind, the arguments of `param_groups`, and the class that takes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from oxidion._core import group_checks, schema, validate
from oxidion._core.base import OxOptimizer
from oxidion._core.constructor import SCALAR
from oxidion.groups import algorithms
from oxidion.groups.kinds import Kind

Class = type[OxOptimizer]

WHERE = "arguments"
"""Name of the arguments of `param_groups` and of constructors in errors."""


CUTS = frozenset({"flatten", "interleaved", "num_heads", "split_dim", "split_sizes"})
"""Keys that cut a parameter into matrices."""


@dataclass(frozen=True)
class Request:
    """Everything that the group keys of a parameter depend on, except for the class that takes it."""

    is_matrix: bool
    views: Mapping[str, Any]
    """Keys that say how it is read as matrices."""
    part: str
    """The part of the model that has a learning rate of its own; else empty."""
    inputs: int
    """Inputs of an output layer whose rate may depend on them; else 0."""
    override: Mapping[str, Any]
    """The keys that ``overrides`` has for it."""
    handed: Mapping[str, Any]
    """Keys of the group in which it was handed over."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for parameters that go into one group."""
        mappings = (self.views, self.override, self.handed)
        return (self.is_matrix, self.part, self.inputs, *map(identity, mappings))


def identity(keys: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for equal keys and values; tensors are compared by identity."""
    return tuple((k, id(v) if isinstance(v, Tensor) else repr(v)) for k, v in sorted(keys.items()))


@dataclass(frozen=True)
class Settings:
    """The arguments of `param_groups` that give group keys."""

    scalar: Class | None
    """The class of non-matrix parameters; None: the usual one for the class of matrices."""
    own: Mapping[str, Any]
    """Keys of the matrices."""
    rest: Mapping[str, Any]
    """Keys of all other parameters, without ``lr`` where it is that of the matrices."""
    rates: Mapping[str, Any]
    """Learning rates of parts of the rest."""

    def request(
        self, kind: Kind, param: Tensor, override: Mapping[str, Any], handed: Mapping[str, Any]
    ) -> Request:
        """All that the group keys of a parameter depend on, but for the class."""
        part = kind.part if kind.part in self.rates else ""
        # A sign moves every element, so what an output gains grows with the number of its inputs.
        signs = self.scalar is not None and self.scalar._ALGORITHM == "lion"
        depends = signs and kind.part == "head" and not part and "lr" not in self.rest
        inputs = max(math.prod(param.shape[1:]), 1) if depends else 0
        views = kind.keys
        if CUTS & (override.keys() | handed.keys()):  # one of them says it all
            views = {key: value for key, value in views.items() if key not in CUTS}
        return Request(kind.is_matrix, views, part, inputs, override, handed)

    def check(self, cls: Class) -> None:
        """Checks the keys of both kinds and their values.

        Raises:
            ValueError: for a key that the algorithm does not read, and a value out of range.
        """
        for taker, given, before in ((cls, self.own, ""), (self._scalar_class(cls), self.rest, SCALAR)):
            schemas = OxOptimizer._schemas()
            group_checks.refuse_alien(given, taker._ALGORITHM, schemas, taker._WORDS, WHERE, before)
            check_values(given, taker, before)
            for key in given.keys() - {key for own in (schema.COMMON, *schemas.values()) for key in own}:
                if not _reads(taker, key):  # another class's word for a key
                    raise group_checks.unread(key, given[key], taker._ALGORITHM, taker._SCHEMA, WHERE, before)

    def keys(self, request: Request, cls: Class, lr: Any) -> dict[str, Any]:
        """The group keys of a parameter.

        Args:
            request: the parameter.
            cls: the class for matrices.
            lr: its learning rate, where none was given.
        """
        scalar, named = self._scalar_class(cls), request.override.get("algorithm")
        named = request.handed.get("algorithm", named)
        usual = cls if request.is_matrix else scalar
        taker = usual if named is None else algorithms.wanted(named, "algorithm")
        base = self.own.get("lr")
        rest = {"lr": base, **self.rest}
        if taker is cls and (request.is_matrix or named is not None):
            made = {**self.own, **self._views(request, taker)}
        elif taker is scalar:
            made = {
                **rest,
                **self._rate(request, base if base is not None else lr, divides=scalar is not cls),
            }
        else:  # settings of one algorithm are not those of another
            source = self.own if taker._MATRIX else rest
            shared = {key: source.get(key) for key in ("lr", "weight_decay")}
            made = {**shared, **self._views(request, taker)}
        others = [other for other in (cls, scalar) if other is not taker]
        handed = {
            key: value
            for key, value in request.handed.items()
            if _reads(taker, key) or not any(_reads(other, key) for other in others)
        }
        wanted = {**request.override, **handed}
        made |= {**wanted, "algorithm": algorithms.word(taker)}
        # None says of an argument that it was left out, and of a key of one's own what it says in a group.
        kept = wanted.keys() - {"lr", "weight_decay"}
        return {key: value for key, value in made.items() if value is not None or key in kept}

    def deferred(self, request: Request, cls: Class | None) -> dict[str, Any]:
        """The keys of a group for which the class that takes it is needed.

        Args:
            request: a parameter of the group.
            cls: the class for matrices; None: the one that takes the group.
        """
        if cls is None:
            word = algorithms.MATRICES if request.is_matrix else algorithms.OTHERS
            source = self.own if request.is_matrix else {"lr": self.own.get("lr"), **self.rest}
            rate = {"lr": self.rates[request.part]} if request.part else {}
            made = {**source, **rate, **request.views, **request.override, **request.handed}
        else:
            made = self.keys(request, cls, None)
            word = made["algorithm"]
        open_keys = {"algorithm", "lr"} if request.inputs else {"algorithm"}
        shown = {key: value for key, value in made.items() if value is not None and key not in open_keys}
        resolve = partial(self._resolve, request, cls)
        return {**shown, "algorithm": algorithms.Deferred.of(word, shown, resolve)}

    def is_rest(self, request: Request, taker: str, cls: Class | None) -> bool:
        """True for a parameter that stands with the rest, behind the matrices.

        Args:
            request: the parameter.
            taker: the name of its algorithm.
            cls: the class for matrices; None: the one that takes the groups.
        """
        if not request.is_matrix or cls is None:
            return not request.is_matrix
        return taker == algorithms.word(self._scalar_class(cls)) != algorithms.word(cls)

    def needs_rate(self, request: Request) -> bool:
        """True for a parameter whose rate depends on that of the class, as none was given."""
        return bool(request.inputs) and self.own.get("lr") is None

    def _resolve(self, request: Request, cls: Class | None, taker: Class, lr: Any) -> dict[str, Any]:
        """The keys of a deferred group for the class that takes it."""
        self.check(cls or taker)
        return self.keys(request, cls or taker, lr)

    def _scalar_class(self, cls: Class) -> Class:
        return OxOptimizer._registry[algorithms.scalar_default(cls)] if self.scalar is None else self.scalar

    def _views(self, request: Request, taker: Class) -> dict[str, Any]:
        return {key: value for key, value in request.views.items() if key in taker._SCHEMA}

    def _rate(self, request: Request, lr: Any, *, divides: bool) -> dict[str, Any]:
        """The learning rate of a part of the rest, where it has one of its own."""
        if request.part:
            return {"lr": self.rates[request.part]}
        if request.inputs and divides and isinstance(lr, (int, float, Tensor)):
            return {"lr": lr / math.sqrt(request.inputs)}
        return {}


def _reads(cls: Class, key: str) -> bool:
    return key in group_checks.read_keys(cls._SCHEMA, cls._WORDS)


def check_values(given: Mapping[str, Any], cls: Class | None, before: str = "") -> None:
    """Checks the values of keys by the name under which the user gave them.

    Raises:
        ValueError: for a value out of range.
    """
    fields = schema.COMMON | ({} if cls is None else cls._SCHEMA)
    wanted = {key: value for key, value in given.items() if key in fields and value is not None}
    values = {before + key: value for key, value in wanted.items()}
    validate.check_group(values, {before + key: fields[key] for key in wanted}, set(), WHERE)
