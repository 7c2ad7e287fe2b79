"""Orthonormalization as functions, on torch tensors and on NumPy arrays.

Every function takes one matrix ``[m, n]`` or a stack ``[..., m, n]``, leaves it unchanged, and returns what
it was given: a tensor for a tensor, an array for an array, of the same dtype and shape.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from oxidion._oxidion import orthonormal_columns, polar_iteration

Matrix = TypeVar("Matrix", Tensor, "np.ndarray[Any, Any]")


def newton_schulz(x: Matrix, *, epsilon: float = 1e-8) -> Matrix:
    """Approximate polar factor by five Newton–Schulz steps: singular values within about 0.04 of 1.

    ``x`` is divided by ``‖x‖_F + epsilon`` first. Zero gives zero.

    Raises:
        ValueError: for fewer than two dimensions.
        TypeError: for anything but real floating-point matrices.
    """
    return polar_iteration(x, "newton_schulz", epsilon)


def polar_express(x: Matrix, *, epsilon: float = 1e-8) -> Matrix:
    """Approximate polar factor by five Polar Express steps (arXiv:2505.16932).

    ``x`` is divided by ``1.02·‖x‖_F + epsilon`` first. Zero gives zero.

    Raises:
        ValueError: for fewer than two dimensions.
        TypeError: for anything but real floating-point matrices.
    """
    return polar_iteration(x, "polar_express", epsilon)


def cholesky_qr(x: Matrix) -> Matrix:
    """Orthonormal columns that span those of ``x`` (``m >= n``): Cholesky QR, Householder where that fails.

    Raises:
        ValueError: for fewer than two dimensions or more columns than rows.
        TypeError: for anything but real floating-point matrices.
    """
    return orthonormal_columns(x, "cqr")


def power_iteration(m: Matrix, q: Matrix) -> tuple[Matrix, Matrix]:
    """One power iteration: ``p = orth(m·q)`` and ``r = mᵀ·p``.

    ``p·rᵀ`` is the best approximation of ``m`` with columns in the span of ``p``.

    Args:
        m: the matrix ``[m, n]``.
        q: the right factor ``[n, r]`` with ``r <= m``.

    Returns:
        ``p`` ``[m, r]`` with orthonormal columns, and ``r`` ``[n, r]``.

    Raises:
        ValueError: for shapes that do not fit.
        TypeError: for anything but real floating-point matrices.
    """
    if m.shape[-1] != q.shape[-2] or q.shape[-1] > m.shape[-2]:
        raise ValueError(
            f"q must be [n, r] with r <= m for m of shape {tuple(m.shape)}, got {tuple(q.shape)}"
        )
    p: Matrix = orthonormal_columns(m @ q, "cqr")
    transposed: Matrix = m.mT if isinstance(m, Tensor) else np.swapaxes(m, -1, -2)
    return p, transposed @ p
