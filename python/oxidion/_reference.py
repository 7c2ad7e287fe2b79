"""Naive float64 steps of the optimizers, one parameter at a time, straight from the equations.

Every function has the signature ``step(param, grad, state, group)`` and updates ``param`` and ``state`` in
place. ``param`` and ``grad`` are float64 tensors of one shape; ``group`` holds the hyper-parameters under the
keys of a parameter group; ``state`` uses one set of role names for all classes: ``momentum``, ``variance``,
``max_variance`` (with ``amsgrad``), ``step``, ``variance_neuron`` and ``Q`` (Dion). Missing entries except
``Q`` start at zero.

Nothing here calls the compiled core: ``verify()`` and the tests compare the core with these functions.
"""

# d_out, d_in = rows and columns of the parameter; m, n = the same after orientation (m >= n); r = rank of Q.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from oxidion._matrices import bases, matrices, neurons, stack
from oxidion._orthogonalize import epsilon_of, lr_factor, orthogonalize, strongest
from oxidion._reference_factored import adafactor_step, came_step, lamb_step

State = dict[str, Tensor]
Group = Mapping[str, Any]
Step = Callable[[Tensor, Tensor, State, Group], None]

# A column of R = B^T P whose norm is below this share of the largest one is rounding noise of float32.
DEAD_COLUMN = 2.4e-7


def rank_of_q(rows: int, cols: int, rank_fraction: float = 1.0, rank_multiple_of: int = 1) -> int:
    """Rank of Dion's Q: ``min(RM * ceil(rank_fraction * min(rows, cols) / RM), rows, cols)``, in float64."""
    rank = rank_multiple_of * math.ceil(rank_fraction * min(rows, cols) / rank_multiple_of)
    return min(rank, rows, cols)


def shape_of_q(
    rows: int, cols: int, rank_fraction: float = 1.0, rank_multiple_of: int = 1
) -> tuple[int, int]:
    """Shape of Dion's Q: ``(cols, r)`` where ``rows >= cols``, else ``(rows, r)``."""
    return min(rows, cols), rank_of_q(rows, cols, rank_fraction, rank_multiple_of)


def betas_of(group: Group) -> tuple[float, float]:
    """``beta1, beta2`` of a group that holds either those keys or ``betas``."""
    if "beta1" in group and "beta2" in group:
        return float(group["beta1"]), float(group["beta2"])
    beta1, beta2 = group["betas"]
    return float(beta1), float(beta2)


def decay(param: Tensor, direction: Tensor, group: Group) -> None:
    """Decay ``X <- (1 - lr * weight_decay) X``; with ``cautious_wd`` only where ``X * direction >= 0``."""
    rate = float(group["lr"]) * float(group.get("weight_decay", 0.0))
    if group.get("cautious_wd", False):
        param -= rate * param * (param * direction >= 0)
    else:
        param -= rate * param


def orthonormal_columns(p: Tensor) -> Tensor:
    """Q of a Householder QR of ``p`` [m, r], m >= r."""
    q: Tensor = torch.linalg.qr(p, mode="reduced")[0]
    return q


def dion_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """Dion (arXiv:2504.05295) on each of the matrices that the group reads the parameter as.

    With B the momentum, transposed where ``d_out < d_in``: ``M <- M + G``; ``power_iters`` times
    ``P = orth(B Q); R = B^T P``, with R as the next Q; ``M <- M - (1 - mu) P R^T``;
    ``Q <- R / (||R||_col + epsilon)``; ``X <- (1 - lr wd) X - lr s P Q^T``, with s of ``adjust_lr``.

    Columns of R at rounding level, and all columns where B Q is zero, add nothing to M or X and keep their
    column of Q. A non-finite momentum turns parameter and state into NaN. ``group["transposed"]``, where set,
    says which orientation to take; otherwise the largest matrix decides for all.
    """
    momentum = state.setdefault("momentum", torch.zeros_like(param))
    momentum += -grad if group.get("maximize", False) else grad
    blocks = matrices(param, group)
    shapes = [(block.shape[0], block.shape[1]) for block in blocks]
    largest = max(shapes, key=lambda shape: shape[0] * shape[1], default=(0, 0))
    transposed = group.get("transposed")
    transposed = largest[0] < largest[1] if transposed is None else bool(transposed)
    parts = zip(blocks, matrices(momentum, group), bases(state["Q"], group, shapes, transposed), strict=True)
    for x, m, q in parts:
        if x.numel():
            fraction, multiple = group.get("rank_fraction", 1.0), group.get("rank_multiple_of", 1)
            rank = rank_of_q(x.shape[0], x.shape[1], fraction, multiple)
            dion_matrix(x, m, q[:, :rank], group, transposed)


def dion_matrix(param: Tensor, momentum: Tensor, q_old: Tensor, group: Group, transposed: bool) -> None:
    """Dion on one matrix, whose momentum has the gradient in it."""
    d_out, d_in = param.shape
    if not bool(momentum.isfinite().all()):
        for tensor in (param, momentum, q_old):
            tensor.fill_(math.nan)
        return
    b_mn = momentum.mT if transposed else momentum
    r_nr = q_old
    for _ in range(int(group.get("power_iters", 1))):
        product = b_mn @ r_nr
        p_mr = orthonormal_columns(product)
        r_nr = b_mn.mT @ p_mr
    norms = r_nr.norm(dim=0)
    dead = (norms <= DEAD_COLUMN * norms.max()) | (product == 0).all()
    p_mr = p_mr.masked_fill(dead, 0.0)
    r_nr = r_nr.masked_fill(dead, 0.0)

    captured = p_mr @ r_nr.mT
    b_mn -= (1.0 - float(group["mu"])) * captured
    q_nr = torch.where(dead, q_old, r_nr / (norms + epsilon_of(group)))
    update = p_mr @ q_nr.mT
    update = update.mT if transposed else update
    decay(param, update, group)
    param -= float(group["lr"]) * lr_factor(group.get("adjust_lr", "spectral_norm"), d_out, d_in) * update
    q_old.copy_(q_nr)


def apply(param: Tensor, update: Tensor, group: Group) -> None:
    """Decay and ``X <- X - lr s U``, with s of ``adjust_lr``, for each matrix of the view."""
    decay(param, update, group)
    for x, u in zip(matrices(param, group), matrices(update, group), strict=True):
        x -= float(group["lr"]) * lr_factor(group.get("adjust_lr", "spectral_norm"), *u.shape) * u


def normalize_neurons(u: Tensor, v: Tensor, beta2: float) -> None:
    """NorMuon's normalization (arXiv:2510.05491) of a matrix ``[r, c]`` by its V ``[r, 1]``, in place.

    ``V <- V + (1 - beta2) (mean_j U_ij^2 - V)``; ``U <- U / (sqrt(V) + 1e-8)``; then U is brought back to
    the Frobenius norm that it had.
    """
    norm = u.norm()
    v += (1.0 - beta2) * (u.square().mean(dim=-1, keepdim=True) - v)
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
    blocks = len(matrices(param, group)) if group.get("split_dim") == 1 else 1
    return param.new_zeros(*param.shape[:-1], blocks)


def muon_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """Muon on one parameter: orthogonalized momentum.

    ``M <- mu M + G``; ``U = orth(mu M + G)`` with ``nesterov``, else ``orth(M)``; decay; ``X <- X - lr s U``,
    with s of ``adjust_lr``, per matrix of the view.
    """
    apply(param, muon_update(param, grad, state, group), group)


def muon_update(param: Tensor, grad: Tensor, state: State, group: Group) -> Tensor:
    """The orthogonalized momentum of Muon."""
    grad = -grad if group.get("maximize", False) else grad
    mu = float(group["mu"])
    momentum = state.setdefault("momentum", torch.zeros_like(param))
    momentum.mul_(mu).add_(grad)
    direction = mu * momentum + grad if group.get("nesterov", False) else momentum
    update = torch.zeros_like(param, memory_format=torch.contiguous_format)
    for u, m in zip(matrices(update, group), matrices(direction.contiguous(), group), strict=True):
        u.copy_(orthogonalize(m, group))
    return update


def normuon_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """NorMuon (arXiv:2510.05491): Muon whose update is normalized by neuron before it is applied."""
    update = muon_update(param, grad, state, group)
    variance = state.setdefault("variance_neuron", variance_of_neurons(param, group))
    normalize_each(update, variance, group)
    apply(param, update, group)


def dion2_step(param: Tensor, grad: Tensor, state: State, group: Group, normalized: bool = False) -> None:
    """Dion2 (arXiv:2512.16928): the strongest rows or columns of the momentum, orthogonalized.

    ``M <- M + G``; K = `strongest` along the shorter side; ``U = orth(M[K])``; ``M[K] <- ef_decay M[K]``;
    decay of all of X; ``X[K] <- X[K] - lr s U`` with s of the whole matrix. NorDion2 takes rows, calls the
    factor ``mu`` and normalizes the neurons of U.
    """
    momentum = state.setdefault("momentum", torch.zeros_like(param))
    momentum += -grad if group.get("maximize", False) else grad
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
    apply(param, update, group)


def nordion2_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """NorDion2 (Dion3): see `dion2_step`."""
    dion2_step(param, grad, state, group, normalized=True)


def adamw_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """AdamW (arXiv:1711.05101), bias-corrected, epsilon outside the root.

    Decay, then ``X <- X - lr m_hat / (sqrt(v_hat) + eps)``. With ``amsgrad`` the denominator takes the
    running maximum of v. ``cautious_wd`` decays where ``m X >= 0``. With ``decay_order="galore"`` the decay
    comes last.
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
    late = group.get("decay_order", "torch") == "galore"
    if not late:
        decay(param, momentum, group)
    param -= float(group["lr"]) * corrected1 / (corrected2.sqrt() + epsilon_of(group))
    if late:
        decay(param, momentum, group)


def lion_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """Lion (arXiv:2302.06675): sign of an interpolated momentum.

    ``U = sign(b1 m + (1 - b1) g)``, NaN where that is not finite; ``m <- b2 m + (1 - b2) g``; decay;
    ``X <- X - lr U``.
    """
    grad = -grad if group.get("maximize", False) else grad
    beta1, beta2 = betas_of(group)
    momentum = state.setdefault("momentum", torch.zeros_like(param))
    mixed = beta1 * momentum + (1.0 - beta1) * grad
    update = torch.where(mixed.isfinite(), mixed.sign(), math.nan)
    momentum.mul_(beta2).add_(grad, alpha=1.0 - beta2)
    decay(param, update, group)
    param -= float(group["lr"]) * update


def _packed(step: Step) -> Step:
    """The same on tensors of any strides: views as matrices need those of rows."""

    def packed(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
        whole = param.contiguous()
        for key, value in state.items():
            state[key] = value.contiguous()
        step(whole, grad.contiguous(), state, group)
        if whole is not param:
            param.copy_(whole)

    return packed


REFERENCE: dict[str, Step] = {
    "dion": _packed(dion_step),
    "dion2": _packed(dion2_step),
    "nordion2": _packed(nordion2_step),
    "muon": _packed(muon_step),
    "normuon": _packed(normuon_step),
    "adamw": adamw_step,
    "lion": lion_step,
    "lamb": lamb_step,
    "adafactor": adafactor_step,
    "came": came_step,
}
"""The naive step of each algorithm, by the name that a parameter group gives."""

from oxidion import _reference_low_rank as _reference_low_rank  # noqa: E402  (adds its steps)
