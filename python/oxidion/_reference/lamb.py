"""LAMB: AdamW's direction with a trust ratio for each parameter."""

from __future__ import annotations

import math

from torch import Tensor

from oxidion._reference.update import Group, State, ascending, average, count, decayed


def lamb_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """LAMB (arXiv:1904.00962) with the conventions of ``debias``.

    ``u = m / (sqrt(v) + eps) + wd X`` and ``X <- X - lr r u``, ``r = phi(||X||) / ||u||``. Cautious decay
    leaves the decay out of u where X and the rest of u differ in sign.
    """
    t = count(state)
    grad = ascending(grad, group)
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
    u = u + wd * decayed(param, u, group)
    rate = float(group["lr"])
    if debias == "step":
        rate *= math.sqrt(correction2) / correction1
    if wd != 0.0 or group.get("always_adapt", False):
        rate *= trust_ratio(float(param.norm()), float(u.norm()), group)
    param -= rate * u


def trust_ratio(size: float, step_size: float, group: Group) -> float:
    """``phi(||X||) / ||u||``, 1 where either is 0, at most ``trust_clip``."""
    if group.get("phi") is not None:
        low, high = map(float, group["phi"])
        size = min(max(size, low), high)
    ratio = size / step_size if size != 0.0 and step_size != 0.0 else 1.0
    clip = group.get("trust_clip")
    return ratio if clip is None or not ratio > float(clip) else float(clip)
