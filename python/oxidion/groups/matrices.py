"""Groups for the optimizers that orthonormalize matrices, with another algorithm for everything else."""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim.optimizer import ParamsT

from oxidion._core import constructor, group_checks, schema
from oxidion._core.base import OxOptimizer
from oxidion._core.constructor import SCALAR, nearest
from oxidion._core.group_checks import listed
from oxidion._core.signature import ModelOptions, Overrides
from oxidion._core.validate import shown
from oxidion.groups import algorithms, facts, heads
from oxidion.groups.kinds import Held, Kind, Model
from oxidion.groups.settings import Request, Settings, check_values, identity
from oxidion.groups.summary import ParamGroups, show, table
from oxidion.optim import Algorithm

logger = logging.getLogger("oxidion.groups")

ARGUMENTS = {*ModelOptions.__annotations__, "algorithm", "lr", "weight_decay", "params", "strict"} - {"model"}
"""Arguments of `param_groups` that are no group keys."""


def _known_keys() -> set[str]:
    words = {word for cls in OxOptimizer._registry.values() for word in cls._WORDS}
    return schema.known_keys(OxOptimizer._schemas()) - schema.FOREIGN_KEYS | words


def _check_keys(keys: Iterable[str]) -> None:
    """Refuses unknown arguments, each with the nearest right one."""
    known = _known_keys()
    known |= {f"{SCALAR}{key}" for key in known}
    for key in keys:
        if key not in known:
            near = nearest(key, known | ARGUMENTS)
            advice = "" if near is None else f"; the nearest one is {near!r}"
            raise TypeError(f"param_groups() got an unknown argument {key!r}{advice}")


def _overrides(given: Overrides | None, extra: frozenset[str]) -> list[tuple[Any, dict[str, Any]]]:
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
        for name in keys.keys() - _known_keys() - {"algorithm"} - extra:
            near = nearest(name, _known_keys())
            advice = "" if near is None else f"; the nearest is {near!r}"
            raise ValueError(f"overrides[{key!r}]: unknown group key {name!r}{advice}")
        if keys.get("algorithm") is not None:
            keys["algorithm"] = algorithms.word(algorithms.wanted(keys["algorithm"], f"overrides[{key!r}]"))
        pairs.append((key, keys))
    return pairs


def _handed(params: Any, model: nn.Module) -> dict[int, tuple[int, dict[str, Any]]]:
    """Returns parameters that were passed with their model: number and keys of their group, by identity.

    Raises:
        ValueError: for a parameter that is not the model's, or that occurs twice, and a group without any.
        TypeError: for anything but parameters.
    """
    if isinstance(params, Tensor):
        raise TypeError("params must be an iterable of parameters or groups, got a tensor")
    owned = set(map(id, model.parameters()))
    given = list(listed(params))
    groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
    found: dict[int, tuple[int, dict[str, Any]]] = {}
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or "params" not in group:
            raise ValueError(f"group {number} must be a dict with a key 'params', got {shown(group)}")
        keys = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if isinstance(keys.get("algorithm"), algorithms.Deferred):
            raise ValueError(  # noqa: TRY004  # its type is right
                f"group {number} is one of param_groups already: pass such groups without a model, or the "
                "parameters with it"
            )
        if keys.get("algorithm") is not None:
            keys["algorithm"] = algorithms.word(
                algorithms.wanted(keys["algorithm"], f"algorithm (group {number})")
            )
        held = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        for place, entry in enumerate(held):
            param = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry
            where = f"parameter {place} of group {number}"
            if not isinstance(param, Tensor):
                raise TypeError(f"{where} must be a parameter of the model, got {type(param).__name__}")
            if id(param) not in owned:
                raise ValueError(
                    f"{where}, of shape {tuple(param.shape)}, is not one of the model: pass the model that "
                    "it was taken from"
                )
            if id(param) in found:
                raise ValueError(f"{where}, of shape {tuple(param.shape)}, is in a group already")
            found[id(param)] = number, keys
    return found


def _matches(key: Any, name: str, held: Held) -> bool:
    if isinstance(key, str):
        return fnmatch.fnmatchcase(name, key)
    return isinstance(held.module, key)


def param_groups(
    model: nn.Module,
    algorithm: Algorithm | None = None,
    lr: float | Tensor | None = None,
    *,
    params: ParamsT | None = None,
    scalar_algorithm: Algorithm | None = None,
    scalar_lr: float | Tensor | None = None,
    weight_decay: float | None = None,
    scalar_weight_decay: float = 0.0,
    scalar_patterns: Iterable[str] = (),
    embedding_lr: float | Tensor | None = None,
    head_lr: float | Tensor | None = None,
    overrides: Overrides | None = None,
    split_fused: bool = True,
    per_head: bool | Iterable[str] = False,
    example: Any = None,
    prefix: str = "",
    strict: bool = False,
    summary: bool = True,
    extra_keys: Iterable[str] = (),
    **group_keys: Any,
) -> ParamGroups:
    """Groups for an optimizer of this package, with the names of the parameters.

    A constructor that is given a model makes them by this function: ``oxidion.Muon(model, scalar_lr=1e-3)``.

    Each parameter is sorted by its role in its module. Weights of linear layers, experts
    (``[experts, out, in]`` or ``[experts, in, out]``), convolutions and recurrent layers go to
    ``algorithm``, read as the matrices that they are. Embeddings, output layers, routers, tokens and
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
        params: the parameters of the model to sort, or groups of them, as frameworks hand them over; None:
            all. The keys of such a group stand in all that it becomes where the algorithm reads them.
        scalar_algorithm: for the rest; None: "adamw" with an algorithm for matrices, else the same one.
        scalar_lr: of the rest; None means ``lr``, and ``lr / sqrt(inputs)`` for an output layer that is
            stepped by "lion" while the matrices have another algorithm.
        weight_decay: of the matrices; None leaves the optimizer's default.
        scalar_weight_decay: of the rest.
        scalar_patterns: regular expressions; parameters whose name matches one are not orthonormalized.
        embedding_lr: of embeddings; None means ``scalar_lr``.
        head_lr: of the weights of output layers; None means ``scalar_lr``.
        overrides: algorithms, or dicts of group keys, by name pattern (``"*.router.weight"``, as of
            ``fnmatch``) or class of module. The last that matches a parameter decides; one that matches none
            is an error.
        split_fused: cut weights that are several matrices (fused QKV, gate and up) into these where their
            sizes are known.
        per_head: cut the layers of an attention into heads: queries, keys and values along their outputs,
            the layer behind them along its inputs. A list names some of ``"q"``, ``"k"``, ``"v"`` and
            ``"o"``. Where the model does not say for certain which rows are a head's, nothing is cut, and the
            summary says so.
        example: what the model is called with: a tensor, a tuple of arguments, or a dict of them. The linear
            layer that a forward pass calls last is then the output layer.
        prefix: what stands before the names of a part of a model, as in ``param_groups(model.encoder,
            prefix="encoder")``, so that they are those of the model.
        strict: raise where a rule guessed.
        summary: print the summary.
        extra_keys: names of keys of your own that ``overrides`` give to groups; no algorithm reads them.
            Pass them to the constructor that takes the groups, too.
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
    rates = {"scalar": scalar_lr, "embedding": embedding_lr, "head": head_lr}
    for part, rate in rates.items():
        check_values({"lr": rate}, None, f"{part}_")
    rest = {"lr": scalar_lr, "weight_decay": scalar_weight_decay, **_behind(SCALAR, group_keys)}
    settings = Settings(
        None if scalar_algorithm is None else algorithms.wanted(scalar_algorithm, "scalar_algorithm"),
        {"lr": lr, "weight_decay": weight_decay, **_without(SCALAR, group_keys)},
        {key: value for key, value in rest.items() if value is not None},
        {part: rate for part, rate in rates.items() if part != "scalar" and rate is not None},
    )
    cls = None if algorithm is None else algorithms.wanted(algorithm, "algorithm")
    if cls is not None:
        settings.check(cls)
    model = facts.unwrapped(model)
    for name, param in model.named_parameters():
        if isinstance(param, UninitializedParameter):
            raise ValueError(f"{name} has no shape yet, as its module is lazy: run a forward pass first")  # noqa: TRY004
    known = Model(model, example, split_fused, prefix.rstrip("."), heads.kinds(per_head))
    patterns = [re.compile(pattern) for pattern in scalar_patterns]
    extra = constructor.names_of_keys(extra_keys)
    group_checks.refuse_known(extra, OxOptimizer._registry.values())
    pairs = _overrides(overrides, extra)
    sorted_ = _Sorted(settings, cls, pairs, patterns, is_whole=params is None)
    handed = None if params is None else _handed(params, model)
    before = f"{prefix}." if prefix and not prefix.endswith(".") else prefix
    for held in known:
        if handed is None:
            sorted_.add(before + held.path, held, known.kind(held), 0, {})
        elif id(held.param) in handed:
            sorted_.add(before + held.path, held, known.kind(held), *handed[id(held.param)])
        else:
            sorted_.overriding(before + held.path, held)
    last = "" if known.heads or prefix else facts.last_path(model)
    return sorted_.groups(last, strict=strict, summary=summary)


class _Sorted:
    """Groups in the making."""

    def __init__(
        self,
        settings: Settings,
        cls: type[OxOptimizer] | None,
        overrides: list[tuple[Any, dict[str, Any]]],
        patterns: list[re.Pattern[str]],
        *,
        is_whole: bool,
    ) -> None:
        """Begins without groups; ``is_whole`` is True where all parameters of a model are sorted."""
        self.is_whole = is_whole
        self.settings, self.cls, self.patterns = settings, cls, patterns
        self.overrides, self.unused = overrides, set(range(len(overrides)))
        self.found: dict[tuple[int, bool, Any], dict[str, Any]] = {}
        self.rows: list[dict[str, Any]] = []
        self.decisions: dict[str, str] = {}
        self.guesses: list[str] = []
        self.hidden: set[str] = set()

    def add(self, name: str, held: Held, kind: Kind, number: int, keys: Mapping[str, Any]) -> None:
        """Puts a parameter, which was handed over in a group of a number with keys, into its group."""
        param, matching = held.param, self.overriding(name, held)
        if not param.requires_grad:
            logger.info("%s: frozen, left out", name)
            self.decisions[name] = "frozen, left out"
            return
        override: Mapping[str, Any] = {}
        if matching:
            override = self.overrides[matching[-1]][1]
            kind = Kind("named in overrides", kind.is_matrix, kind.keys, part=kind.part)
        elif kind.part == "rest" and any(pattern.search(name) for pattern in self.patterns):
            kind = Kind("name pattern")
        request = self.settings.request(kind, param, override, keys)
        made, same = self._keys(request)
        taker = made["algorithm"]
        for word in {self.cls and self.cls._ALGORITHM, taker} & OxOptimizer._registry.keys():
            OxOptimizer._registry[word]._check_shape_is_kept(name, param)
        is_rest = self.settings.is_rest(request, taker, self.cls)
        group = self.found.setdefault((number, is_rest, same), {"params": [], **made})
        group["params"].append((name, param))
        if not is_rest:
            self.hidden.add(name)
        self._note(name, param, kind, taker, made.get("lr"))

    def overriding(self, name: str, held: Held) -> list[int]:
        """The overrides that match a parameter."""
        matching = [index for index, (key, _) in enumerate(self.overrides) if _matches(key, name, held)]
        self.unused -= set(matching)
        return matching

    def _keys(self, request: Request) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """The group keys of a parameter, and what is equal for those of its group."""
        if self.cls is None or self.settings.needs_rate(request):
            deferred = self.settings.deferred(request, self.cls)
            return deferred, request.identity
        made = self.settings.keys(request, self.cls, None)
        return made, identity(made)

    def _note(self, name: str, param: Tensor, kind: Kind, taker: str, lr: Any) -> None:
        self.rows.append(
            {
                "rule": kind.rule,
                "algorithm": taker,
                "lr": lr,
                "name": name,
                "elements": param.numel(),
                "known": kind.is_known,
            }
        )
        self.decisions[name] = f"{taker} ({kind.rule})"
        logger.info("%s %s: %s (%s)", name, tuple(param.shape), taker, kind.rule)
        if not kind.is_known:
            self.guesses.append(f"{name} {tuple(param.shape)}: {taker} ({kind.rule})")

    def groups(self, last: str, *, strict: bool, summary: bool) -> ParamGroups:
        """The groups, those of matrices first.

        Args:
            last: name of the last linear layer of a model in which no output layer was found.
            strict: raise where a rule guessed.
            summary: print the summary.
        """
        if self.unused:
            unused = [self.overrides[index][0] for index in sorted(self.unused)]
            raise ValueError(f"overrides match no parameter: {unused}")
        if not self.found:
            held = "model has no parameter" if self.is_whole else "none of the given parameters is one"
            raise ValueError(f"{held} that requires a gradient")
        _warn_of_guesses(self.guesses, strict)
        groups = ParamGroups(self.found[key] for key in sorted(self.found, key=lambda key: key[:2]))
        groups.summary, groups.decisions = table(self.rows), self.decisions
        groups.summary.note = _note(self.cls is None, last if last in self.hidden else "")
        if summary:
            show(groups.summary)
        return groups


def _note(is_deferred: bool, last: str) -> str:
    """The lines below the rows of a summary."""
    notes = []
    if is_deferred:
        notes.append(
            "matrix: the algorithm of the class that takes the groups; scalar: adamw with a class for "
            "matrices, else the same"
        )
    if last:
        notes.append(
            f"no output layer was found, {last} counts as a hidden one: to say which it is, pass example=, "
            "or its name in overrides"
        )
    return "\n".join(notes)


def _without(before: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if not key.startswith(before)}


def _behind(before: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(before): value for key, value in keys.items() if key.startswith(before)}


def _warn_of_guesses(guesses: list[str], strict: bool) -> None:
    """Says which parameters no rule knows; raises where that was asked for."""
    if not guesses:
        return
    found = "; ".join(guesses[:8]) + (f"; and {len(guesses) - 8} more" if len(guesses) > 8 else "")
    help_ = "name them in overrides={pattern or class: algorithm or group keys}"
    if strict:
        raise ValueError(f"no rule knows what these parameters are: {found}. Pass strict=False, or {help_}")
    logger.warning(
        "no rule knows what these parameters are, so it was guessed: %s. To say it, %s", found, help_
    )
