"""The optimizers that ``train_gpt.py`` knows: one row each, with its learning rate.

The matrices of the blocks go to the named algorithm; embedding, head and norms go to ``scalar_algorithm``
at ``scalar_lr``. A further optimizer of the package is one more row of :data:`ALL_RECIPES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import oxidion

SCHEDULES = ("cosine", "warmdown", "constant")
"""Names of the learning-rate schedules after the warm-up."""

WARMDOWN_SHARE = 0.4
"""Share of the steps, at the end, in which ``warmdown`` lowers the learning rate."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run's numbers; a checkpoint stores it and resuming demands it unchanged.

    Attributes:
        optimizer: a key of :data:`RECIPES`.
        lr: learning rate of the block matrices.
        scalar_lr: learning rate of embedding, head and norms.
        rank_fraction: rank of Dion as a share of the smaller side.
        fraction: share of the rows or columns that Dion2 and NorDion2 orthonormalize in a step.
        weight_decay: decoupled weight decay of every group that is decayed.
        steps: length of the run, which the schedule needs.
        warmup: share of the steps in which the learning rate rises.
        schedule: one of :data:`SCHEDULES`.
        clip_norm: largest norm of all gradients together; 0 leaves them as they are.
        batch_size: sequences in a batch.
        seq_len: tokens in a sequence.
        layers: blocks of the model.
        dim: width of the model.
        heads: attention heads.
        tied: the head shares the embedding's weight.
        seed: seed of the initial weights, of the order of the batches and of the optimizer's sketches.
        dtype: name of the parameters' dtype.
        eval_every: steps between two held-out evaluations.
        eval_windows: sequences in the held-out evaluation.
        corpus_mb: size cap on the text, in megabytes.
        initial_scale: factor on the initial matrices of the blocks.
    """

    optimizer: str
    lr: float
    scalar_lr: float
    rank_fraction: float
    fraction: float
    weight_decay: float
    steps: int
    warmup: float
    schedule: str
    clip_norm: float
    batch_size: int
    seq_len: int
    layers: int
    dim: int
    heads: int
    tied: bool
    seed: int
    dtype: str
    eval_every: int
    eval_windows: int
    corpus_mb: float
    initial_scale: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """How one optimizer is built.

    Attributes:
        class_name: the class in :mod:`oxidion`.
        lr: learning rate of the block matrices: a sweep's choice for Dion, Muon, AdamW and Lion, Muon's for
            the others.
        scalar_algorithm: algorithm of embedding, head and norms.
        scalar_lr: its learning rate; None takes ``lr``.
        arguments: further constructor arguments, from the settings.
        decays: False if the block matrices keep their norm, so that they cannot decay.
        average: keys of all groups that name a mean of the weights; held-out losses are taken with it.
    """

    class_name: str
    lr: float
    scalar_algorithm: str = "adamw"
    scalar_lr: float | None = None
    arguments: Callable[[Settings], dict[str, Any]] = lambda settings: {}
    decays: bool = True
    average: Callable[[Settings], dict[str, Any]] = lambda settings: {}


ALL_RECIPES: dict[str, Recipe] = {
    "dion": Recipe(
        "Dion", 0.02, scalar_lr=0.002, arguments=lambda s: {"rank_fraction": s.rank_fraction, "seed": s.seed}
    ),
    "muon": Recipe("Muon", 0.02, scalar_lr=0.002),
    "adamw": Recipe("AdamW", 0.002, arguments=lambda s: {"betas": (0.9, 0.95)}),
    "lion": Recipe("Lion", 0.0008, scalar_algorithm="lion"),
    "normuon": Recipe("NorMuon", 0.02, scalar_lr=0.002),
    # Selected among all rows: the losses are those of one process on every mesh.
    "dion2": Recipe(
        "Dion2",
        0.02,
        scalar_lr=0.002,
        arguments=lambda s: {"fraction": s.fraction, "selection_scope": "global"},
    ),
    "nordion2": Recipe(
        "NorDion2",
        0.02,
        scalar_lr=0.002,
        arguments=lambda s: {"fraction": s.fraction, "selection_scope": "global"},
    ),
}
"""Every optimizer of the family."""

RECIPES = {name: recipe for name, recipe in ALL_RECIPES.items() if hasattr(oxidion, recipe.class_name)}
"""Those that the installed package has."""


def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Builds the optimizer that the settings name over all parameters of the model."""
    recipe = RECIPES[settings.optimizer]
    average = recipe.average(settings)
    keys = {"lr": settings.lr, **recipe.arguments(settings), **average}
    keys |= {f"scalar_{key}": value for key, value in average.items()}
    optimizer: torch.optim.Optimizer = getattr(oxidion, recipe.class_name)(
        model,
        scalar_algorithm=recipe.scalar_algorithm,
        scalar_lr=settings.scalar_lr,
        weight_decay=settings.weight_decay if recipe.decays else 0.0,
        **keys,
    )
    return optimizer


def build_scheduler(
    optimizer: torch.optim.Optimizer, settings: Settings
) -> torch.optim.lr_scheduler.LambdaLR:
    """Warm-up followed by the named schedule, as a factor on every group's learning rate.

    ``constant`` stays at 1, ``warmdown`` until its last part.
    """
    warmup_steps = round(settings.warmup * settings.steps)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        if settings.schedule == "constant":
            return 1.0
        progress = min(1.0, (step - warmup_steps) / max(1, settings.steps - warmup_steps))
        if settings.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        return min(1.0, (1.0 - progress) / WARMDOWN_SHARE)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
