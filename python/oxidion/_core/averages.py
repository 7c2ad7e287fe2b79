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
    "average_lr_power": validate.number(2.0),
    "average_step_power": validate.number(0.0),
    "average_steps": validate.count(0, low=0),
    "average_weight": validate.number(0.0),
    "average_largest_lr": validate.number(0.0),
    "average_mode": validate.word("train", "train", "eval"),
}
"""Group keys; the last four are kept by the optimizer."""

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


def check(group: Mapping[str, Any], where: str, *, decays_apart: bool) -> None:
    """Refuses settings that do not go together; ``decays_apart``: the decay is no part of the update.

    Raises:
        ValueError: for a key without ``average``, a share of 0, and what cannot be computed.
    """
    rule = group.get("average")
    if rule is None:
        given = [key for key in SCHEMA if key != "average" and key in group]
        if given:
            raise ValueError(f"{given[0]} needs average='ema', 'tail', 'schedule_free' or 'gpa' ({where})")
        return
    if rule not in BETWEEN:
        return
    if setting(group, "average_beta") == 0:
        raise ValueError(f"average_beta must be above 0, got 0 ({where}): leave average out for plain steps")
    if group.get("stochastic_rounding"):
        raise ValueError(f"average={rule!r} does not go with stochastic_rounding ({where})")
    decays = float(group["weight_decay"]) != 0
    if rule == "schedule_free" and decays and (group.get("cautious_wd") or not decays_apart):
        raise ValueError(
            f"average='schedule_free' decays by itself: not with cautious_wd, and not with algorithm "
            f"{group['algorithm']!r}, whose decay is part of its update ({where}): pass weight_decay=0"
            if not decays_apart
            else f"average='schedule_free' decays by itself, not with cautious_wd ({where}): leave it out"
        )


def refuse_eval(groups: list[dict[str, Any]]) -> None:
    """Refuses a step while parameters hold their averages.

    Raises:
        RuntimeError: that names `train()`.
    """
    if any(group.get("average_mode") == "eval" for group in groups):
        raise RuntimeError("the parameters hold their averages since eval(): call train() before step()")


def advance(groups: list[dict[str, Any]]) -> list[Step | None] | None:
    """The numbers of the averages of a step that is taken, for the core; None where no group has one."""
    if not any(group.get("average") for group in groups):
        return None
    return [_advance(group) if group.get("average") else None for group in groups]


def _advance(group: dict[str, Any]) -> Step:
    steps = group["average_steps"] = group.get("average_steps", 0) + 1
    rule, beta = group["average"], float(setting(group, "average_beta") or 0.0)
    late = steps - setting(group, "average_start")
    if rule == "gpa":
        return True, 1.0 - float(setting(group, "average_decay")), beta, 0.0
    if rule == "ema":
        return False, 1.0 if late <= 0 else 1.0 - float(setting(group, "average_decay")), beta, 0.0
    if rule == "tail":
        return False, 1.0 / max(late, 1), beta, 0.0
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
def switch(groups: list[dict[str, Any]], state: Mapping[Any, Any], mode: str) -> None:
    """Has the parameters of groups that interpolate hold averages ("eval"), or where gradients are taken."""
    changed = [g for g in groups if g.get("average") in BETWEEN and g.get("average_mode", "train") != mode]
    for group, param, other in _pairs(changed, state):
        beta = float(setting(group, "average_beta"))
        # With y = (1 - beta) z + beta x: x from y, or y from x.
        weight = 1.0 - 1.0 / beta if mode == "eval" else 1.0 - beta
        dtype = torch.promote_types(torch.promote_types(param.dtype, other.dtype), torch.float32)
        wide = param.to(dtype)
        param.copy_(wide + weight * (other.to(dtype) - wide))
    for group in changed:
        group["average_mode"] = mode


@contextmanager
def averaged(groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> Iterator[None]:
    """A context in which the parameters hold their averages, by every rule."""
    present = [group.get("average_mode", "train") for group in groups]
    follow = [group for group in groups if group.get("average") not in BETWEEN]
    with torch.no_grad():
        held = [(param, param.clone()) for _, param, _ in _pairs(groups, state)]
        for _, param, mean in _pairs(follow, state):
            param.copy_(mean)
    switch(groups, state, "eval")
    for group in groups:
        if group.get("average"):
            group["average_mode"] = "eval"
    try:
        yield
    finally:
        with torch.no_grad():
            for param, before in held:
                param.copy_(before)
        for group, mode in zip(groups, present, strict=True):
            if group.get("average"):
                group["average_mode"] = mode
