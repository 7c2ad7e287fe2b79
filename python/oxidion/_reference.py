"""Naive float64 steps of the optimizers, one parameter at a time, straight from the equations.

Every function has the signature ``step(param, grad, state, group)`` and updates ``param`` and ``state`` in
place. ``param`` and ``grad`` are float64 tensors of one shape; ``group`` holds the hyper-parameters under the
keys of a parameter group; ``state`` uses one set of role names for all classes: ``momentum``, ``variance``,
``max_variance`` (with ``amsgrad``), ``step`` and ``Q`` (Dion). Missing entries except ``Q`` start at zero.

Nothing here calls the compiled core: ``verify()`` and the tests compare the core with these functions.
"""

# d_out, d_in = rows and columns of the parameter; m, n = the same after orientation (m >= n); r = rank of Q.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
Group = Mapping[str, Any]
Step = Callable[[Tensor, Tensor, State, Group], None]

# A column of R = B^T P whose norm is below this share of the largest one is rounding noise of float32.
DEAD_COLUMN = 2.4e-7

POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def rank_of_q(rows: int, cols: int, rank_fraction: float = 1.0, rank_multiple_of: int = 1) -> int:
    """Rank of Dion's Q: ``min(RM * ceil(rank_fraction * min(rows, cols) / RM), rows, cols)``, in float64."""
    rank = rank_multiple_of * math.ceil(rank_fraction * min(rows, cols) / rank_multiple_of)
    return min(rank, rows, cols)


def shape_of_q(
    rows: int, cols: int, rank_fraction: float = 1.0, rank_multiple_of: int = 1
) -> tuple[int, int]:
    """Shape of Dion's Q: ``(cols, r)`` where ``rows >= cols``, else ``(rows, r)``."""
    return min(rows, cols), rank_of_q(rows, cols, rank_fraction, rank_multiple_of)


def epsilon_of(group: Group) -> float:
    """``epsilon`` of a group, which some classes call ``eps``."""
    return float(group["eps"] if "eps" in group else group.get("epsilon", 1e-8))


def betas_of(group: Group) -> tuple[float, float]:
    """``beta1, beta2`` of a group that holds either those keys or ``betas``."""
    if "beta1" in group and "beta2" in group:
        return float(group["beta1"]), float(group["beta2"])
    beta1, beta2 = group["betas"]
    return float(beta1), float(beta2)


def orthogonalize(x: Tensor, group: Group) -> Tensor:
    """Odd matrix polynomial that drives the singular values of ``x`` towards 1.

    ``X <- X / (s ||X||_F + epsilon)``, then five times ``A = X X^T; X <- a X + (b A + c A A) X``. ``s`` is
    1.02 for Polar Express (``use_polar_express``, the default) and 1 for Newton-Schulz.

    Args:
        x: One matrix or a batch ``[..., m, n]``, float64.
        group: Read for ``use_polar_express``, ``epsilon`` or ``eps``, and ``newton_schulz_func``.

    Returns:
        A new tensor of the shape of ``x``.
    """
    epsilon = epsilon_of(group)
    function = group.get("newton_schulz_func")
    if function is not None:
        result: Tensor = function(x, epsilon=epsilon)
        return result.to(x.dtype)
    polar = group.get("use_polar_express", True)
    transposed = x.shape[-2] > x.shape[-1]
    x = x.mT if transposed else x
    norm = x.square().sum(dim=(-2, -1), keepdim=True).sqrt()
    x = x / ((1.02 if polar else 1.0) * norm + epsilon)
    for a, b, c in POLAR_EXPRESS if polar else NEWTON_SCHULZ:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if transposed else x


def lr_factor(adjust_lr: str | None, d_out: int, d_in: int) -> float:
    """Learning-rate factor of one ``d_out x d_in`` matrix under ``adjust_lr``."""
    if min(d_out, d_in) == 0 or adjust_lr is None:
        return 1.0
    if adjust_lr == "spectral_norm":
        return math.sqrt(d_out / d_in)
    if adjust_lr == "original":
        return math.sqrt(max(1.0, d_out / d_in))
    if adjust_lr in ("rms_norm", "match_rms_adamw"):
        return 0.2 * math.sqrt(max(d_out, d_in))
    raise ValueError(f"unknown adjust_lr {adjust_lr!r}")


def scaled_orthogonal(u: Tensor, group: Group) -> Tensor:
    """Orthogonalized ``u`` times its learning-rate factor, per matrix of the view that the group asks for.

    Views: row blocks (``split_sizes``), heads (``num_heads``: ``[h, d_out / h, d_in]``), one ``[d0, rest]``
    matrix (``flatten``), otherwise the last two dimensions, with all earlier ones as batch.
    """
    adjust = group.get("adjust_lr", "spectral_norm")
    if group.get("split_sizes"):
        blocks = torch.split(u, list(group["split_sizes"]), dim=0)
        return torch.cat([lr_factor(adjust, *b.shape) * orthogonalize(b, group) for b in blocks])
    heads = group.get("num_heads") or 1
    view = u
    if heads > 1:
        view = u.reshape(heads, u.shape[0] // heads, u.shape[1])
    elif group.get("flatten", False) and u.ndim > 2:
        view = u.reshape(u.shape[0], math.prod(u.shape[1:]))
    if view.ndim < 2:
        raise ValueError(f"muon needs a matrix, got shape {tuple(u.shape)}")
    factor = lr_factor(adjust, view.shape[-2], view.shape[-1])
    return (factor * orthogonalize(view, group)).reshape(u.shape)


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
    """Dion (arXiv:2504.05295) on one matrix, or on each of the matrices in the last two dimensions.

    With B the momentum, transposed where ``d_out < d_in``: ``M <- M + G``; ``power_iters`` times
    ``P = orth(B Q); R = B^T P``, with R as the next Q; ``M <- M - (1 - mu) P R^T``;
    ``Q <- R / (||R||_col + epsilon)``; ``X <- (1 - lr wd) X - lr sqrt(d_out / d_in) P Q^T``.

    Columns of R at rounding level, and all columns where B Q is zero, add nothing to M or X and keep their
    column of Q. A non-finite momentum turns parameter and state into NaN. ``group["transposed"]``, where set,
    says which orientation to take.
    """
    if param.ndim < 2:
        raise ValueError(f"dion needs a matrix, got shape {tuple(param.shape)}")
    momentum = state.setdefault("momentum", torch.zeros_like(param))
    q_old = state["Q"]
    if param.ndim > 2:
        for x, g, m, q in zip(param, grad, momentum, q_old, strict=True):
            dion_step(x, g, {"momentum": m, "Q": q}, group)
        return
    d_out, d_in = param.shape
    momentum += -grad if group.get("maximize", False) else grad
    if param.numel() == 0:
        return
    if not bool(momentum.isfinite().all()):
        for tensor in (param, momentum, q_old):
            tensor.fill_(math.nan)
        return

    transposed = group.get("transposed")
    transposed = d_out < d_in if transposed is None else transposed
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
    param -= float(group["lr"]) * math.sqrt(d_out / d_in) * update
    state["Q"].copy_(q_nr)


def muon_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """Muon on one parameter: orthogonalized momentum.

    ``M <- mu M + G``; ``U = orth(mu M + G)`` with ``nesterov``, else ``orth(M)``; decay; ``X <- X - lr s U``,
    with s of ``adjust_lr``, per matrix of the view.
    """
    grad = -grad if group.get("maximize", False) else grad
    mu = float(group["mu"])
    momentum = state.setdefault("momentum", torch.zeros_like(param))
    momentum.mul_(mu).add_(grad)
    direction = mu * momentum + grad if group.get("nesterov", False) else momentum
    update = scaled_orthogonal(direction, group)
    decay(param, update, group)
    param -= float(group["lr"]) * update


def adamw_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """AdamW (arXiv:1711.05101), bias-corrected, epsilon outside the root.

    Decay, then ``X <- X - lr m_hat / (sqrt(v_hat) + eps)``. With ``amsgrad`` the denominator takes the
    running maximum of v. ``cautious_wd`` decays where ``m X >= 0``.
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
    decay(param, momentum, group)
    param -= float(group["lr"]) * corrected1 / (corrected2.sqrt() + epsilon_of(group))


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


REFERENCE: dict[str, Step] = {
    "dion": dion_step,
    "muon": muon_step,
    "adamw": adamw_step,
    "lion": lion_step,
}
"""The naive step of each algorithm, by the name that a parameter group gives."""
