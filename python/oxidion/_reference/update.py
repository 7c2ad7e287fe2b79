"""Decay and movement of a parameter, and the group keys and states that several steps read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oxidion._reference.matrices import fans, matrices
from oxidion._reference.orthogonalize import lr_factor

State = dict[str, Tensor]
Group = Mapping[str, Any]
Step = Callable[[Tensor, Tensor, State, Group], None]


def betas_of(group: Group) -> tuple[float, float]:
    """``beta1, beta2`` of a group that holds either those keys or ``betas``."""
    if "beta1" in group and "beta2" in group:
        return float(group["beta1"]), float(group["beta2"])
    beta1, beta2 = group["betas"]
    return float(beta1), float(beta2)


def ascending(grad: Tensor, group: Group) -> Tensor:
    """The gradient, with ``maximize`` its negative: what descends by it ascends."""
    return -grad if group.get("maximize", False) else grad


def decay(param: Tensor, direction: Tensor, group: Group, rate: float | None = None) -> None:
    """Decay ``X <- (1 - rate) X``; with ``cautious_wd`` only where ``X * direction >= 0``.

    The rate is ``lr * weight_decay`` unless given.
    """
    rate = float(group["lr"]) * float(group.get("weight_decay", 0.0)) if rate is None else rate
    param -= rate * decayed(param, direction, group)


def decayed(param: Tensor, direction: Tensor, group: Group) -> Tensor:
    """X, with ``cautious_wd`` 0 where ``X * direction < 0``."""
    return param * (param * direction >= 0) if group.get("cautious_wd", False) else param


def apply(param: Tensor, update: Tensor, group: Group, state: State) -> None:
    """Decay and ``X <- X - lr s U``, with s of ``adjust_lr``, for each matrix of the view."""
    rule = group.get("adjust_lr", "spectral_norm")
    xs, us = matrices(param, group), matrices(update, group)
    scaled = [lr_factor(rule, *fans(u, group)) * u for u in us]
    take_step(param, update, (xs, scaled), group, state)


def take_elementwise(
    param: Tensor, update: Tensor, direction: Tensor, group: Group, state: State, *, late: bool = False
) -> None:
    """As `take_step`, where matrices are those over the last two dimensions."""
    views = [matrices(x, {}) if x.ndim > 1 else [x] for x in (param, update)]
    take_step(param, direction, (views[0], views[1]), group, state, late=late)


def take_step(
    param: Tensor,
    direction: Tensor,
    views: tuple[Sequence[Tensor], Sequence[Tensor]],
    group: Group,
    state: State,
    *,
    late: bool = False,
) -> None:
    """Decay and ``X <- X - lr U``, with the norms of matrices held as the group says.

    Args:
        param: X.
        direction: with cautious decay the signs that X is compared with.
        views: parts of X and of U that are matrices of their own.
        group: settings.
        state: of X.
        late: whether decay comes last.
    """
    rules = group if param.ndim > 1 else {**group, "weight_norm": "free"}
    xs, us = views
    steps = bound(xs, us, rules, state)
    if not late:
        decay(param, direction, group)
    move(xs, steps, rules, state)
    if late:
        decay(param, direction, group)


def bound(xs: Sequence[Tensor], us: Sequence[Tensor], group: Group, state: State) -> list[Tensor]:
    """Updates of matrices as ``weight_norm`` makes them.

    "hyperball": ``(R/|U|) U``, R the norm of X at the first step; "floor": ``U max(1, c |X|/|U|)``;
    "row_floor": the same for each row.
    """
    rule, floor = group.get("weight_norm", "free"), float(group.get("weight_norm_floor", 0.35))
    if rule == "hyperball":
        first = state.setdefault("radius", xs[0].new_zeros(len(xs)) if xs else torch.zeros(0)).view(-1)
        for block, x in enumerate(xs):
            first[block] = x.norm() if first[block] == 0 else first[block]
        return [r / u.norm().clamp_min(1e-10) * u for r, u in zip(first, us, strict=True)]
    if rule == "free":
        return list(us)

    def norm(x: Tensor) -> Tensor:
        sizes: Tensor = x.norm(dim=1, keepdim=True) if rule == "row_floor" else x.norm()
        return sizes

    pairs = zip(xs, us, strict=True)
    return [u * (floor * norm(x) / norm(u).clamp_min(1e-10)).clamp_min(1) for x, u in pairs]


def move(xs: Sequence[Tensor], steps: Sequence[Tensor], group: Group, state: State) -> None:
    """``X <- X - lr U``, and with "hyperball" ``X <- R X/|X|``."""
    for block, (x, step) in enumerate(zip(xs, steps, strict=True)):
        x -= float(group["lr"]) * step
        if group.get("weight_norm") == "hyperball":
            x *= state["radius"].view(-1)[block] / x.norm().clamp_min(1e-10)


def count(state: State) -> float:
    """The number of this step."""
    step = state.setdefault("step", torch.zeros((), dtype=torch.float64))
    step += 1
    return float(step)


def average(state: State, role: str, value: Tensor, beta: float, weight: float | None = None) -> Tensor:
    """``E <- beta E + weight value``, where ``weight`` is ``1 - beta`` unless given."""
    kept = state.setdefault(role, torch.zeros_like(value))
    kept.mul_(beta).add_(value, alpha=1.0 - beta if weight is None else weight)
    return kept


def grad_norm(grads: Sequence[Tensor]) -> float:
    """Returns the norm of a group's gradients, which LAMB with ``max_grad_norm`` gets as ``grad_norm``."""
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
