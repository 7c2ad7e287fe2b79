"""AdamW: bias-corrected moments and decoupled decay."""

from __future__ import annotations

import torch
from torch import Tensor

from oxidion._reference.orthogonalize import epsilon_of
from oxidion._reference.update import Group, State, ascending, betas_of, take_elementwise


def adamw_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """AdamW (arXiv:1711.05101), bias-corrected, epsilon outside the root.

    Decay, then ``X <- X - lr m_hat / (sqrt(v_hat) + eps)``. With ``amsgrad`` the denominator takes the
    running maximum of v. Cautious decay acts where ``m X >= 0``. With ``decay_order="galore"`` the decay
    comes last.
    """
    grad = ascending(grad, group)
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
    take_elementwise(param, update, momentum, group, state, late=late)
