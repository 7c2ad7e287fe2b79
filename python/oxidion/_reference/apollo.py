"""APOLLO: gradients scaled by what AdamW makes of their random projection."""

from __future__ import annotations

import torch
from torch import Tensor

from oxidion._reference.adamw import adamw_step
from oxidion._reference.orthogonalize import epsilon_of
from oxidion._reference.projection import (
    is_projected,
    last_matrices,
    low_rank_shape,
    move,
    normal_numbers,
    sides_of,
)
from oxidion._reference.update import Group, State, ascending, betas_of

PROJECTION_TAG = 4

# A last norm of at most this share of an update's norm is negligible: it does not limit the update.
NEGLIGIBLE = 2.0**-11.5


def apollo_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """APOLLO (arXiv:2412.05270) on each of the matrices of a parameter; Mini is rank 1 with one factor.

    With P Gaussian of variance 1 / rank: ``R = G P``, ``N = m / (sqrt(v) + eps)`` of Adam's moments of R;
    ``s = ||N|| / (||R|| + 1e-8)`` by channel or for the tensor; ``U = s G``, divided so that its norm is at
    most 1.01 times the last one, unless that is negligible or there is none;
    ``X <- X - lr sqrt(1 - b2^t) / (1 - b1^t) sqrt(scale) U`` and decay.
    """
    if not is_projected(param, group):
        adamw_step(param, grad, state, group)
        return
    grad = ascending(grad, group)
    (side,) = sides_of(param.shape[-2], param.shape[-1], group)
    shape, rank = low_rank_shape(param, group), int(group["rank"])
    step = state.setdefault("step", torch.zeros((), dtype=torch.float64))
    momentum = state.setdefault("momentum", param.new_zeros(shape)).reshape(-1, *shape[-2:])
    variance = state.setdefault("variance", param.new_zeros(shape)).reshape(-1, *shape[-2:])
    last = state.setdefault("update_norm", param.new_zeros(param.shape[:-2])).reshape(-1)
    update = torch.zeros_like(param, memory_format=torch.contiguous_format)
    steps = int(step)
    step += 1
    beta1, beta2 = betas_of(group)
    corrected = (1.0 - beta2 ** float(step)) ** 0.5 / (1.0 - beta1 ** float(step))
    along = 0 if side == 0 else 1  # the dimension of rank elements
    for block, (g, u) in enumerate(zip(last_matrices(grad), last_matrices(update), strict=True)):
        period = steps // int(group.get("update_proj_gap", 200))
        p = normal_numbers(
            g.shape[side], rank, group, tag=PROJECTION_TAG, step=period, block=block, scale=rank**-0.5
        )
        low = p.mT @ g if side == 0 else g @ p
        m, v = momentum[block], variance[block]
        m.mul_(beta1).add_(low, alpha=1.0 - beta1)
        v.mul_(beta2).addcmul_(low, low, value=1.0 - beta2)
        normal = m / (v.sqrt() + epsilon_of(group))
        if group.get("scale_type", "channel") == "tensor":
            factor = normal.norm() / (low.norm() + 1e-8)
        else:
            factor = normal.norm(dim=along, keepdim=True) / (low.norm(dim=along, keepdim=True) + 1e-8)
        scaled = factor * g
        norm = scaled.norm()
        starts = bool(last[block] <= NEGLIGIBLE * norm)
        limiter = 1.0 if starts else max(float(norm / (last[block] + 1e-8)), 1.01) / 1.01
        if norm != 0:
            last[block] = norm / limiter
        u.copy_(corrected * float(group.get("scale", 1.0)) ** 0.5 * scaled / limiter)
    move(param, update, group)
