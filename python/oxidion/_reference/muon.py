"""Muon: orthonormalized momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from oxidion._reference.matrices import matrices
from oxidion._reference.orthogonalize import orthogonalize
from oxidion._reference.update import Group, State, apply, ascending


def muon_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """Muon on one parameter: orthogonalized momentum.

    ``M <- mu M + G``; ``U = orth(mu M + G)`` with ``nesterov``, else ``orth(M)``; decay; ``X <- X - lr s U``,
    with s of ``adjust_lr``, per matrix of the view.
    """
    apply(param, muon_update(param, grad, state, group), group, state)


def muon_update(param: Tensor, grad: Tensor, state: State, group: Group) -> Tensor:
    """The orthogonalized momentum of Muon."""
    grad = ascending(grad, group)
    mu = float(group["mu"])
    momentum = state.setdefault("momentum", torch.zeros_like(param))
    momentum.mul_(mu).add_(grad)
    direction = mu * momentum + grad if group.get("nesterov", False) else momentum
    update = torch.zeros_like(param, memory_format=torch.contiguous_format)
    for u, m in zip(matrices(update, group), matrices(direction.contiguous(), group), strict=True):
        u.copy_(orthogonalize(m, group))
    return update
