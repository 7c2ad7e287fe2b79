"""Normalization of an update by neuron, and the variance that it keeps."""

from __future__ import annotations

from torch import Tensor

from oxidion._reference.matrices import is_split, matrices, neurons, stack
from oxidion._reference.update import Group


def normalize_neurons(u: Tensor, v: Tensor, beta2: float) -> None:
    """NorMuon's normalization (arXiv:2510.05491) of a matrix ``[r, c]`` by its V ``[r, 1]``, in place.

    ``V <- beta2 V + (1 - beta2) mean_j U_ij^2``; ``U <- U / (sqrt(V) + 1e-8)``; then U is brought back to
    the Frobenius norm that it had.
    """
    norm = u.norm()
    v.mul_(beta2).add_(u.square().mean(dim=-1, keepdim=True), alpha=1.0 - beta2)
    u /= v.sqrt() + 1e-8
    u *= norm / max(float(u.norm()), 1e-8)


def normalize_each(u: Tensor, v: Tensor, group: Group) -> None:
    """`normalize_neurons` for every matrix of the view; where flattened, over the last two dimensions."""
    flat = group.get("flatten", False)
    pairs = (stack(u), stack(v)) if flat else (matrices(u, group), neurons(v, group))
    for u_block, v_block in zip(*pairs, strict=True):
        normalize_neurons(u_block, v_block, float(group["muon_beta2"]))


def variance_of_neurons(param: Tensor, group: Group) -> Tensor:
    """V at the start: a number for each row over the last dimension, in each block of columns of its own."""
    by_column = group.get("split_dim") == 1 and is_split(group)
    blocks = len(matrices(param, group)) // len(stack(param)) if by_column else 1
    return param.new_zeros(*param.shape[:-1], blocks)
