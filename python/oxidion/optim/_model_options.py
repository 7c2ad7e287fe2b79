"""Types of what a constructor takes in the place of parameters, and beside a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, TypedDict

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

Params: TypeAlias = ParamsT | nn.Module
"""A model, or what torch's optimizers take: parameters, groups, or pairs of names and parameters."""

Overrides: TypeAlias = Mapping["str | type[nn.Module]", "str | type[Optimizer] | Mapping[str, Any]"]
"""Algorithms, or group keys, by name pattern or class of module."""


class ModelOptions(TypedDict, total=False):
    """Arguments that say how the parameters of a model are sorted: those of ``oxidion.param_groups``.

    ``extra_keys`` goes without a model too.

    At run time every key of groups is taken with ``scalar_`` before it; type checkers know these.
    """

    model: nn.Module
    scalar_algorithm: str | type[Optimizer]
    scalar_lr: float | Tensor
    scalar_weight_decay: float
    scalar_betas: tuple[float, float]
    scalar_eps: float
    scalar_patterns: Iterable[str]
    embedding_lr: float | Tensor
    head_lr: float | Tensor
    overrides: Overrides
    split_fused: bool
    example: Any
    prefix: str
    summary: bool
    extra_keys: Iterable[str]
