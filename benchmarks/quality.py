"""Quality of an orthonormal update, on the device where its time was taken: a speed means little without it.

A step is taken from a weight of zeros, so the weight holds minus the update times learning rate and scale.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from contenders import LR, Contender
from harness import stepper
from workloads import DION2, DION_4, DION_16, MUON, NORDION2, NORMUON, Shape, Tensors, Workload, gradient

#: Least side of a matrix that is decomposed in float64, and shapes of a list.
MAX_SIDE, MAX_SHAPES = 4096, 4
DION_WARM_STEPS = 5
CPU = torch.device("cpu")
Figures = tuple[float, float, float]


def quality(
    entry: Contender, workload: Workload, device: torch.device = CPU, shapes: int = MAX_SHAPES
) -> dict[str, Any]:
    """Worst figures over the largest distinct shapes; none of families whose updates are not orthonormal.

    Returns:
        ``sigma_max``: largest singular value of U or of P (Dion);
        ``orthogonality``: largest ``||U U^T - I||_F / sqrt(rank)``, short side of U or P^T P (Dion);
        ``cosine``: smallest cosine to the exact result, computed in float64: the polar factor of what U was
        made of, or P Q^T from the same momentum and Q (Dion).

        U is the update; of Dion2 and NorDion2 its rows or columns that moved; of NorMuon and NorDion2 as it
        was before the normalization of its rows.
    """
    measures = {
        **dict.fromkeys((MUON, NORMUON, DION2, NORDION2), of_update),
        **dict.fromkeys((DION_4, DION_16), of_dion),
    }
    chosen = distinct(workload.matrices)[:shapes]
    if entry.family not in measures or not chosen:
        return {}
    rows = [measures[entry.family](entry, shape, device) for shape in chosen]
    sigma, orthogonality, cosines = zip(*rows, strict=True)
    return {"sigma_max": max(sigma), "orthogonality": max(orthogonality), "cosine": min(cosines)}


def distinct(shapes: Sequence[Shape]) -> list[Shape]:
    """The distinct shapes whose decomposition takes seconds, the largest first: a vector needs none."""
    eligible = {shape for shape in shapes if 1 < min(shape) <= MAX_SIDE}
    return sorted(eligible, key=lambda shape: (-math.prod(shape), shape))


def of_update(entry: Contender, shape: Shape, device: torch.device) -> Figures:
    """Of the update, or the part of it that was orthonormalized."""
    weight, [optimizer, *_] = _first_step(entry, shape, device)
    update, rows, columns = moved(-weight.detach().double() / (LR * scale(entry.source, shape)))
    variance = optimizer.state[weight].get("variance_neuron")
    if variance is not None:
        beta2 = optimizer.param_groups[0].get("muon_beta2", 0.0)
        update = before_normalization(update, variance.detach().double()[rows], beta2)
    if update.shape == shape:
        return *orthonormality(update), cosine(update, _polar_factor(shape, device))
    assert weight.grad is not None
    return *orthonormality(update), cosine(update, polar(weight.grad[rows][:, columns].double()))


def moved(update: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows and columns of an update that are not zero, and which they are."""
    rows, columns = ((update != 0).any(dim).nonzero()[:, 0] for dim in (1, 0))
    return update[rows][:, columns], rows, columns


def before_normalization(update: Tensor, variance: Tensor, beta2: float) -> Tensor:
    """The update that NorMuon's first step normalized: V then holds ``(1 - beta2) mean_j U_ij^2``."""
    squares = variance / (1 - beta2) * update.shape[1]
    return update / update.norm(dim=1, keepdim=True) * squares.sqrt()


def of_dion(entry: Contender, shape: Shape, device: torch.device) -> Figures:
    """Of P, found from the update and the new Q, after a few steps."""
    weight, [optimizer, *_] = _first_step(entry, shape, device)
    assert weight.grad is not None
    for step in range(1, DION_WARM_STEPS):
        weight.grad.copy_(gradient(shape, step, device))  # in its memory: a graph may hold the address
        _step([optimizer], entry)
    with torch.no_grad():
        weight.zero_()
    weight.grad.copy_(gradient(shape, DION_WARM_STEPS, device))
    state = optimizer.state[weight]
    momentum, basis = (state["momentum"] + weight.grad).double(), state["Q"].double()
    _step([optimizer], entry)
    update = -weight.detach().double() / (LR * scale(entry.source, shape))
    if shape[0] < shape[1]:
        momentum, update = momentum.mT, update.mT
    exact_left = torch.linalg.qr(momentum @ basis).Q
    right = momentum.mT @ exact_left
    exact = exact_left @ (right / (right.norm(dim=0) + 1e-8)).mT
    left = torch.linalg.lstsq(optimizer.state[weight]["Q"].double(), update.mT).solution.mT
    return *orthonormality(left), cosine(update, exact)


def _first_step(entry: Contender, shape: Shape, device: torch.device) -> tuple[Tensor, list[Optimizer]]:
    weight = torch.nn.Parameter(torch.zeros(shape, device=device))
    weight.grad = gradient(shape, 1, device)
    optimizers = list(entry.build(Tensors([weight], [])))
    _step(optimizers, entry)
    return weight, optimizers


def _step(optimizers: Sequence[Optimizer], entry: Contender) -> None:
    stepper(optimizers, compiled=entry.compiled)()


def scale(source: str, shape: Shape) -> float:
    """The factor that a library puts on its learning rate where nothing is set."""
    rows, cols = shape
    return math.sqrt(max(1.0, rows / cols) if source in ("torch", "pytorch_optimizer") else rows / cols)


def largest_singular_value(matrix: Tensor) -> float:
    """Largest singular value, of the direction that the 1024th power of the Gram matrix leaves.

    In float32, by ten products: a decomposition of 4096 rows takes seconds on a device.
    """
    short = (matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT).float()
    power = short @ short.mT
    for _ in range(10):
        power = power / power.norm().clamp_min(1e-30)
        power = power @ power
    vector = power[:, power.diagonal().argmax()]
    return float((short.mT @ vector).norm() / vector.norm().clamp_min(1e-30))


@functools.cache
def _polar_factor(shape: Shape, device: torch.device) -> Tensor:
    """The exact polar factor of the gradient that a first step has."""
    return polar(gradient(shape, 1, device).double())


def polar(matrix: Tensor) -> Tensor:
    """The polar factor of a float64 matrix of full rank, from the eigenvalues of its Gram matrix."""
    if matrix.shape[0] > matrix.shape[1]:
        return polar(matrix.mT).mT
    values, vectors = torch.linalg.eigh(matrix @ matrix.mT)
    return (vectors * values.clamp_min(values[-1] * 1e-14).rsqrt()) @ vectors.mT @ matrix


def orthonormality(matrix: Tensor) -> tuple[float, float]:
    """Largest singular value, and the distance of the Gram matrix of the short side from the identity."""
    short = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    gram = short @ short.mT
    distance = (gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).norm()
    return float(torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt()), float(distance / math.sqrt(len(gram)))


def cosine(update: Tensor, exact: Tensor) -> float:
    """Of the angle between two matrices."""
    return float((update * exact).sum() / (update.norm() * exact.norm()))
