"""AdEMAMix: two first moments, a fast and a slow one."""

from __future__ import annotations

import math

from torch import Tensor

from oxidion._reference.orthogonalize import epsilon_of
from oxidion._reference.update import Group, State, ascending, average, count, take_elementwise


def half_life_between(beta1: float, beta3: float, share: float) -> float:
    """The decay rate whose half-life lies between those of two others, at this share of the way."""
    if beta1 == 0.0 or beta3 == 0.0:
        return beta3 ** (1.0 / share) if beta1 == 0.0 else 0.0
    slow, fast = math.log(beta3), math.log(beta1)
    return math.exp(fast * slow / ((1.0 - share) * slow + share * fast))


def ademamix_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """AdEMAMix (arXiv:2409.03137), algorithm 1 with its schedules, epsilon outside the root.

    Decay, then ``X <- X - lr (m1_hat + a m2) / (sqrt(v_hat) + eps)``. Cautious decay acts where the step
    points along X.
    """
    grad = ascending(grad, group)
    beta1, beta2, beta3 = map(float, group["betas"])
    alpha, warmup = float(group["alpha"]), group.get("t_alpha_beta3")
    step = count(state)
    if warmup is not None and step < warmup:
        alpha *= step / warmup
        beta3 = min(half_life_between(beta1, beta3, step / warmup), beta3)
    fast = average(state, "momentum", grad, beta1)
    slow = average(state, "slow_momentum", grad, beta3)
    second = average(state, "variance", grad * grad, beta2)
    mixed = fast / (1.0 - beta1**step) + alpha * slow
    update = mixed / ((second / (1.0 - beta2**step)).sqrt() + epsilon_of(group))
    take_elementwise(param, update, update, group, state)
