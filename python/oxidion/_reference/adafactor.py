"""Adafactor: a factored second moment, and steps relative to the parameter."""

from __future__ import annotations

import math

from torch import Tensor

from oxidion._reference.factors import normalized, rms
from oxidion._reference.update import Group, State, ascending, average, count, decay


def adafactor_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """Adafactor (arXiv:1804.04235) in the order of fairseq and transformers.

    ``beta2 = 1 - t^decay_rate``; ``a = rho max(eps2, RMS(X))``; with ``beta1`` the finished steps ``a u`` are
    averaged; decay at the rate ``a wd``; ``X <- X - a u``.
    """
    t = count(state)
    if param.numel() == 0:
        return
    grad = ascending(grad, group)
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
    decay(param, update, group, rate * float(group["weight_decay"]))
    param -= update
