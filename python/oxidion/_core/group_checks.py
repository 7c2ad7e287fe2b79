"""Checks of what users give as groups, with errors that say what to do."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from torch import Tensor, nn

from oxidion._core import constructor, schema, validate
from oxidion._dist import comm

LONG = 8
"""Ratio of the sides of a matrix that looks like an embedding or an output layer."""


def listed(held: object) -> Any:
    """The parameters of a ``ParameterList`` or ``ParameterDict``, of this with names; else what is given."""
    if isinstance(held, nn.ParameterDict):
        return list(held.items())
    return list(held) if isinstance(held, nn.ParameterList) else held


def name(
    group: dict[str, Any], number: int, others: Sequence[Mapping[str, Any]], names: Collection[str] | None
) -> None:
    """Gives bare parameters names if the parameters of other groups have names; in place.

    Args:
        group: a new group.
        number: its number.
        others: the groups before it.
        names: of their parameters; None: they are gathered here.

    Raises:
        ValueError: for names where the other groups have none, and for a name that another parameter has.
        TypeError: for a module instead of its parameters.
    """
    held = listed(group.get("params"))
    if isinstance(held, nn.Module):
        raise TypeError(
            f"group {number}: params must be parameters, got the module {type(held).__name__}: add the groups"
            " of param_groups(module, prefix='its name in the model') one by one"
        )
    if isinstance(held, Tensor):
        held = [held]
    elif isinstance(held, Iterable) and not isinstance(held, (Mapping, AbstractSet, str)):
        held = list(held)
    if not isinstance(held, (list, tuple)):
        return  # torch says what it must be
    group["params"] = held
    if not others or not held:
        return
    is_named = isinstance(held[0], tuple) or "param_names" in group
    if "param_names" not in others[0]:
        if is_named:
            raise ValueError(
                "all optimizer param groups should be with/without names. cannot add param group with names "
                f"to the optimizer, whose groups have none: give names to all, or pass group {number} without"
            )
        return
    if not is_named:
        group["params"] = [(f"group{number}.{place}", param) for place, param in enumerate(held)]
    if names is None:
        names = {known for other in others for known in other.get("param_names", ())}
    own = group.get("param_names") or [pair[0] for pair in group["params"] if isinstance(pair, tuple)]
    twice = next((known for known in own if known in names), None)
    if twice is not None:
        raise ValueError(
            f"group {number}: {twice!r} is the name of a parameter of another group too, and names must be "
            "unique: give each its whole name, as param_groups(part, prefix='part') does"
        )


def refuse_known(extra: Iterable[str], classes: Collection[Any]) -> None:
    """Refuses extra group keys that groups may have in any case.

    Args:
        extra: the keys.
        classes: all optimizer classes, with their group keys and synonyms.

    Raises:
        ValueError: for such a key; it names the key.
    """
    schemas = {cls._ALGORITHM: cls._SCHEMA for cls in classes}
    known = schema.known_keys(schemas).union(schema.SPELLINGS, *(cls._WORDS for cls in classes))
    for key in sorted(known.intersection(extra)):
        raise ValueError(
            f"extra_keys are keys that no optimizer reads, and groups may have {key!r} anyway: leave it out"
        )


def read_keys(own: Mapping[str, validate.Field], words: Iterable[str]) -> set[str]:
    """The group keys that an algorithm reads.

    Args:
        own: the group keys of the algorithm.
        words: other words for keys of it.
    """
    spelled = {other for key, other in schema.SPELLINGS.items() if key in own}
    return {*schema.FOREIGN_KEYS, *schema.COMMON, *own, *words} | spelled


def refuse_alien(
    group: Mapping[str, Any],
    algorithm: str,
    schemas: Mapping[str, Mapping[str, validate.Field]],
    words: Iterable[str],
    where: str,
    before: str = "",
) -> None:
    """Refuses keys that other algorithms have and this one does not read.

    None and default values are ignored. Groups that an optimizer has completed have the keys of its class.

    Args:
        group: keys and values.
        algorithm: of the group.
        schemas: the group keys of every algorithm.
        words: other words for keys of this one.
        where: what an error calls the group.
        before: prefix of the keys in the user's call.

    Raises:
        ValueError: that names the nearest key which is read.
    """
    if "seed_by" in group:
        return
    own = schemas[algorithm]
    read = read_keys(own, words)
    for key in [key for key in group if key not in read]:
        usual = [fields[key].default for fields in schemas.values() if key in fields]
        if usual and not any(_is_equal(group[key], other) for other in (None, *usual)):
            raise unread(key, group[key], algorithm, own, where, before)


def unread(
    key: str, value: object, algorithm: str, own: Iterable[str], where: str, before: str = ""
) -> ValueError:
    """The error for a key that an algorithm does not read; see `refuse_alien`."""
    near = constructor.nearest(key, own)
    advice = f"the nearest key that it has is {before + near!r}" if near else f"it has {', '.join(own)}"
    given = f"{before}{key}={validate.shown(value)}"
    return ValueError(f"{given} is not read by {algorithm!r} ({where}); {advice}")


def _is_equal(value: object, other: object) -> bool:
    """True for the same value, be it an integer or a float."""
    numbers = (validate.is_number(value), validate.is_number(other))
    return value == other if all(numbers) else validate.is_same(value, other)


def no_matrix(
    name: str, taker: str, cls: str, shape: tuple[int, ...], rest: str, *, is_bare: bool
) -> ValueError:
    """The error for a parameter of fewer than two dimensions in a group of matrices.

    Args:
        name: of the parameter.
        taker: the class of the group's algorithm.
        cls: the class of the optimizer.
        shape: of the parameter.
        rest: an algorithm that takes it.
        is_bare: True for a group that names no algorithm.
    """
    found = f"{name}: {taker} takes weight matrices, got shape {shape}."
    if not is_bare:
        return ValueError(
            f"{found} Name an algorithm that takes vectors, as {rest!r}, or leave them to it by strict=False"
        )
    return ValueError(
        f"{found} Pass the model, whose modules say which parameters are matrices: oxidion.{cls}(model, "
        f"lr=...); where a framework hands over parameters, oxidion.{cls}(params, model=model). Or put it in "
        f"a group of its own: dict(params=..., algorithm={rest!r})"
    )


def warn_of_tables(cls: str, group: Mapping[str, Any], number: int) -> None:
    """Warns of bare matrices that look like an embedding or an output layer: first or last, and long."""
    named = zip(validate.names_of(group, number), group["params"], strict=True)
    matrices = [(name, param) for name, param in named if param.ndim >= 2]
    for name, param in dict(matrices[:1] + matrices[-1:]).items():
        short, long = sorted(param.shape[-2:])
        if short and long >= LONG * short:
            _warn(
                f"{name}, of shape {tuple(param.shape)}, looks like an embedding or an output layer, and "
                f"{group['algorithm']!r} orthonormalizes it. Pass the model, whose modules say which "
                f"parameters are matrices: oxidion.{cls}(model), or oxidion.{cls}(params, model=model)",
            )


def lacks_rank(own: Mapping[str, validate.Field], groups: Iterable[Mapping[str, Any]]) -> bool:
    """Returns True for a class that projects gradients, by its group keys, if no group has a rank."""
    return "rank" in own and not any(group.get("rank") for group in groups)


def log_other_algorithms(
    cls: str, algorithm: str, groups: Sequence[Mapping[str, Any]], own: Mapping[str, validate.Field]
) -> None:
    """Logs a warning if no group has the algorithm of the class, or the rank without which it is another."""
    if groups and lacks_rank(own, groups):
        logging.getLogger("oxidion").warning(
            "no group of this %s has a rank, so no gradient is projected: pass rank=, or give it to a group",
            cls,
        )
    found = {group["algorithm"] for group in groups}
    if found and algorithm not in found:
        logging.getLogger("oxidion").warning(
            "no group of this %s has its algorithm, %r: groups keep the algorithm that they name, and these "
            "name %s",
            cls,
            algorithm,
            ", ".join(map(repr, sorted(found))),
        )


def _warn(text: str) -> None:
    """Warns at the line outside of this package and of torch's optimizers that led here."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("oxidion.", "torch.optim")):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def log_repeated_work(cls: str) -> None:
    """Logs that all ranks do all work on all matrices, if no mesh and no DTensor lets them share it."""
    ranks = comm.world_size()
    if ranks > 1:
        logging.getLogger("oxidion").info(
            "%s: each of the %d ranks does all work on all matrices. To share it, pass the DDP model, or "
            "distributed_mesh=ddp.process_group",
            cls,
            ranks,
        )
