"""CAME: Adafactor's update, weighed by the confidence in it."""

from __future__ import annotations

from torch import Tensor

from oxidion._reference.factors import factored, normalized
from oxidion._reference.update import Group, State, ascending, average, count, decay


def came_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """CAME (arXiv:2307.02047): ``m`` of the normalized gradient over the root of its factored instability."""
    count(state)
    if param.numel() == 0:
        return
    grad = ascending(grad, group)
    beta1, beta2, beta3 = map(float, group["betas"])
    u = normalized(grad, state, group, beta2)
    m = average(state, "momentum", u, beta1)
    direction = m
    if param.ndim >= 2:
        instability = (u - m).square() + float(group["eps"][1])
        direction = m / factored(state, "res_", instability, beta3).sqrt()
    decay(param, direction, group)
    param -= float(group["lr"]) * direction
