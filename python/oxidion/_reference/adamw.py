"""AdamW: bias-corrected moments and decoupled decay."""

from __future__ import annotations

import torch
from torch import Tensor

from oxidion._reference.matrices import matrices
from oxidion._reference.orthogonalize import epsilon_of
from oxidion._reference.update import Group, State, betas_of, bound, decay, move


def adamw_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """AdamW (arXiv:1711.05101), bias-corrected, epsilon outside the root.

    Decay, then ``X <- X - lr m_hat / (sqrt(v_hat) + eps)``. With ``amsgrad`` the denominator takes the
    running maximum of v. ``cautious_wd`` decays where ``m X >= 0``. With ``decay_order="galore"`` the decay
    comes last. Matrices over the last two dimensions move as ``weight_norm`` has it.
    """
    grad = -grad if group.get("maximize", False) else grad
    beta1, beta2 = betas_of(group)
    momentum = state.setdefault("momentum", torch.zeros_like(param))
    variance = state.setdefault("variance", torch.zeros_like(param))
    step = state.setdefault("step", torch.zeros((), dtype=torch.float64))
    step += 1
    momentum.mul_(beta1).add_(grad, alpha=1.0 - beta1)
    variance.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
    second = variance
    if group.get("amsgrad", False):
        second = state.setdefault("max_variance", torch.zeros_like(param))
        torch.maximum(second, variance, out=second)
    corrected1 = momentum / (1.0 - beta1 ** float(step))
    corrected2 = second / (1.0 - beta2 ** float(step))
    update = corrected1 / (corrected2.sqrt() + epsilon_of(group))
    late = group.get("decay_order", "torch") == "galore"
    if param.ndim > 1 and group.get("weight_norm", "free") != "free":
        xs = matrices(param, {})
        moves = bound(xs, matrices(update, {}), group, state)
        if not late:
            decay(param, momentum, group)
        move(xs, moves, group, state)
    else:
        if not late:
            decay(param, momentum, group)
        param -= float(group["lr"]) * update
    if late:
        decay(param, momentum, group)
