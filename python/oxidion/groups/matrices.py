"""Groups for the optimizers that orthonormalize matrices, with another algorithm for everything else."""

from __future__ import annotations

import fnmatch
import logging
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from oxidion._core import schema
from oxidion._core.base import OxOptimizer
from oxidion._core.constructor import SCALAR, nearest
from oxidion._core.group_checks import refuse_alien
from oxidion.groups import algorithms, facts
from oxidion.groups.kinds import Held, Kind, Model
from oxidion.groups.summary import ParamGroups, show, table
from oxidion.optim import Algorithm
from oxidion.optim._model_options import ModelOptions, Overrides

logger = logging.getLogger("oxidion.groups")

ARGUMENTS = {*ModelOptions.__annotations__, "algorithm", "lr", "weight_decay", "strict"} - {"model"}
"""Arguments of `param_groups` that are no group keys."""


class Sorting:
    """Group keys of a kind, from the arguments of `param_groups`."""

    def __init__(
        self,
        algorithm: str,
        own: dict[str, Any],
        rest: dict[str, Any],
        rates: dict[str, Any],
        *,
        divides_head: bool,
    ) -> None:
        """Keeps the settings of the matrices, of the rest, and the learning rates of parts of it."""
        self.algorithm, self.own, self.rest, self.rates = algorithm, own, rest, rates
        self.divides_head = divides_head

    def settings(self, kind: Kind, param: Tensor, override: Mapping[str, Any] | None) -> dict[str, Any]:
        """The group keys of a parameter."""
        override = dict(override or {})
        algorithm = override.get("algorithm")
        is_main = kind.is_matrix if algorithm is None else algorithm == self.algorithm
        if is_main:
            return {**self.own, **views(kind, self.algorithm), **override}
        if algorithm in (None, self.rest["algorithm"]):
            return {**self.rest, **self._rate(kind, param), **override}
        # Settings of one algorithm say nothing to another.
        source = self.own if OxOptimizer._registry[algorithm]._MATRIX else self.rest
        shared = {key: source.get(key) for key in ("lr", "weight_decay")}
        return {**shared, **views(kind, algorithm), **override}

    def _rate(self, kind: Kind, param: Tensor) -> dict[str, Any]:
        """The learning rate of a part of the rest, where it has one of its own."""
        if kind.part in self.rates:
            return {"lr": self.rates[kind.part]}
        lr = self.rest.get("lr")
        if kind.part == "head" and self.divides_head and isinstance(lr, (int, float)):
            # A sign moves every element, so what an output gains grows with the number of its inputs.
            return {"lr": lr / math.sqrt(max(math.prod(param.shape[1:]), 1))}
        return {}


def views(kind: Kind, algorithm: str) -> dict[str, Any]:
    """The keys of a kind that an algorithm has."""
    if algorithm == algorithms.MATRIX:
        return dict(kind.keys)
    own = OxOptimizer._registry[algorithm]._SCHEMA
    return {key: value for key, value in kind.keys.items() if key in own}


def _check_keys(keys: Iterable[str]) -> None:
    """Refuses unknown arguments, each with the nearest right one."""
    known = schema.known_keys(OxOptimizer._schemas()) - schema.FOREIGN_KEYS
    known |= {word for cls in OxOptimizer._registry.values() for word in cls._WORDS}
    known |= {f"{SCALAR}{key}" for key in known}
    for key in keys:
        if key not in known:
            raise TypeError(
                f"param_groups() got an unknown argument {key!r}; the nearest one is "
                f"{nearest(key, known | ARGUMENTS)!r}"
            )


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
        keys: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"algorithm": value}
        if keys.get("algorithm") is not None:
            cls = algorithms.wanted(keys["algorithm"], f"overrides[{key!r}]")
            keys = {**algorithms.preset(cls), **keys, "algorithm": cls._ALGORITHM}
        pairs.append((key, keys))
    return pairs


def _matches(key: Any, name: str, held: Held) -> bool:
    if isinstance(key, str):
        return fnmatch.fnmatchcase(name, key)
    return isinstance(held.module, key)


def param_groups(
    model: nn.Module,
    algorithm: Algorithm | None = None,
    lr: float | Tensor | None = None,
    *,
    scalar_algorithm: Algorithm | None = None,
    scalar_lr: float | Tensor | None = None,
    weight_decay: float | None = None,
    scalar_weight_decay: float = 0.0,
    scalar_patterns: Iterable[str] = (),
    embedding_lr: float | Tensor | None = None,
    head_lr: float | Tensor | None = None,
    overrides: Overrides | None = None,
    split_fused: bool = True,
    example: Any = None,
    prefix: str = "",
    strict: bool = False,
    summary: bool = True,
    **group_keys: Any,
) -> ParamGroups:
    """Groups for an optimizer of this package, with the names of the parameters.

    A constructor that is given a model makes them by this function: ``oxidion.Muon(model, scalar_lr=1e-3)``.

    Each parameter is sorted by what it is, as its module tells. Weights of linear layers, experts
    (``[experts, out, in]`` or ``[experts, in, out]``), convolutions and recurrent layers go to
    ``algorithm``, read as the matrices that they are. Embeddings, layers of outputs, routers, tokens and
    positions, depthwise convolutions, state-space parameters, normalizations, gains and biases go to
    ``scalar_algorithm``. See docs/param-groups.md for the table of rules. The first rank prints a summary
    to stderr, a line for each rule; decisions by parameter are logged to ``oxidion.groups`` at INFO,
    guesses at WARNING.

    Args:
        model: the model, before or after ``fully_shard``; on ``meta`` too. Of DDP and ``torch.compile`` it is
            the model inside.
        algorithm: for the matrices: a name in upper or lower case, or a class. None: that of the class which
            takes the groups.
        lr: of the matrices; None leaves the optimizer's default.
        scalar_algorithm: for the rest; None: "adamw" beside an algorithm for matrices, else the same one.
        scalar_lr: of the rest; None means ``lr``, and ``lr / sqrt(inputs)`` for a layer of outputs that is
            stepped by "lion" beside another algorithm.
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
        prefix: what stands before the names of a part of a model, as in ``param_groups(model.encoder,
            prefix="encoder")``, so that they are those of the model.
        strict: raise where a rule guessed.
        summary: print the summary.
        **group_keys: further keys of the matrix groups, and with ``scalar_`` before them of the rest
            (``scalar_betas``).

    Returns:
        A list of groups, those of the matrices first; each parameter that requires a gradient is in one.
        Attribute ``summary`` is the table, ``decisions`` the rule of each parameter.

    Raises:
        ValueError: for a model without parameters that require gradients, an unknown algorithm, keys that an
            algorithm does not have, an override that matches nothing, and with ``strict`` for
            parameters that no rule knows.
        TypeError: for anything but a model, unknown arguments, a string where a list belongs, and parameters
            that FSDP1 flattened.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            "param_groups takes the model itself, as its modules tell what a parameter is: "
            f"oxidion.param_groups(model, ...), got {type(model).__name__}"
        )
    _check_keys(group_keys)
    if isinstance(scalar_patterns, (str, bytes)):
        raise TypeError(
            f"scalar_patterns must be a list of regular expressions, got the string {scalar_patterns!r}"
        )
    rest_lr = lr if scalar_lr is None else scalar_lr
    sorting = _sorting(
        None if algorithm is None else algorithms.wanted(algorithm, "algorithm"),
        None if scalar_algorithm is None else algorithms.wanted(scalar_algorithm, "scalar_algorithm"),
        {"lr": lr, "weight_decay": weight_decay, **_without(SCALAR, group_keys)},
        {"lr": rest_lr, "weight_decay": scalar_weight_decay, **_behind(SCALAR, group_keys)},
        {part: rate for part, rate in (("embedding", embedding_lr), ("head", head_lr)) if rate is not None},
        is_rate_given=scalar_lr is not None,
    )
    patterns = [re.compile(pattern) for pattern in scalar_patterns]
    wanted = _overrides(overrides)
    unused = {index for index, _ in enumerate(wanted)}
    model = facts.unwrapped(model)
    known = Model(model, example, split_fused)
    before = f"{prefix}." if prefix and not prefix.endswith(".") else prefix
    found: dict[tuple[bool, Any], dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    guesses: list[str] = []
    decisions: dict[str, str] = {}
    for held in known:
        name = before + held.path
        matching = [index for index, (key, _) in enumerate(wanted) if _matches(key, name, held)]
        unused -= set(matching)
        if not held.param.requires_grad:
            logger.info("%s: frozen, left out", name)
            decisions[name] = "frozen, left out"
            continue
        kind, override = known.kind(held), None
        if matching:
            override = wanted[matching[-1]][1]
            kind = Kind("named in overrides", kind.is_matrix, kind.keys, part=kind.part)
        elif kind.part == "rest" and any(pattern.search(name) for pattern in patterns):
            kind = Kind("name pattern")
        made = sorting.settings(kind, held.param, override)
        settings = {key: value for key, value in made.items() if value is not None}
        taker = settings["algorithm"]
        for word in {sorting.algorithm, taker} & OxOptimizer._registry.keys():
            OxOptimizer._registry[word]._check_shape_is_kept(name, held.param)
        is_rest = taker == sorting.rest["algorithm"] != sorting.algorithm or not kind.is_matrix
        _add(found, name, held.param, settings, is_rest)
        rows.append(
            {
                "rule": kind.rule,
                "algorithm": taker,
                "lr": settings.get("lr"),
                "name": name,
                "elements": held.param.numel(),
                "known": kind.is_known,
            }
        )
        decisions[name] = f"{taker} ({kind.rule})"
        logger.info("%s %s: %s (%s)", name, tuple(held.param.shape), taker, kind.rule)
        if not kind.is_known:
            guesses.append(f"{name} {tuple(held.param.shape)}: {taker} ({kind.rule})")
    if unused:
        raise ValueError(f"overrides match no parameter: {[wanted[index][0] for index in sorted(unused)]}")
    if not found:
        raise ValueError("model has no parameter that requires a gradient")
    _tell(guesses, strict)
    groups = ParamGroups(found[key] for key in sorted(found, key=lambda key: key[0]))
    groups.summary, groups.decisions = table(rows), decisions
    groups.summary.note = _note(sorting, "" if known.heads else facts.last_path(model), before)
    if summary:
        show(groups.summary)
    return groups


def _note(sorting: Sorting, last: str, before: str) -> str:
    """The lines below the rows of a summary."""
    notes = []
    if sorting.algorithm == algorithms.MATRIX:
        notes.append(
            "matrix: the algorithm of the class that takes the groups; scalar: adamw beside a class for "
            "matrices, else the same"
        )
    if last:
        notes.append(
            f"no layer of outputs was found, {before}{last} counts as a hidden one: to say which it is, pass "
            "example=, or its name in overrides"
        )
    return "\n".join(notes)


def _without(before: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if not key.startswith(before)}


def _behind(before: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(before): value for key, value in keys.items() if key.startswith(before)}


def _sorting(
    cls: type[OxOptimizer] | None,
    scalar: type[OxOptimizer] | None,
    own: dict[str, Any],
    rest: dict[str, Any],
    rates: dict[str, Any],
    *,
    is_rate_given: bool,
) -> Sorting:
    """The settings by kind; keys that an algorithm does not have are refused where it is known."""
    algorithm = algorithms.MATRIX if cls is None else cls._ALGORITHM
    other = algorithms.SCALAR if cls is None else algorithms.beside(cls)
    other = other if scalar is None else scalar._ALGORITHM
    for name, given, before in ((algorithm, own, ""), (other, rest, SCALAR)):
        if name in OxOptimizer._registry:
            words, schemas = OxOptimizer._registry[name]._WORDS, OxOptimizer._schemas()
            refuse_alien(given, name, schemas, words, "param_groups()", before)
    made = []
    for name, given, taker in ((algorithm, own, cls), (other, rest, scalar)):
        told = {key: value for key, value in given.items() if value is not None}
        made.append({"algorithm": name, **({} if taker is None else algorithms.preset(taker)), **told})
    divides = other == "lion" != algorithm and not is_rate_given
    return Sorting(algorithm, made[0], made[1], rates, divides_head=divides)


def _add(
    found: dict[tuple[bool, Any], dict[str, Any]],
    name: str,
    param: Tensor,
    settings: dict[str, Any],
    is_rest: bool,
) -> None:
    """Puts a parameter into the group of its settings."""
    same = tuple((k, id(v) if isinstance(v, Tensor) else repr(v)) for k, v in sorted(settings.items()))
    group = found.setdefault((is_rest, same), {"params": [], **settings})
    group["params"].append((name, param))


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
