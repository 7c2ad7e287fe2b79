"""Groups for the optimizers that orthonormalize matrices, with another algorithm for everything else."""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from oxidion._core import schema
from oxidion._core.base import OxOptimizer
from oxidion._core.constructor import nearest
from oxidion.groups.kinds import Held, Kind, Model
from oxidion.groups.summary import ParamGroups, show, table

logger = logging.getLogger("oxidion.groups")

Overrides = Mapping["str | type[nn.Module]", "str | Mapping[str, Any]"]
"""Algorithms, or group keys, by name pattern or class of module."""


class Sorting:
    """Group keys of a kind, from the arguments of `param_groups`."""

    def __init__(
        self, algorithm: str, own: dict[str, Any], rest: dict[str, Any], rates: dict[str, Any]
    ) -> None:
        """Keeps the settings of the matrices, of the rest, and the learning rates of parts of it."""
        self.algorithm, self.own, self.rest, self.rates = algorithm, own, rest, rates

    def settings(self, kind: Kind, override: Mapping[str, Any] | None) -> dict[str, Any]:
        """The group keys of a parameter."""
        override = dict(override or {})
        algorithm = override.get("algorithm")
        is_main = kind.is_matrix if algorithm is None else algorithm == self.algorithm
        if is_main:
            return {**self.own, **views(kind, self.algorithm), **override}
        if algorithm in (None, self.rest["algorithm"]):
            return {**self.rest, **self.rates.get(kind.part, {}), **override}
        # Settings of one algorithm say nothing to another.
        source = self.own if OxOptimizer._registry[algorithm].MATRIX else self.rest
        shared = {key: source.get(key) for key in ("lr", "weight_decay")}
        return {**shared, **views(kind, algorithm), **override}


def views(kind: Kind, algorithm: str) -> dict[str, Any]:
    """The keys of a kind that an algorithm has."""
    own = OxOptimizer._registry[algorithm].SCHEMA
    return {key: value for key, value in kind.keys.items() if key in own}


def _check_words(algorithm: str, scalar_algorithm: str, keys: Mapping[str, Any]) -> None:
    """Refuses unknown algorithms and arguments, each with the nearest right one."""
    registry = OxOptimizer._registry
    for argument, word in (("algorithm", algorithm), ("scalar_algorithm", scalar_algorithm)):
        if word not in registry:
            raise ValueError(
                f"{argument} must be one of {', '.join(sorted(registry))}, got {word!r}; "
                f"the nearest is {nearest(str(word).lower(), registry)!r}"
            )
    known = schema.known_keys(OxOptimizer._schemas()) - schema.FOREIGN_KEYS
    known |= {word for cls in registry.values() for word in getattr(cls, "WORDS", {})}
    known |= {f"scalar_{key}" for key in known}
    for key in keys:
        if key not in known:
            raise TypeError(
                f"param_groups() got an unknown argument {key!r}; the nearest one is "
                f"{nearest(key, known | ARGUMENTS)!r}"
            )


ARGUMENTS = {
    "scalar_algorithm",
    "scalar_patterns",
    "overrides",
    "embedding_lr",
    "head_lr",
    "split_fused",
    "example",
    "strict",
    "summary",
}


def _overrides(given: Overrides | None) -> list[tuple[Any, dict[str, Any]]]:
    """Overrides as pairs of what they match and group keys."""
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise TypeError(f"overrides must map name patterns or classes of modules, got {type(given).__name__}")
    pairs = []
    for key, value in given.items():
        if not isinstance(key, str) and not (isinstance(key, type) and issubclass(key, nn.Module)):
            raise TypeError(f"a key of overrides must be a name pattern or a class of modules, got {key!r}")
        keys = {"algorithm": value} if isinstance(value, str) else dict(value)
        algorithm = keys.get("algorithm")
        if algorithm is not None and algorithm not in OxOptimizer._registry:
            raise ValueError(
                f"overrides[{key!r}]: unknown algorithm {algorithm!r}; the nearest is "
                f"{nearest(algorithm, OxOptimizer._registry)!r}"
            )
        pairs.append((key, keys))
    return pairs


def _matches(key: Any, held: Held) -> bool:
    if isinstance(key, str):
        return fnmatch.fnmatchcase(held.path, key)
    return isinstance(held.module, key)


def param_groups(
    model: nn.Module,
    algorithm: str = "dion",
    lr: float | Tensor | None = None,
    *,
    scalar_algorithm: str = "adamw",
    scalar_lr: float | Tensor | None = None,
    weight_decay: float | None = None,
    scalar_weight_decay: float = 0.0,
    scalar_patterns: Iterable[str] = (),
    embedding_lr: float | Tensor | None = None,
    head_lr: float | Tensor | None = None,
    overrides: Overrides | None = None,
    split_fused: bool = True,
    example: Any = None,
    strict: bool = False,
    summary: bool = True,
    **group_keys: Any,
) -> ParamGroups:
    """Groups for an optimizer of this package, with the names of the parameters.

    Each parameter is sorted by what it is, as its module tells. Weights of linear layers, experts
    (``[experts, out, in]`` or ``[experts, in, out]``), convolutions and recurrent layers go to
    ``algorithm``, read as the matrices that they are. Embeddings, layers of outputs, routers, tokens and
    positions, depthwise convolutions, state-space parameters, normalizations, gains and biases go to
    ``scalar_algorithm``. See docs/param-groups.md for the table of rules. The first rank prints a summary
    to stderr, a line for each rule; decisions by parameter are logged to ``oxidion.groups`` at INFO,
    guesses at WARNING.

    Args:
        model: the model, before or after ``fully_shard``; on ``meta`` too.
        algorithm: for the matrices.
        lr: of the matrices; None leaves the optimizer's default.
        scalar_algorithm: for the rest.
        scalar_lr: of the rest; None means ``lr``.
        weight_decay: of the matrices; None leaves the optimizer's default.
        scalar_weight_decay: of the rest.
        scalar_patterns: regular expressions; parameters whose name matches one are not orthonormalized.
        embedding_lr: of embeddings; None means ``scalar_lr``.
        head_lr: of the weights of layers of outputs; None means ``scalar_lr``.
        overrides: algorithms, or dicts of group keys, by name pattern (``"*.router.weight"``, as of
            ``fnmatch``) or class of module. The last that matches a parameter decides; one that matches none
            is an error.
        split_fused: cut weights that are several matrices (fused QKV, gate and up) into these where their
            sizes are known.
        example: what the model is called with: a tensor, a tuple of arguments, or a dict of them. The linear
            layer that a forward pass calls last is then the layer of outputs.
        strict: raise where a rule guessed.
        summary: print the summary.
        **group_keys: further keys of the matrix groups, and with ``scalar_`` before them of the rest
            (``scalar_betas``).

    Returns:
        A list of groups, those of the matrices first; each parameter that requires a gradient is in one.
        Attribute ``summary`` is the table, ``decisions`` the rule of each parameter.

    Raises:
        ValueError: for a model without parameters that require gradients, an unknown algorithm, an override
            that matches nothing, and with ``strict`` for parameters that no rule knows.
        TypeError: for unknown arguments, a string where a list belongs, and parameters that FSDP1 flattened.
    """
    _check_words(algorithm, scalar_algorithm, group_keys)
    if isinstance(scalar_patterns, (str, bytes)):
        raise TypeError(
            f"scalar_patterns must be a list of regular expressions, got the string {scalar_patterns!r}"
        )
    rest_keys = {key[7:]: value for key, value in group_keys.items() if key.startswith("scalar_")}
    keys = {key: value for key, value in group_keys.items() if not key.startswith("scalar_")}
    rest_lr = lr if scalar_lr is None else scalar_lr
    sorting = Sorting(
        algorithm,
        {"algorithm": algorithm, "lr": lr, "weight_decay": weight_decay, **keys},
        {"algorithm": scalar_algorithm, "lr": rest_lr, "weight_decay": scalar_weight_decay, **rest_keys},
        {
            part: {"lr": rate}
            for part, rate in (("embedding", embedding_lr), ("head", head_lr))
            if rate is not None
        },
    )
    patterns = [re.compile(pattern) for pattern in scalar_patterns]
    wanted = _overrides(overrides)
    unused = {index for index, _ in enumerate(wanted)}
    facts = Model(model, example, split_fused)
    found: dict[tuple[bool, Any], dict[str, Any]] = {}
    rows: list[tuple[str, str, str, int, bool]] = []
    guesses: list[str] = []
    decisions: dict[str, str] = {}
    for held in facts:
        matching = [index for index, (key, _) in enumerate(wanted) if _matches(key, held)]
        unused -= set(matching)
        if not held.param.requires_grad:
            logger.info("%s: frozen, left out", held.path)
            decisions[held.path] = "frozen, left out"
            continue
        kind, override = facts.kind(held), None
        if matching:
            override = wanted[matching[-1]][1]
            kind = Kind("named in overrides", kind.is_matrix, kind.keys, part=kind.part)
        elif kind.part == "rest" and any(pattern.search(held.path) for pattern in patterns):
            kind = Kind("name pattern")
        settings = {k: v for k, v in sorting.settings(kind, override).items() if v is not None}
        taker = settings["algorithm"]
        for name in (algorithm, taker):
            OxOptimizer._registry[name].check_shape_is_kept(held.path, held.param)
        _add(found, held, settings, taker == scalar_algorithm != algorithm or not kind.is_matrix)
        rows.append((kind.rule, taker, held.path, held.param.numel(), kind.is_known))
        decisions[held.path] = f"{taker} ({kind.rule})"
        logger.info("%s %s: %s (%s)", held.path, tuple(held.param.shape), taker, kind.rule)
        if not kind.is_known:
            guesses.append(f"{held.path} {tuple(held.param.shape)}: {taker} ({kind.rule})")
    if unused:
        raise ValueError(f"overrides match no parameter: {[wanted[index][0] for index in sorted(unused)]}")
    if not found:
        raise ValueError("model has no parameter that requires a gradient")
    _tell(guesses, strict)
    groups = ParamGroups(found[key] for key in sorted(found, key=lambda key: key[0]))
    groups.summary, groups.decisions = table(rows), decisions
    if summary:
        show(groups.summary)
    return groups


def _add(
    found: dict[tuple[bool, Any], dict[str, Any]], held: Held, settings: dict[str, Any], is_rest: bool
) -> None:
    """Puts a parameter into the group of its settings."""
    same = tuple((k, id(v) if isinstance(v, Tensor) else repr(v)) for k, v in sorted(settings.items()))
    group = found.setdefault((is_rest, same), {"params": [], **settings})
    group["params"].append((held.path, held.param))


def _tell(guesses: list[str], strict: bool) -> None:
    """Says which parameters no rule knows; raises where that was asked for."""
    if not guesses:
        return
    shown = "; ".join(guesses[:8]) + (f"; and {len(guesses) - 8} more" if len(guesses) > 8 else "")
    way_out = "name them in overrides={pattern or class: algorithm or group keys}"
    if strict:
        raise ValueError(f"no rule knows what these parameters are: {shown}. Pass strict=False, or {way_out}")
    logger.warning(
        "no rule knows what these parameters are, so it was guessed: %s. To say it, %s", shown, way_out
    )
