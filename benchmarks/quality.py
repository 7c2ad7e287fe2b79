"""Quality of an orthonormal update: a speed row means little without it.

A step is taken from a zero weight without weight decay, so the weight holds minus the update times a scale.
The scale that a library puts on its learning rate is switched off, or divided out where it cannot be.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from contender import OURS, Contender
from contenders import FAST, HALF
from harness import stepper
from workloads import DION2, MUON, NORDION2, NORMUON, Shape, Workload, gradient

#: Largest side of a matrix whose float64 SVD is taken here.
MAX_SIDE = 4096
MAX_SHAPES = 4
DION_WARM_STEPS = 5


def quality(entry: Contender, workload: Workload, fraction: float) -> dict[str, Any]:
    """Worst figures over the distinct shapes of a workload.

    Returns:
        ``sigma_max``: largest singular value of U or of P (Dion);
        ``orthogonality``: largest ``||U U^T - I||_F / sqrt(rank)``, short side of U or P^T P (Dion);
        ``cosine``: smallest cosine to the exact result, computed in float64: the polar factor of what U was
        made of, or P Q^T from the same momentum and Q (Dion); ``shapes``: what was looked at.

        U is the update; of Dion2 and NorDion2 its rows or columns that moved; of NorMuon and NorDion2 as it
        was before the normalization of its rows.
    """
    shapes = _distinct(workload.matrices)
    relatives = {MUON: _muon, NORMUON: _relative, DION2: _relative, NORDION2: _relative}
    measure = relatives.get(entry.family, _dion)
    return worst([measure(entry, shape, fraction) for shape in shapes], shapes)


def worst(rows: Sequence[tuple[float, float, float]], shapes: Sequence[Shape]) -> dict[str, Any]:
    """The worst of each figure over shapes."""
    sigma, orthogonality, cosine = zip(*rows, strict=True)
    return {
        "sigma_max": max(sigma),
        "orthogonality": max(orthogonality),
        "cosine": min(cosine),
        "shapes": [list(shape) for shape in shapes],
    }


def _distinct(shapes: Sequence[Shape]) -> list[Shape]:
    """The largest distinct shapes with both sides above 1: a vector has a single singular value."""
    eligible = {shape for shape in shapes if min(shape) > 1 and max(shape) <= MAX_SIDE}
    return sorted(eligible, key=lambda shape: (-math.prod(shape), shape))[:MAX_SHAPES]


def _step(optimizers: Sequence[Optimizer], entry: Contender) -> None:
    stepper(optimizers, compiled=entry.compiled)()


def _muon(entry: Contender, shape: Shape, _fraction: float) -> tuple[float, float, float]:
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = gradient(shape, seed=1)
    _step([_plain_muon(entry, weight)], entry)
    update = -weight.detach().double() / _muon_scale(entry.source, shape)
    return *_orthonormality(update), _cosine(update, _polar_factor(shape))


@functools.cache
def _polar_factor(shape: Shape) -> Tensor:
    """The exact polar factor of the gradient that `_muon` steps with."""
    return _polar(gradient(shape, seed=1).double())


def _polar(matrix: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def _plain_muon(entry: Contender, weight: Tensor) -> Optimizer:
    source = entry.source
    settings: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0}
    if entry.name == FAST:
        settings["orth_preset"] = "fast"
    if source == "torch":
        return torch.optim.Muon([weight], **settings)
    if source == "pytorch_optimizer":
        import pytorch_optimizer

        return pytorch_optimizer.Muon([{"params": [weight], "use_muon": True, **settings}])
    return _module(entry).Muon([weight], adjust_lr=None, **settings)


def _module(entry: Contender) -> Any:
    return importlib.import_module("oxidion" if entry.source == OURS else "dion")


def _muon_scale(source: str, shape: Shape) -> float:
    """The factor that torch and pytorch_optimizer put on the learning rate by default."""
    return math.sqrt(max(1.0, shape[0] / shape[1])) if source in ("torch", "pytorch_optimizer") else 1.0


def _relative(entry: Contender, shape: Shape, fraction: float) -> tuple[float, float, float]:
    """Of what NorMuon, Dion2 or NorDion2 orthonormalized."""
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = gradient(shape, seed=1)
    settings: dict[str, Any] = {} if entry.family == NORMUON else {"fraction": fraction}
    name = {NORMUON: "NorMuon", DION2: "Dion2", NORDION2: "NorDion2"}[entry.family]
    optimizer = getattr(_module(entry), name)([weight], lr=1.0, weight_decay=0.0, adjust_lr=None, **settings)
    _step([optimizer], entry)
    variance = optimizer.state[weight].get("variance_neuron")
    beta2 = optimizer.param_groups[0].get("muon_beta2", 0.0)
    update, rows, columns = moved(-weight.detach().double())
    if variance is not None:
        update = before_normalization(update, variance.detach().double()[rows], beta2)
    exact = _polar_factor(shape) if update.shape == shape else _polar(weight.grad[rows][:, columns].double())
    return *_orthonormality(update), _cosine(update, exact)


def moved(update: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows and columns of an update that are not zero, and which they are."""
    rows, columns = ((update != 0).any(dim).nonzero()[:, 0] for dim in (1, 0))
    return update[rows][:, columns], rows, columns


def before_normalization(update: Tensor, variance: Tensor, beta2: float) -> Tensor:
    """What NorMuon's first step made an update of: V then holds ``(1 - beta2) mean_j U_ij^2``."""
    squares = variance / (1 - beta2) * update.shape[1]
    return update / update.norm(dim=1, keepdim=True) * squares.sqrt()


def _dion(entry: Contender, shape: Shape, fraction: float) -> tuple[float, float, float]:
    weight = torch.nn.Parameter(torch.zeros(shape))
    settings = {"orth_dtype": "bfloat16"} if entry.name == HALF else {}
    optimizer = _module(entry).Dion([weight], lr=1.0, weight_decay=0.0, rank_fraction=fraction, **settings)
    for step in range(DION_WARM_STEPS):
        weight.grad = gradient(shape, seed=step)
        _step([optimizer], entry)
    with torch.no_grad():
        weight.zero_()
    state = optimizer.state[weight]
    weight.grad = gradient(shape, seed=DION_WARM_STEPS)
    momentum, basis = (state["momentum"] + weight.grad).double(), state["Q"].double()
    _step([optimizer], entry)
    update = -weight.detach().double() / math.sqrt(shape[0] / shape[1])
    if shape[0] < shape[1]:
        momentum, update = momentum.mT, update.mT
    exact_left = torch.linalg.qr(momentum @ basis).Q
    exact_right = _unit_columns(momentum.mT @ exact_left)
    left = torch.linalg.lstsq(optimizer.state[weight]["Q"].double(), update.mT).solution.mT
    return *_orthonormality(left), _cosine(update, exact_left @ exact_right.mT)


def _unit_columns(matrix: Tensor) -> Tensor:
    return matrix / (matrix.norm(dim=0) + 1e-8)


def _orthonormality(matrix: Tensor) -> tuple[float, float]:
    """Largest singular value, and the distance of the Gram matrix of the short side from the identity."""
    short = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    gram = short @ short.mT
    distance = (gram - torch.eye(gram.shape[0], dtype=gram.dtype)).norm() / math.sqrt(gram.shape[0])
    return float(torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt()), float(distance)


def _cosine(update: Tensor, exact: Tensor) -> float:
    return float((update * exact).sum() / (update.norm() * exact.norm()))
