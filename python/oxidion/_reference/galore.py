"""GaLore: AdamW on gradients that are projected on their leading singular vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from oxidion._reference.adamw import adamw_step
from oxidion._reference.orthogonalize import epsilon_of
from oxidion._reference.projection import (
    is_due,
    is_projected,
    last_matrices,
    low_rank_shape,
    move,
    new_bases,
    project,
    project_back,
    rotate,
    sides_of,
)
from oxidion._reference.update import Group, State, ascending, betas_of


def galore_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """GaLore (arXiv:2403.03507) with AdamW, on each of the matrices of a parameter.

    With V the first ``rank`` right singular vectors of the gradient at the last refresh: ``R = G V``; Adam's
    direction N of R; ``X <- (1 - lr wd) X - lr scale N V^T``. A gradient that is zero or not finite leaves V
    alone; where there is no V yet, each step is a refresh.
    """
    if not is_projected(param, group):
        adamw_step(param, grad, state, group)
        return
    grad = ascending(grad, group)
    rows, cols = param.shape[-2:]
    sides = sides_of(rows, cols, group)
    shape, rank = low_rank_shape(param, group), int(group["rank"])
    names = ("proj", "proj_right")[: len(sides)]
    step = state.setdefault("step", torch.zeros((), dtype=torch.float64))
    momentum = state.setdefault("momentum", param.new_zeros(shape)).reshape(-1, *shape[-2:])
    variance = state.setdefault("variance", param.new_zeros(shape)).reshape(-1, *shape[-2:])
    stored = [
        state.setdefault(name, param.new_zeros(*param.shape[:-2], param.shape[side - 2], rank))
        for name, side in zip(names, sides, strict=True)
    ]
    since = state.setdefault("proj_step", param.new_zeros(param.shape[:-2])).reshape(-1)
    update = torch.zeros_like(param, memory_format=torch.contiguous_format)
    steps = int(step)
    step += 1
    beta1, beta2 = betas_of(group)
    for block, (g, u) in enumerate(zip(last_matrices(grad), last_matrices(update), strict=True)):
        bases = [last_matrices(basis)[block] for basis in stored]
        m, v = momentum[block], variance[block]
        is_wanted = is_due(steps, group) or bool(since[block] == 0)
        new = new_bases(g, steps, block, group) if is_wanted else None
        if new is not None:
            since[block] = float(step)
            if group.get("rotate_moments", False):
                turns = [old.mT @ basis for old, basis in zip(bases, new, strict=True)]
                m.copy_(rotate(m.clone(), turns, sides))
                v.copy_(rotate(v.clone(), [turn.square() for turn in turns], sides))
            for old, basis in zip(bases, new, strict=True):
                old.copy_(basis)
        low = project(g, bases, sides)
        m.mul_(beta1).add_(low, alpha=1.0 - beta1)
        v.mul_(beta2).addcmul_(low, low, value=1.0 - beta2)
        normal = m / (1.0 - beta1 ** float(step))
        normal /= (v / (1.0 - beta2 ** float(step))).sqrt() + epsilon_of(group)
        u.copy_(float(group.get("scale", 0.25)) * project_back(normal, bases, sides))
    move(param, update, group)
