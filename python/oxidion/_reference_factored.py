"""Naive float64 steps of the optimizers with norms or factored moments, on whole parameters.

The signature and the role names are those of ``_reference``; further roles are ``row``, ``col``, ``mean``
and for CAME ``res_row``, ``res_col``, ``res_mean``: averages along the last dimension, along the one before
it, and along both. The averages along both say nothing new and are kept only because the core keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
Group = Mapping[str, Any]


def grad_norm(grads: Sequence[Tensor]) -> float:
    """The norm of all gradients of a group, which LAMB with ``max_grad_norm`` is told as ``grad_norm``."""
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))


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


def rms(x: Tensor) -> float:
    """Root of the mean square of all elements."""
    return float(x.square().mean().sqrt())


def decay(param: Tensor, direction: Tensor, rate: float, group: Group) -> None:
    """``X <- (1 - rate) X``; with ``cautious_wd`` only where ``X * direction >= 0``."""
    mask = param * direction >= 0 if group.get("cautious_wd", False) else torch.ones_like(param)
    param -= rate * param * mask


def factored(state: State, prefix: str, s: Tensor, beta: float) -> Tensor:
    """``V = R C^T / mean(R)`` of the averages R and C of s along the last dimension and the one before."""
    row = average(state, f"{prefix}row", s.mean(dim=-1), beta)
    col = average(state, f"{prefix}col", s.mean(dim=-2), beta)
    average(state, f"{prefix}mean", s.mean(dim=(-2, -1)), beta)
    return row.unsqueeze(-1) * col.unsqueeze(-2) / row.mean(dim=-1)[..., None, None]


def normalized(grad: Tensor, state: State, group: Group, beta2: float) -> Tensor:
    """``u = g / sqrt(V)``, clipped to an RMS of ``clip_threshold``; all NaN where one element is."""
    s = grad.square() + float(group["eps"][0])
    v = factored(state, "", s, beta2) if grad.ndim >= 2 else average(state, "variance", s, beta2)
    u = grad / v.sqrt()
    return u / (u.square().mean().sqrt() / float(group["clip_threshold"])).clamp(min=1.0)


def lamb_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """LAMB (arXiv:1904.00962) with the conventions of ``debias``.

    ``u = m / (sqrt(v) + eps) + wd X`` and ``X <- X - lr r u``, ``r = phi(||X||) / ||u||``. ``cautious_wd``
    leaves the decay out of u where X and the rest of u differ in sign.
    """
    t = count(state)
    grad = -grad if group.get("maximize", False) else grad
    limit = group.get("max_grad_norm")
    if limit is not None:
        grad = grad / max(1.0, float(group["grad_norm"]) / float(limit))
    beta1, beta2 = map(float, group["betas"])
    m = average(state, "momentum", grad, beta1, None if group.get("grad_averaging", True) else 1.0)
    v = average(state, "variance", grad.square(), beta2)
    debias = group.get("debias", "moments")
    correction1, correction2 = 1.0 - beta1**t, 1.0 - beta2**t
    if debias == "moments":
        m, v = m / correction1, v / correction2
    u = m / (v.sqrt() + float(group["eps"] if "eps" in group else group["epsilon"]))
    wd = float(group["weight_decay"])
    agree = param * u >= 0 if group.get("cautious_wd", False) else torch.ones_like(param)
    u = u + wd * param * agree
    rate = float(group["lr"])
    if debias == "step":
        rate *= math.sqrt(correction2) / correction1
    if wd != 0.0 or group.get("always_adapt", False):
        rate *= trust_ratio(float(param.norm()), float(u.norm()), group)
    param -= rate * u


def trust_ratio(weight_norm: float, update_norm: float, group: Group) -> float:
    """``phi(||X||) / ||u||``, 1 where either is 0, at most ``trust_clip``."""
    if group.get("phi") is not None:
        low, high = map(float, group["phi"])
        weight_norm = min(max(weight_norm, low), high)
    ratio = weight_norm / update_norm if weight_norm != 0.0 and update_norm != 0.0 else 1.0
    clip = group.get("trust_clip")
    return ratio if clip is None or not ratio > float(clip) else float(clip)


def adafactor_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """Adafactor (arXiv:1804.04235) in the order of fairseq and transformers.

    ``beta2 = 1 - t^decay_rate``; ``a = rho max(eps2, RMS(X))``; with ``beta1`` the finished steps ``a u`` are
    averaged; decay at the rate ``a wd``; ``X <- X - a u``.
    """
    t = count(state)
    if param.numel() == 0:
        return
    grad = -grad if group.get("maximize", False) else grad
    update = normalized(grad, state, group, 1.0 - t ** float(group["decay_rate"]))
    lr = group["lr"]
    if group["relative_step"]:
        # An lr of zero that was set in the group stops every movement.
        cap = 1e-6 * t if group["warmup_init"] else 1e-2
        rate = 0.0 if lr is not None and float(lr) == 0.0 else min(cap, 1.0 / math.sqrt(t))
    else:
        rate = float(lr)
    if group["scale_parameter"]:
        rate *= max(float(group["eps"][1]), rms(param))
    update = rate * update
    if group["beta1"] is not None:
        update = average(state, "momentum", update, float(group["beta1"]))
    decay(param, update, rate * float(group["weight_decay"]), group)
    param -= update


def came_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """CAME (arXiv:2307.02047): ``m`` of the normalized gradient over the root of its factored instability."""
    count(state)
    if param.numel() == 0:
        return
    grad = -grad if group.get("maximize", False) else grad
    beta1, beta2, beta3 = map(float, group["betas"])
    u = normalized(grad, state, group, beta2)
    m = average(state, "momentum", u, beta1)
    direction = m
    if param.ndim >= 2:
        instability = (u - m).square() + float(group["eps"][1])
        direction = m / factored(state, "res_", instability, beta3).sqrt()
    decay(param, direction, float(group["lr"]) * float(group["weight_decay"]), group)
    param -= float(group["lr"]) * direction
