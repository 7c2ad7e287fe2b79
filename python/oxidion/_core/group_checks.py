"""Checks of what users give as groups, with errors that say what to do."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from oxidion._core import constructor, schema, validate
from oxidion._dist import comm

LONG = 8
"""Ratio of the sides of a matrix that looks like an embedding or a layer of outputs."""


def name(
    group: dict[str, Any], number: int, others: Sequence[Mapping[str, Any]], names: Collection[str] | None
) -> None:
    """Gives bare parameters names where those of the other groups have some; in place.

    Args:
        group: a new group.
        number: its number.
        others: the groups before it.
        names: of their parameters; None: they are gathered here.

    Raises:
        ValueError: for names without which the other groups are, and for one that another parameter has.
    """
    held = group.get("params")
    if isinstance(held, Tensor):
        held = [held]
    elif isinstance(held, Iterator):
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
                f"group {number} names its parameters, and the groups before it do not: give names to all, "
                "or pass parameters without names"
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
            f"group {number}: {twice!r} is the name of a parameter of another group too, and names tell "
            "parameters apart: give each its whole name, as param_groups(part, prefix='part') does"
        )


def refuse_alien(
    group: Mapping[str, Any],
    algorithm: str,
    schemas: Mapping[str, Mapping[str, validate.Field]],
    words: Iterable[str],
    where: str,
    before: str = "",
) -> None:
    """Refuses keys that other algorithms have and this one does not read.

    None and defaults say nothing. Groups that an optimizer has completed have keys of its class.

    Args:
        group: keys and values.
        algorithm: of the group.
        schemas: the group keys of every algorithm.
        words: other words for keys of this one.
        where: what an error calls the group.
        before: what stood before each key where the user wrote it.

    Raises:
        ValueError: that names the nearest key which is read.
    """
    if "seed_by" in group:
        return
    own = schemas[algorithm]
    read = {*schema.FOREIGN_KEYS, *schema.COMMON, *own, *words}
    read |= {other for key, other in schema.SPELLINGS.items() if key in own}
    for key, value in group.items():
        usual = [fields[key].default for fields in schemas.values() if key in fields]
        if key in read or not usual or any(validate.is_same(value, other) for other in (None, *usual)):
            continue
        near = constructor.nearest(key, own)
        advice = f"the nearest key that it has is {near!r}" if near else f"it has {', '.join(own)}"
        given = f"{before}{key}={validate.shown(value)}"
        raise ValueError(f"{given} says nothing to {algorithm!r} ({where}); {advice}")


def no_matrix(name: str, taker: str, cls: str, shape: tuple[int, ...], rest: str) -> ValueError:
    """The error for a parameter of fewer than two dimensions in a group of matrices.

    Args:
        name: of the parameter.
        taker: the class of the group's algorithm.
        cls: the class of the optimizer.
        shape: of the parameter.
        rest: an algorithm that takes it.
    """
    return ValueError(
        f"{name}: {taker} takes weight matrices, got shape {shape}. Pass the model, whose modules tell what "
        f"is one: oxidion.{cls}(model, lr=...); where a framework hands over parameters, "
        f"oxidion.{cls}(params, model=model). Or put it in a group of its own: "
        f"dict(params=..., algorithm={rest!r})"
    )


def warn_of_tables(cls: str, group: Mapping[str, Any], number: int) -> None:
    """Warns of bare matrices that look like an embedding or a layer of outputs: first or last, and long."""
    matrices = [(place, param) for place, param in enumerate(group["params"]) if param.ndim >= 2]
    for place, param in dict(matrices[:1] + matrices[-1:]).items():
        short, long = sorted(param.shape[-2:])
        if short and long >= LONG * short:
            _warn(
                f"parameter {place} of group {number}, of shape {tuple(param.shape)}, looks like an embedding"
                f" or a layer of outputs, and {group['algorithm']!r} orthonormalizes it. Pass the model, "
                f"whose modules tell: oxidion.{cls}(model), or oxidion.{cls}(params, model=model)",
            )


def tell_of_others(cls: str, algorithm: str, groups: Iterable[Mapping[str, Any]]) -> None:
    """Says where no group has the algorithm of the class."""
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


def tell_of_repeated_work(cls: str) -> None:
    """Says where all ranks do all work on all matrices, as nothing tells that they could share it."""
    ranks = comm.world_size()
    if ranks > 1:
        logging.getLogger("oxidion").info(
            "%s: each of the %d ranks does all work on all matrices. To share it, pass the DDP model, or "
            "distributed_mesh=ddp.process_group",
            cls,
            ranks,
        )
