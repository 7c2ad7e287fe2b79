"""Rows made orthogonal by the kernels of ``jacobi.cu`` on the host emulator, and what has to hold then."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .emulator.library import Emulated

PAIR, THREADS = 64, 256
ANGLES_BYTES, TURNED_BYTES = 84488, 66560
SWEEPS, TOLERANCE = 12, 32 * 2.0**-52
DOUBLE = torch.float64


class Jacobi(ctypes.Structure):
    """Mirror of ``Jacobi``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("w", "j", "turns", "is_turned", "moved", "norms")),
        ("tolerance", ctypes.c_double),
        *((name, ctypes.c_int) for name in ("size", "sweep", "round", "sweeps")),
    )


def rotated(
    kernels: Emulated, matrices: Tensor, *, sweeps: int = SWEEPS, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """``J W`` and J of matrices [B, k, k], padded to multiples of 64, and how many sweeps each took."""
    count, k, _ = matrices.shape
    size = -(-k // PAIR) * PAIR
    pairs = size // PAIR
    w = torch.zeros(count, size, size, dtype=DOUBLE)
    w[:, :k, :k] = matrices
    j = torch.eye(size, dtype=DOUBLE).repeat(count, 1, 1)
    turns = torch.full((count * pairs, PAIR, PAIR), float("nan"), dtype=DOUBLE)
    is_turned = torch.full((count * pairs,), float("nan"), dtype=DOUBLE)
    moved = torch.zeros(count, sweeps, dtype=DOUBLE)
    norms = w.flatten(1).norm(dim=1)
    tensors = [w, j, turns, is_turned, moved, norms]
    addresses = [tensor.data_ptr() for tensor in tensors]

    def launch(form: str, blocks: int, shared: int, sweep: int = 0, round_: int = 0) -> None:
        kernels.launch(
            f"jacobi_{form}",
            Jacobi(*addresses, TOLERANCE, size, sweep, round_, sweeps),
            blocks=blocks,
            threads=THREADS,
            shared_bytes=shared,
            readable=tensors,
            seed=seed,
        )

    for sweep in range(sweeps):
        for round_ in range(2 * pairs - 1):
            launch("angles", count * pairs, ANGLES_BYTES, sweep, round_)
            launch("turn", count * pairs * 2 * pairs, TURNED_BYTES, sweep, round_)
        if not moved[:, sweep].any():
            break  # the others would return at once
    launch("end", count * size, 0)
    return w, j, moved.sum(dim=1)


def check(kernels: Emulated, matrices: Tensor, *, seed: int = 0) -> Tensor:
    """Asserts what makes a singular value decomposition; the sweeps that it took."""
    w, j, sweeps = rotated(kernels, matrices, seed=seed)
    count, k, _ = matrices.shape
    size = j.shape[-1]
    padded = torch.zeros(count, size, size, dtype=DOUBLE)
    padded[:, :k, :k] = matrices
    eye, norm = torch.eye(size, dtype=DOUBLE), matrices.flatten(1).norm(dim=1)
    assert (j @ j.mT - eye).abs().max() < 2e-15 * size
    for z in range(count):
        scale = float(norm[z]) or 1.0
        assert (j[z] @ padded[z] - w[z]).abs().max() <= 1e-14 * scale
        products = (w[z] @ w[z].mT).fill_diagonal_(0.0)
        assert products.abs().max() <= 1e-14 * scale**2
        values = w[z].norm(dim=1).sort(descending=True).values
        expected = torch.linalg.svdvals(padded[z])
        assert (values - expected).abs().max() <= 1e-13 * scale
        # What fills up the matrix stays where it is.
        assert torch.equal(j[z, k:, :k], torch.zeros(size - k, k, dtype=DOUBLE))
    return sweeps
