"""Averages of the weights: their group keys, and weights to evaluate with. The core computes the steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from oxidion._core import masters, validate
from oxidion._core.validate import Field
from oxidion._dist.comm import local

KEY = "average"
"""The state with the average E of "ema", and the weights z that "schedule_free" steps."""
STEP, SHARE = "average_step", "average_share"
"""The states with the number of averaged steps, 0 before the first, and with the share of the average that
the parameter holds: ``average_beta`` in training, 1 after ``eval()``."""
STATES = frozenset({KEY, STEP, "average_weight_sum", "average_lr_max", SHARE})
"""All keys of states of an average."""
STATES_OF: dict[str | None, frozenset[str]] = {
    None: frozenset(),
    "ema": frozenset({KEY, STEP}),
    "schedule_free": STATES,
}
"""By rule the keys of its states."""

SCHEMA: dict[str, Field] = {
    "average": validate.word(None, None, "ema", "schedule_free"),
    "average_decay": validate.beta(0.999),
    "average_start": validate.count(0, low=0),
    "average_beta": validate.beta(0.9),
    "average_dtype": validate.word(None, None, "bfloat16", "float32"),
    "average_lr_power": validate.number(2.0, high=16.0),
    "average_step_power": validate.number(0.0, high=16.0),
}
"""Group keys."""
RULES: dict[str | None, frozenset[str]] = {
    None: frozenset(),
    "ema": frozenset({"average_decay", "average_start", "average_dtype"}),
    "schedule_free": frozenset({"average_beta", "average_lr_power", "average_step_power", "average_dtype"}),
}
"""By rule the settings that it has."""


def check_new(group: Mapping[str, Any], where: str) -> None:
    """Refuses settings of a new group that its rule does not have.

    A group that exists may have those of the rule before.

    Raises:
        ValueError: for a key without ``average``, and for one of another rule.
    """
    rule = group["average"]
    for key in [key for key in SCHEMA if key != "average" and key not in RULES[rule]]:
        if group[key] == SCHEMA[key].default:
            continue
        others = " or ".join(repr(other) for other, keys in RULES.items() if key in keys)
        if rule is None:
            raise ValueError(f"{key} needs average={others} ({where})")
        raise ValueError(
            f"{key} means nothing with average={rule!r}, got {group[key]!r} ({where}): leave it out, or "
            f"take average={others}"
        )


def check(group: Mapping[str, Any], where: str, *, is_decoupled: bool) -> None:
    """Refuses settings that do not go together; ``is_decoupled``: the decay is no part of the update.

    Raises:
        ValueError: for a share of 0, and for what cannot be computed.
    """
    if group["average"] != "schedule_free":
        return
    if group["average_beta"] == 0:
        raise ValueError(f"average_beta must be above 0, got 0 ({where}): leave average out for plain steps")
    if group["stochastic_rounding"]:
        raise ValueError(f"average='schedule_free' does not go with stochastic_rounding ({where})")
    if group["lr"] is None:
        raise ValueError(
            f"average='schedule_free' weighs by lr, which must be a number and is None ({where}): pass lr "
            "and relative_step=False, or take average='ema'"
        )
    if float(group["weight_decay"]) != 0 and (group["cautious_wd"] or not is_decoupled):
        raise ValueError(
            f"average='schedule_free' decays by itself: not with cautious_wd, and not with algorithm "
            f"{group['algorithm']!r}, whose decay is part of its update ({where}): pass weight_decay=0"
            if not is_decoupled
            else f"average='schedule_free' decays by itself, not with cautious_wd ({where}): leave it out"
        )


def lost(incoming: list[dict[str, Any]], groups: list[dict[str, Any]]) -> Iterator[str]:
    """Yields a warning for each group with an average whose loaded settings have another one, or none."""
    for number, (loaded, own) in enumerate(zip(incoming, groups, strict=False)):
        rule, others = own["average"], loaded.get("average")
        if rule is not None and others != rule:
            yield (
                f"group {number} had average={rule!r} and has average={others!r} from here on: settings of "
                f"the state dict count. Set average={rule!r} in its group after loading for an average that "
                "begins with the weights of then"
            )


def drop_others(groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> None:
    """Drops states of averages whose rule is not their group's: these averages restart."""
    for group in groups:
        wanted = STATES_OF[group.get("average")]
        for param in group["params"]:
            own = state.get(param)
            if isinstance(own, dict) and (there := STATES & own.keys()) and there != wanted:
                for key in there:
                    del own[key]


def is_missing(groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> bool:
    """True where a parameter that may be stepped has not the states of its group's rule."""
    return any(
        STATES & state.get(param, {}).keys() != STATES_OF[group.get("average")]
        for group in groups
        for param in group["params"]
        if param.requires_grad
    )


def refuse_eval(groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> None:
    """Refuses a step while parameters hold their averages, as the core does before each step.

    Raises:
        RuntimeError: that names `train()`.
    """
    for _, _, own in _started(groups, state):
        if float(own.get(SHARE, 0)) == 1.0:
            raise RuntimeError(IN_EVAL)


IN_EVAL = (
    "the parameters hold their averages since eval() or within averaged(): call train(), or leave the "
    "context, before step()"
)


def _started(
    groups: list[dict[str, Any]], state: Mapping[Any, Any]
) -> Iterator[tuple[dict[str, Any], Tensor, dict[str, Any]]]:
    """Groups, parameters and states of the averages that have begun."""
    for group in groups:
        for param in group["params"] if group.get("average") is not None else ():
            own = state.get(param, {})
            if STATES & own.keys() == STATES_OF[group["average"]] and float(own[STEP]) > 0:
                yield group, param, own


@torch.no_grad()
def switch(groups: list[dict[str, Any]], state: Mapping[Any, Any], mode: str) -> None:
    """Has the parameters of "schedule_free" hold their averages ("eval"), or where gradients are taken."""
    for group, param, own in _started(groups, state):
        if SHARE not in own:
            continue
        # With y = (1 - s) z + s x of a share s, another share t has y + (1 - t / s) (z - y).
        before = float(own[SHARE])
        after = 1.0 if mode == "eval" else float(group["average_beta"])
        y, z = masters.weight(param, own), local(own[KEY])
        wide = y.to(torch.promote_types(torch.promote_types(y.dtype, z.dtype), torch.float32))
        if before != after:
            masters.write(param, own, wide + (1.0 - after / before) * (z.to(wide.dtype) - wide))
            own[SHARE].fill_(after)


@contextmanager
def averaged(groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> Iterator[None]:
    """A context in which the parameters hold their averages, by every rule."""
    with torch.no_grad():
        held = [(param, masters.weight(param, own).clone(), own) for _, param, own in _started(groups, state)]
        shares = [float(own[SHARE]) if SHARE in own else None for _, _, own in held]
        for (param, _, own), share in zip(held, shares, strict=True):
            if share is None:
                masters.write(param, own, local(own[KEY]))
    switch(groups, state, "eval")
    try:
        yield
    finally:
        with torch.no_grad():
            for (param, before, own), share in zip(held, shares, strict=True):
                masters.write(param, own, before)
                if share is not None and SHARE in own:
                    own[SHARE].fill_(share)
