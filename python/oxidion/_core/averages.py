"""Averages of the weights: their group keys, the numbers of a step, and the weights to evaluate with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from oxidion._core import validate
from oxidion._core.validate import Field
from oxidion._dist.comm import local

KEY = "average"
"""The state with the average, or with what the parameter is stepped from."""
BETWEEN = ("schedule_free", "gpa")
"""Rules that take gradients between what is stepped and its average."""

SCHEMA: dict[str, Field] = {
    "average": validate.word(None, None, "ema", "tail", *BETWEEN),
    "average_decay": validate.beta(None),
    "average_start": validate.count(0, low=0),
    "average_beta": validate.beta(None),
    "average_dtype": validate.word(None, None, "bfloat16", "float32"),
    "average_lr_power": validate.number(2.0, high=16.0),
    "average_step_power": validate.number(0.0, high=16.0),
    "average_steps": validate.count(0, low=0),
    "average_weight": validate.number(0.0),
    "average_largest_lr": validate.number(0.0),
    "average_mode": validate.word("train", "train", "eval"),
    "average_last_rule": validate.word(None, None, "ema", "tail", *BETWEEN),
    "average_last_beta": validate.beta(None),
}
"""Group keys; those of `KEPT` are kept by the optimizer."""
KEPT = (
    "average_steps",
    "average_weight",
    "average_largest_lr",
    "average_mode",
    "average_last_rule",
    "average_last_beta",
)
"""Group keys of an average that has begun: its numbers, and the rule and the share that it was made with."""
MEANT: dict[str, frozenset[str]] = {
    "ema": frozenset({"average_decay", "average_start"}),
    "tail": frozenset({"average_start"}),
    "schedule_free": frozenset({"average_beta", "average_lr_power", "average_step_power"}),
    "gpa": frozenset({"average_beta", "average_decay"}),
}
"""By rule the settings that it has."""
SETTINGS = frozenset[str]().union(*MEANT.values())
"""Settings that some rules have and others do not."""

DEFAULTS: dict[str, dict[str, float]] = {
    "ema": {"average_decay": 0.999},
    "schedule_free": {"average_beta": 0.9},
    "gpa": {"average_decay": 0.9967, "average_beta": 0.7},
}

Step = tuple[bool, float, float, float]


def setting(group: Mapping[str, Any], key: str) -> Any:
    """A setting of a group, or its default under the group's rule."""
    value = group.get(key)
    return DEFAULTS.get(group["average"], {}).get(key, SCHEMA[key].default) if value is None else value


def check_new(group: Mapping[str, Any], where: str) -> None:
    """Refuses settings of a new group that its rule does not have.

    A group that exists may have those of the rule before.

    Raises:
        ValueError: for a key without ``average``, and for one of another rule.
    """
    rule = group.get("average")
    if rule is None:
        given = [key for key in SCHEMA if key != "average" and key in group]
        if given:
            raise ValueError(f"{given[0]} needs average='ema', 'tail', 'schedule_free' or 'gpa' ({where})")
        return
    for key in sorted(SETTINGS - MEANT[rule]):
        if group.get(key) not in (None, SCHEMA[key].default):
            others = " or ".join(repr(other) for other, keys in MEANT.items() if key in keys)
            raise ValueError(
                f"{key} means nothing with average={rule!r}, got {group[key]!r} ({where}): leave it out, or "
                f"take average={others}"
            )


def check(group: Mapping[str, Any], where: str, *, decays_apart: bool) -> None:
    """Refuses settings that do not go together; ``decays_apart``: the decay is no part of the update.

    Raises:
        ValueError: for a share of 0, and for what cannot be computed.
    """
    rule = group.get("average")
    if rule not in BETWEEN:
        return
    if setting(group, "average_beta") == 0:
        raise ValueError(f"average_beta must be above 0, got 0 ({where}): leave average out for plain steps")
    if group.get("stochastic_rounding"):
        raise ValueError(f"average={rule!r} does not go with stochastic_rounding ({where})")
    if rule != "schedule_free":
        return
    if group["lr"] is None:
        raise ValueError(
            f"average='schedule_free' weighs by lr, which must be a number and is None ({where}): pass lr "
            "and relative_step=False, or take average='ema', 'tail' or 'gpa'"
        )
    if float(group["weight_decay"]) != 0 and (group.get("cautious_wd") or not decays_apart):
        raise ValueError(
            f"average='schedule_free' decays by itself: not with cautious_wd, and not with algorithm "
            f"{group['algorithm']!r}, whose decay is part of its update ({where}): pass weight_decay=0"
            if not decays_apart
            else f"average='schedule_free' decays by itself, not with cautious_wd ({where}): leave it out"
        )


def lost(incoming: list[dict[str, Any]], groups: list[dict[str, Any]]) -> Iterator[str]:
    """Says of which groups the settings that are loaded have another average, or none."""
    for number, (loaded, own) in enumerate(zip(incoming, groups, strict=False)):
        rule, others = own.get("average"), loaded.get("average")
        if rule is not None and others != rule:
            yield (
                f"group {number} had average={rule!r} and has average={others!r} from here on: settings of "
                f"the state dict count. Set average={rule!r} in its group after loading for an average that "
                "begins with the weights of then"
            )


def begun_with(group: Mapping[str, Any]) -> str | None:
    """The rule that the average of a group was made with; None where none has begun."""
    last: str | None = group.get("average_last_rule")
    if last is None and group.get("average_steps"):  # by a version that did not keep it
        last = group.get("average") or "none"
    return last


def begin_anew(groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> bool:
    """Has averages begin anew where the rule of a group is another than that of its average.

    They begin with what the parameters hold.

    Returns:
        True where an average begins anew: its state is gone.
    """
    changed = [group for group in groups if begun_with(group) not in (None, group.get("average"))]
    for group in changed:
        for param in group["params"]:
            if isinstance(own := state.get(param), dict):
                own.pop(KEY, None)
        for key in KEPT:
            group.pop(key, None)
    return bool(changed)


def follow(groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> None:
    """Moves parameters to where gradients are taken with a new ``average_beta``."""
    for group in groups:
        before = group.get("average_last_beta")
        if before is None or group["average"] not in BETWEEN or group.get("average_mode") == "eval":
            continue
        beta = float(setting(group, "average_beta"))
        if before != beta:
            _move(group, state, 1.0 - 1.0 / before)
            _move(group, state, 1.0 - beta)
            group["average_last_beta"] = beta


def is_missing(groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> bool:
    """True where a parameter of a group with an average has none yet."""
    return any(
        KEY not in state.get(p, {})
        for g in groups
        if g.get("average")
        for p in g["params"]
        if p.requires_grad
    )


def settle(groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> None:
    """Has averages begin anew, or go on with another ``average_beta``, after a change of a group."""
    begin_anew(groups, state)
    follow(groups, state)


def refuse_eval(groups: list[dict[str, Any]], *, inside: bool) -> None:
    """Refuses a step while parameters hold their averages.

    Args:
        groups: of the step.
        inside: whether parameters hold their averages in a context.

    Raises:
        RuntimeError: that names `train()`.
    """

    def holds(group: Mapping[str, Any]) -> bool:
        rule = group.get("average")
        return rule in BETWEEN and group.get("average_mode") == "eval" and begun_with(group) in (None, rule)

    if inside or any(map(holds, groups)):
        raise RuntimeError(
            "the parameters hold their averages since eval() or within averaged(): call train(), or leave "
            "the context, before step()"
        )


def advance(groups: list[dict[str, Any]]) -> list[Step | None] | None:
    """The numbers of the averages of a step that is taken, for the core; None where no group has one."""
    if not any(group.get("average") for group in groups):
        return None
    return [_advance(group) if group.get("average") else None for group in groups]


def _advance(group: dict[str, Any]) -> Step:
    steps = group["average_steps"] = group.get("average_steps", 0) + 1
    rule, beta = group["average"], float(setting(group, "average_beta") or 0.0)
    group["average_last_rule"] = rule
    if rule in BETWEEN:
        group["average_last_beta"] = beta
    late = steps - setting(group, "average_start")
    if rule == "gpa":
        return True, 1.0 - float(setting(group, "average_decay")), beta, 0.0
    if rule == "ema":
        return False, 1.0 if late <= 0 else 1.0 - float(setting(group, "average_decay")), beta, 0.0
    if rule == "tail":
        return False, 1.0 / max(late, 1), beta, 0.0
    if rule != "schedule_free":
        raise ValueError(f"average must be {SCHEMA['average'].wanted}, got {rule!r}")
    lr = float(group["lr"])
    largest = group["average_largest_lr"] = max(lr, group.get("average_largest_lr", 0.0))
    weight = steps ** setting(group, "average_step_power") * largest ** setting(group, "average_lr_power")
    total = group["average_weight"] = group.get("average_weight", 0.0) + weight
    return True, weight / total if total else 0.0, beta, lr * float(group["weight_decay"])


def _pairs(
    groups: list[dict[str, Any]], state: Mapping[Any, Any]
) -> Iterator[tuple[dict[str, Any], Any, Tensor]]:
    for group in groups:
        for param in group["params"]:
            own = state.get(param, {})
            if group.get("average") and KEY in own:
                yield group, local(param), local(own[KEY])


@torch.no_grad()
def _move(group: dict[str, Any], state: Mapping[Any, Any], weight: float) -> None:
    """Moves the parameters of a group by this share of the way to what is stepped."""
    for _, param, other in _pairs([group], state):
        dtype = torch.promote_types(torch.promote_types(param.dtype, other.dtype), torch.float32)
        wide = param.to(dtype)
        param.copy_(wide + weight * (other.to(dtype) - wide))


def switch(groups: list[dict[str, Any]], state: Mapping[Any, Any], mode: str) -> None:
    """Has the parameters of groups that interpolate hold averages ("eval"), or where gradients are taken."""
    for group in groups:
        if group.get("average") not in BETWEEN or group.get("average_mode", "train") == mode:
            continue
        beta = float(setting(group, "average_beta"))
        # With y = (1 - beta) z + beta x: x from y, or y from x.
        _move(group, state, 1.0 - 1.0 / beta if mode == "eval" else 1.0 - beta)
        group["average_mode"] = mode
        if mode == "train" and "average_last_beta" in group:
            group["average_last_beta"] = beta


@contextmanager
def averaged(groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> Iterator[None]:
    """A context in which the parameters hold their averages, by every rule."""
    present = [(group, group.get("average_mode", "train")) for group in groups]
    follow = [group for group in groups if group.get("average") not in BETWEEN]
    with torch.no_grad():
        held = [(param, param.clone()) for _, param, _ in _pairs(groups, state)]
        for _, param, mean in _pairs(follow, state):
            param.copy_(mean)
    switch(groups, state, "eval")
    try:
        yield
    finally:
        with torch.no_grad():
            for param, before in held:
                param.copy_(before)
        for group, mode in present:
            if group.get("average") in BETWEEN:
                group["average_mode"] = mode
