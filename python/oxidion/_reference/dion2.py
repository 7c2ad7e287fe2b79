"""Dion2: orthonormalization of the strongest rows or columns of the momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from oxidion._reference.matrices import matrices, neurons, stack
from oxidion._reference.neurons import normalize_neurons, variance_of_neurons
from oxidion._reference.orthogonalize import orthogonalize, strongest
from oxidion._reference.update import Group, State, apply, ascending


def dion2_step(param: Tensor, grad: Tensor, state: State, group: Group, normalized: bool = False) -> None:
    """Dion2 (arXiv:2512.16928): the strongest rows or columns of the momentum, orthogonalized.

    ``M <- M + G``; K = `strongest` along the shorter side; ``U = orth(M[K])``; ``M[K] <- ef_decay M[K]``;
    decay of all of X; ``X[K] <- X[K] - lr s U`` with s of the whole matrix. NorDion2 takes rows, calls the
    factor ``mu`` and normalizes the neurons of U.
    """
    momentum = state.setdefault("momentum", torch.zeros_like(param))
    momentum += ascending(grad, group)
    if normalized:
        state.setdefault("variance_neuron", variance_of_neurons(param, group))
    update = torch.zeros_like(param, memory_format=torch.contiguous_format)
    keep = float(group["mu"] if normalized else group["ef_decay"])
    for at, (m, u) in enumerate(zip(matrices(momentum, group), matrices(update, group), strict=True)):
        if m.numel() == 0:
            continue
        dim = 0 if normalized or m.shape[0] <= m.shape[1] else 1
        chosen = strongest(m, dim, float(group["fraction"]))
        selected = orthogonalize(m.index_select(dim, chosen), group)
        if normalized:
            v = neurons(state["variance_neuron"], group)[at]
            part = v.index_select(0, chosen)
            # A flattened parameter is normalized in its own shape.
            inner = param.shape[1:] if group.get("flatten", False) else m.shape[1:]
            normal = selected.reshape(len(chosen), *inner)
            for u_block, v_block in zip(stack(normal), stack(part), strict=True):
                normalize_neurons(u_block, v_block, float(group["muon_beta2"]))
            v.index_copy_(0, chosen, part)
            selected = normal.reshape(selected.shape)
        u.index_copy_(dim, chosen, selected)
        m.index_copy_(dim, chosen, keep * m.index_select(dim, chosen))
    apply(param, update, group, state)
