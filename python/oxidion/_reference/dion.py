"""Dion: orthonormalized power iteration of the momentum, with error feedback."""

# d_out, d_in = rows and columns of the parameter; m, n = the same after orientation (m >= n); r = rank of Q.

from __future__ import annotations

import math

import torch
from torch import Tensor

from oxidion._reference.matrices import bases, matrices
from oxidion._reference.orthogonalize import epsilon_of
from oxidion._reference.update import Group, State, apply, ascending

# A column of R = B^T P whose norm is at most this share of that of R is rounding noise of float32.
DEAD_COLUMN = 2.0**-19
DEAD_COLUMN_OF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def rank_of_q(rows: int, cols: int, rank_fraction: float = 1.0, rank_multiple_of: int = 1) -> int:
    """Rank of Dion's Q: ``min(RM * ceil(rank_fraction * min(rows, cols) / RM), rows, cols)``, in float64."""
    rank = rank_multiple_of * math.ceil(rank_fraction * min(rows, cols) / rank_multiple_of)
    return min(rank, rows, cols)


def shape_of_q(
    rows: int, cols: int, rank_fraction: float = 1.0, rank_multiple_of: int = 1
) -> tuple[int, int]:
    """Shape of Dion's Q: ``(cols, r)`` where ``rows >= cols``, else ``(rows, r)``."""
    return min(rows, cols), rank_of_q(rows, cols, rank_fraction, rank_multiple_of)


def momentum_type(group: Group) -> torch.dtype:
    """The type that the momentum is stored in: by ``state_types``, else that of the parameter, or float64."""
    types: dict[str, torch.dtype] = group.get("state_types", {})
    parameters: torch.dtype = group.get("dtype", torch.float64)
    return types.get("momentum", parameters)


def product_type(group: Group) -> torch.dtype:
    """The type that products are rounded to: ``orth_dtype``, else by a parameter's ``dtype``, or float64."""
    name = group.get("orth_dtype")
    if name not in (None, "auto", "tf32"):
        return name if isinstance(name, torch.dtype) else getattr(torch, str(name))
    product = torch.promote_types(group.get("dtype", torch.float64), torch.float32)
    return torch.float64 if momentum_type(group) == torch.float64 else product


def operand_type(group: Group) -> torch.dtype:
    """The type whose bits the operands of products have: float16 for float32 in TF32, which devices have."""
    products = product_type(group)
    in_tf32 = group.get("on_device", False) and group.get("orth_dtype") in (None, "auto", "tf32")
    return torch.float16 if in_tf32 and products == torch.float32 else products


def stored_rounding(group: Group) -> float:
    """Returns the average relative rounding of a momentum element: a quarter of a unit in the last place.

    For 8-bit values it is 2^-6. Operands of products may be rounded more: in TF32 as float16 is.
    """
    dtype = momentum_type(group)
    stored = float(torch.finfo(dtype).eps / 4.0) if dtype.is_floating_point else 2.0**-6
    return max(stored, float(torch.finfo(operand_type(group)).eps / 4.0))


def own_directions(product: Tensor, rounding: float, stored: float | None, own: float = 0.0) -> Tensor:
    """Orthonormal columns of ``product`` [m, r], m >= r, by Gram-Schmidt; zero where one depends on others.

    With columns divided by the size of their rounding, one that is ``X y + rho q``, with X the kept ones
    before it and q its own direction, depends on them if ``rho <= 8 sqrt(1 + |y|^2)``: no more than
    rounding makes of it and of X. That size is ``rounding`` times the length of the longest column or, if
    that is more, a quarter of ``stored`` times the root mean square of all lengths: of what is stored
    twice the rounding counts, not 8 times. Without ``stored`` it is ``rounding`` times the length of
    each. Columns that are stored in 16 bits have another rounding, a quarter of ``own`` times their length.
    """
    peaks = product.abs().amax(dim=0)
    peaks = peaks if stored is None else peaks.max().expand_as(peaks)
    unit = product / peaks.masked_fill(peaks == 0, 1.0)
    lengths = unit.norm(dim=0)
    sizes = rounding * lengths
    if stored is not None:
        sizes = torch.maximum(sizes.max(), stored / 4.0 * lengths.square().mean().sqrt()).expand_as(sizes)
    sizes = torch.hypot(sizes, own / 4.0 * lengths)
    unit = unit / sizes.masked_fill(sizes == 0, 1.0)
    basis, inverse = torch.zeros_like(unit), torch.zeros(unit.shape[1], unit.shape[1], dtype=unit.dtype)
    for j, column in enumerate(unit.T):
        rest, shares = column.clone(), torch.zeros_like(inverse[0])
        for _ in range(2):  # The second time takes away what rounding left.
            again = basis.mT @ rest
            rest -= basis @ again
            shares += again
        rho, y = rest.norm(), inverse @ shares
        if rho > 8.0 * (1.0 + y.square().sum()).sqrt():
            basis[:, j] = rest / rho
            inverse[:, j] = -y / rho
            inverse[j, j] = 1.0 / rho
    return basis


def right_factor(r_nr: Tensor, q_old: Tensor, dead: Tensor, rounding: float, own: float = 0.0) -> Tensor:
    """Q of ``right_factor="orthonormal"``: Gram-Schmidt of the live columns of R [n, r], in their order.

    One of them that depends on those before it, each with a rounding of ``rounding`` times its length, is
    divided by its length. Dead ones keep their column of ``q_old``, less what it has of the new ones, at
    length 1; unchanged where less than 1/1024 of it is left, or where no column is live.
    """
    if bool(dead.all()):
        return q_old.clone()
    live = r_nr[:, ~dead] / r_nr[:, ~dead].norm(dim=0)
    basis = own_directions(live, rounding, None, own)
    basis = torch.where((basis == 0).all(dim=0), live, basis)
    old = q_old[:, dead]
    rest = old - basis @ (basis.mT @ old)
    lengths = rest.norm(dim=0)
    has_own = lengths > old.norm(dim=0) / 1024.0
    q_nr = torch.empty_like(q_old)
    q_nr[:, ~dead] = basis
    q_nr[:, dead] = torch.where(has_own, rest / lengths, old)
    return q_nr


def dion_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """Dion (arXiv:2504.05295) on each of the matrices that the group reads the parameter as.

    With B the momentum, transposed where ``d_out < d_in``: ``M <- M + G``; ``power_iters`` times
    ``P = orth(B Q); R = B^T P``, with R as the next Q; ``M <- M - (1 - mu) P R^T``;
    ``Q <- R / (||R||_col + epsilon)``, or the Q factor of R; ``X <- (1 - lr wd) X - lr s P Q^T``, with s of
    ``adjust_lr``.

    Columns of R at rounding level, and those whose column of B Q depends on the ones before it, add nothing
    to M or X and keep their column of Q. So do columns at that level compared with epsilon, but these add to
    M. A non-finite momentum turns parameter and state into NaN. ``group["transposed"]``, where set, says
    which orientation to take; otherwise the largest matrix decides for all.
    """
    momentum = state.setdefault("momentum", torch.zeros_like(param))
    momentum += ascending(grad, group)
    blocks = matrices(param, group)
    shapes = [(block.shape[0], block.shape[1]) for block in blocks]
    largest = max(shapes, key=lambda shape: shape[0] * shape[1], default=(0, 0))
    transposed = group.get("transposed")
    transposed = largest[0] < largest[1] if transposed is None else bool(transposed)
    update = torch.zeros_like(param, memory_format=torch.contiguous_format)
    lists = (matrices(x, group) for x in (update, momentum))
    for u, m, q in zip(*lists, bases(state["Q"], group, shapes, transposed), strict=True):
        if u.numel():
            fraction, multiple = group.get("rank_fraction", 1.0), group.get("rank_multiple_of", 1)
            rank = rank_of_q(u.shape[0], u.shape[1], fraction, multiple)
            u.copy_(dion_update(m, q[:, :rank], group, transposed))
    apply(param, update, group, state)


def dion_update(momentum: Tensor, q_old: Tensor, group: Group, transposed: bool) -> Tensor:
    """Dion's update of one matrix, whose momentum has the gradient in it."""
    if not bool(momentum.isfinite().all()):
        for tensor in (momentum, q_old):
            tensor.fill_(math.nan)
        return momentum
    b_mn = momentum.mT if transposed else momentum
    products = product_type(group)
    r_nr = q_old
    # Products of 16 bits are summed in float32 and rounded once, by half a unit in the last place.
    is_narrow = products.itemsize == 2
    own = torch.finfo(products).eps * 0.25 if is_narrow else 0.0
    rounding = torch.finfo(torch.float32 if is_narrow else products).eps
    stored = stored_rounding(group)
    for iteration in range(int(group.get("power_iters", 1))):
        product = b_mn @ r_nr
        if iteration == 0:
            p_mr = own_directions(product, rounding, stored, own)
        else:
            p_mr = own_directions(product, max(rounding, stored / 4.0), None, own)
        r_nr = b_mn.mT @ p_mr
    norms = r_nr.norm(dim=0)
    share = DEAD_COLUMN_OF.get(operand_type(group), DEAD_COLUMN)
    noise, epsilon = norms <= share * norms.norm(), epsilon_of(group)
    captured = p_mr.masked_fill(noise, 0.0) @ r_nr.mT
    dead = noise | (norms <= share * epsilon)
    p_mr = p_mr.masked_fill(dead, 0.0)
    b_mn -= (1.0 - float(group["mu"])) * captured
    if group.get("right_factor", "column") == "orthonormal":
        q_nr = right_factor(r_nr, q_old, dead, max(rounding, stored / 4.0), own)
    else:
        q_nr = torch.where(dead, q_old, r_nr / (norms + epsilon))
    q_old.copy_(q_nr)
    update = p_mr @ q_nr.mT
    return update.mT if transposed else update
