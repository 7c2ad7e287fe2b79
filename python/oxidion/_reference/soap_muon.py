"""SOAP-Muon: momentum tempered in an eigenbasis, then orthogonalized."""

from __future__ import annotations

import torch
from torch import Tensor

from oxidion._reference.matrices import matrices
from oxidion._reference.orthogonalize import orthogonalize
from oxidion._reference.soap import Bases, rotate
from oxidion._reference.update import Group, State, apply, ascending


def schatten4(x: Tensor) -> Tensor:
    """``(sum of the fourth powers of the singular values)^(1/4)``."""
    fourth: Tensor = torch.linalg.svdvals(x).pow(4).sum() ** 0.25
    return fourth


def soap_muon_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """SOAP-Muon on each of the matrices of a parameter.

    ``M <- mu M + (1-mu) G``, ``N = (1-mu) G + mu M``. Where there is no basis yet ``D = N``, else
    ``Y = Q_L^T N Q_R``, ``V <- b2 V + (1-b2) Y^2``, ``D = Q_L (Y / max(V, eps^2)^p) Q_R^T`` with the
    Schatten-4 norm of N. ``X <- (1 - lr wd) X - lr s orth(D)``; then L, R and the bases.
    """
    grad = ascending(grad, group)
    kept = Bases(param, state, group)
    momentum = state.setdefault("momentum", torch.zeros_like(param))
    variance = state.setdefault("variance", torch.zeros_like(param))
    step = state.setdefault("step", torch.zeros((), dtype=torch.float64))
    steps = int(step)
    step += 1
    mu, shampoo = float(group["mu"]), group.get("shampoo_beta")
    beta2 = float(group["betas"][1]) if "betas" in group else float(group["beta2"])
    beta2 = float(group.get("beta2") or beta2)
    least, power = float(group.get("eps", 1e-8)) ** 2, float(group.get("denom_power", 0.5))
    momentum.mul_(mu).add_(grad, alpha=1.0 - mu)
    ahead = (1.0 - mu) * grad + mu * momentum
    update = torch.zeros_like(param, memory_format=torch.contiguous_format)
    lists = (matrices(x, group) for x in (grad, ahead.contiguous(), variance, update))
    # Of a class that has both words ``eps`` is the basis's.
    orth = {key: value for key, value in group.items() if key != "eps"}
    for block, (g, n, v, u) in enumerate(zip(*lists, strict=True)):
        d = n
        if steps and kept.sides and bool(kept.since[block] != 0):
            turns = kept.of(block)
            y = rotate(n, turns)
            v.mul_(beta2).add_(y.square(), alpha=1.0 - beta2)
            d = rotate(y / v.clamp_min(least) ** power, turns, back=True)
            d = d * (schatten4(n) / schatten4(d).clamp_min(1e-38))
        u.copy_(orthogonalize(d, orth))
        kept.learn(block, g, beta2 if shampoo is None else float(shampoo), steps)
    apply(param, update, group, state)
