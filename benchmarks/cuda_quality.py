"""Quality of what a contender of `cuda.py` made of a gradient, on the device where its time was taken.

A step is taken from a weight of zeros, so the weight holds minus the update times learning rate and scale. Of
Muon the update is looked at, of Dion2 the rows or columns that moved, of Dion the factor P after a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from contender import LR, Contender
from harness import stepper
from quality import DION_WARM_STEPS, MAX_SIDE, worst
from workloads import DION2, DION_4, DION_16, MUON, Shape, Tensors, Workload, gradient

MAX_SHAPES = 2
FAMILIES = (MUON, DION2, DION_4, DION_16)
Figures = tuple[float, float, float]


def quality(entry: Contender, workload: Workload, device: torch.device) -> dict[str, Any]:
    """Worst figures over a few shapes of a workload; none for a family whose updates are not orthonormal.

    Returns:
        ``sigma_max``: largest singular value of what is orthonormalized; ``orthogonality``: largest
        ``||U U^T - I||_F / sqrt(m)`` on its short side; ``cosine``: smallest cosine to the polar factor, of
        Dion to ``P Q^T`` of the same momentum in float64; ``shapes``: what was looked at.
    """
    measures = {MUON: of_muon, DION2: of_selected, DION_4: of_dion, DION_16: of_dion}
    shapes = distinct(workload.matrices)
    if entry.family not in measures or not shapes:
        return {}
    return worst([measures[entry.family](entry, shape, device) for shape in shapes], shapes)


def distinct(shapes: Sequence[Shape]) -> list[Shape]:
    """The largest distinct shapes whose decomposition in float64 takes seconds."""
    eligible = {shape for shape in shapes if min(shape) > 1 and min(shape) <= MAX_SIDE}
    return sorted(eligible, key=lambda shape: (-math.prod(shape), shape))[:MAX_SHAPES]


def of_muon(entry: Contender, shape: Shape, device: torch.device) -> Figures:
    """Of the whole update."""
    weight, _ = _first_step(entry, shape, device)
    update = -weight.detach().double() / (LR * scale(entry.source, shape))
    return *orthonormality(update), cosine(update, polar(gradient(shape, 1, device).double()))


def of_selected(entry: Contender, shape: Shape, device: torch.device) -> Figures:
    """Of the rows or columns that the step moved."""
    weight, _ = _first_step(entry, shape, device)
    update = -weight.detach().double() / (LR * scale(entry.source, shape))
    side = 0 if shape[0] <= shape[1] else 1
    moved = update.abs().sum(1 - side).nonzero()[:, 0]
    chosen = gradient(shape, 1, device).double().index_select(side, moved)
    update = update.index_select(side, moved)
    return *orthonormality(update), cosine(update, polar(chosen))


def of_dion(entry: Contender, shape: Shape, device: torch.device) -> Figures:
    """Of P, found from the update and the new Q, once Q has settled."""
    weight, [optimizer] = _first_step(entry, shape, device)
    for step in range(1, DION_WARM_STEPS):
        _set_gradient(weight, gradient(shape, step, device))
        _step([optimizer], entry)
    with torch.no_grad():
        weight.zero_()
    _set_gradient(weight, gradient(shape, DION_WARM_STEPS, device))
    state = optimizer.state[weight]
    assert weight.grad is not None
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


def _set_gradient(weight: Tensor, values: Tensor) -> None:
    """In the memory of the one that is there: a graph may hold its address."""
    assert weight.grad is not None
    weight.grad.copy_(values)


def _step(optimizers: Sequence[Optimizer], entry: Contender) -> None:
    stepper(optimizers, compiled=entry.compiled)()


def scale(source: str, shape: Shape) -> float:
    """What a library puts on its learning rate where nothing is set."""
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
