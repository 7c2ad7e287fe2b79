"""Lion: sign of an interpolated momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from oxidion._reference.update import Group, State, ascending, betas_of, take_elementwise


def lion_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """Lion (arXiv:2302.06675): sign of an interpolated momentum.

    ``U = sign(b1 m + (1 - b1) g)``, 0 for NaN; ``m <- b2 m + (1 - b2) g``; decay;
    ``X <- X - lr U``.
    """
    grad = ascending(grad, group)
    beta1, beta2 = betas_of(group)
    momentum = state.setdefault("momentum", torch.zeros_like(param))
    mixed = beta1 * momentum + (1.0 - beta1) * grad
    update = mixed.sign()
    momentum.mul_(beta2).add_(grad, alpha=1.0 - beta2)
    take_elementwise(param, update, update, group, state)
