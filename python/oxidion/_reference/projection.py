"""Projection of gradients to a low rank, and the moments of what is left of them.

The projections of a matrix are called ``proj``, and ``proj_right`` for the second one where both sides are
projected. ``group["stream"]`` is the parameter's entry of ``Plan.streams``, 0 if missing: random numbers and
staggered steps depend on it.
"""

# m, n = rows and columns of a matrix; d, e = the projected side and the other one; r = rank.

from __future__ import annotations

import torch
from torch import Tensor

from oxidion._oxidion import fill_normal, fill_signs
from oxidion._reference.update import Group, ascending, decay

OVERSAMPLING = 16
SKETCH_TAG = 2


def sides_of(rows: int, cols: int, group: Group) -> tuple[int, ...]:
    """The sides that are projected: 0 is the rows, 1 the columns."""
    kind = group.get("proj_type", "std")
    if kind == "full":
        return 0, 1
    if kind == "unsharded":
        turned = group.get("transposed")
        return (0,) if (rows < cols if turned is None else turned) else (1,)
    left = {"std": rows < cols, "reverse_std": rows >= cols, "left": True, "right": False}[kind]
    return (0,) if left else (1,)


def is_projected(param: Tensor, group: Group) -> bool:
    """True for a parameter of matrices with sides longer than the rank."""
    rank = group.get("rank")
    return rank is not None and param.ndim >= 2 and rank < min(param.shape[-2:])


def is_due(steps: int, group: Group) -> bool:
    """Returns True if a step after ``steps`` others recomputes the projection."""
    gap = int(group.get("update_proj_gap", 200))
    place = (int(group.get("stream", 0)) * 0x9E3779B9) & 0xFFFFFFFF
    offset = (place * gap) >> 32 if group.get("stagger", False) else 0
    return steps == 0 or (steps + offset) % gap == 0


def leading_vectors(grad: Tensor, side: int, group: Group, omega_ds: Tensor | None) -> Tensor | None:
    """Returns the first singular vectors [d, r] of a side, or of its sketch; None if it is not finite.

    A sketch ``Y = G G^T Omega`` stands for ``Y (Omega^T Y)^+ Y^T``. The entry of largest magnitude of each
    vector is positive. With ``svd="exact"`` and not ``on_device``, signs are those that torch gives the
    vectors of the gradient before ``maximize``.
    """
    if not bool(grad.isfinite().all()):
        return None
    rank, a_de = int(group["rank"]), grad.mT if side == 1 else grad
    if omega_ds is not None:
        y_ds = a_de @ (a_de.mT @ omega_ds)
        middle = torch.linalg.pinv(omega_ds.mT @ y_ds, rtol=1e-13, hermitian=True)
        vectors, values, _ = torch.linalg.svd(y_ds @ middle @ y_ds.mT)
    else:
        # Of the gradient as it was given, not of its negative: a sign in front of it turns vectors.
        given = ascending(grad, group)
        left, values, right = torch.linalg.svd(given, full_matrices=False)
        vectors = right.mT if side == 1 else left
    vectors, values = vectors[:, :rank], values[:rank]
    largest = vectors.abs().argmax(dim=0, keepdim=True)
    # Twice the size that rounding of the squares in a Gram matrix leaves.
    alive = values > 1e-7 * values.max() if omega_ds is None else values > 1e-12 * values.max()
    if group.get("svd") != "exact" or group.get("on_device"):
        vectors = vectors * vectors.gather(0, largest).sign()
    found: Tensor = vectors * alive
    return found


def normal_numbers(
    rows: int, cols: int, group: Group, *, tag: int, step: int, block: int, scale: float
) -> Tensor:
    """Normal numbers [rows, cols] of the counter-based generator."""
    numbers = torch.empty((block + 1) * rows * cols)
    fill_normal(numbers, int(group.get("seed", 0)), int(group.get("stream", 0)), tag=tag, step=step)
    # Scaled in float32, as the core does.
    return (numbers[block * rows * cols :].view(rows, cols) * scale).double()


def new_bases(grad: Tensor, steps: int, block: int, group: Group) -> list[Tensor] | None:
    """The projections of one matrix, None where one of them does not exist or has no direction."""
    found = []
    for side in sides_of(grad.shape[0], grad.shape[1], group):
        d, cols, omega = grad.shape[side], int(group["rank"]) + OVERSAMPLING, None
        if group.get("svd", "gram") == "random" and 2 * cols < d:
            omega = torch.zeros(d, cols, dtype=torch.float64)
            seed, stream = int(group.get("seed", 0)), int(group.get("stream", 0))
            fill_signs(omega, seed, stream, SKETCH_TAG + side, steps, block)
        basis = leading_vectors(grad, side, group, omega)
        if basis is None or not bool(basis.any()):
            return None
        found.append(basis)
    return found


def project(grad: Tensor, bases: list[Tensor], sides: tuple[int, ...]) -> Tensor:
    """``G V``, ``U^T G`` or ``U^T G V``; zero before there is a projection."""
    if not all(bool(basis.any()) for basis in bases):
        rows, cols = (bases[sides.index(s)].shape[1] if s in sides else grad.shape[s] for s in (0, 1))
        return grad.new_zeros(rows, cols)
    for side, basis in zip(sides, bases, strict=True):
        grad = basis.mT @ grad if side == 0 else grad @ basis
    return grad


def project_back(low: Tensor, bases: list[Tensor], sides: tuple[int, ...]) -> Tensor:
    """``N V^T``, ``U N`` or ``U N V^T``."""
    for side, basis in zip(sides, bases, strict=True):
        low = basis @ low if side == 0 else low @ basis.mT
    return low


def rotate(moment: Tensor, turns: list[Tensor], sides: tuple[int, ...]) -> Tensor:
    """A moment in new bases; ``turns`` are ``V_old^T V_new``."""
    for side, turn in zip(sides, turns, strict=True):
        moment = turn.mT @ moment if side == 0 else moment @ turn
    return moment


def move(param: Tensor, update: Tensor, group: Group) -> None:
    """``X <- X - lr U``, with decay before it or, with ``decay_order="galore"``, after it."""
    late = group.get("decay_order", "torch") == "galore"
    if not late:
        decay(param, update, group)
    param -= float(group["lr"]) * update
    if late:
        decay(param, update, group)


def low_rank_shape(param: Tensor, group: Group) -> tuple[int, ...]:
    """The shape of the moments."""
    rows, cols = param.shape[-2:]
    sides = sides_of(rows, cols, group)
    size = [int(group["rank"]) if side in sides else param.shape[side - 2] for side in (0, 1)]
    return *param.shape[:-2], *size


def last_matrices(x: Tensor) -> Tensor:
    """The matrices of the last two dimensions, as a view."""
    return x.view(-1, *x.shape[-2:])
