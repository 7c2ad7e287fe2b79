"""Arguments of every class: their types and descriptions, and signatures with the defaults of the schema."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from oxidion._core import schema
from oxidion._core.constructor import GATHERED, OPTIONS, Gathered

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
    per_head: bool | Iterable[str]
    example: Any
    prefix: str
    summary: bool
    extra_keys: Iterable[str]


class SharedOptions(ModelOptions, total=False):
    """The arguments of `CommonOptions` but ``cautious_wd``, which some classes take by position."""

    maximize: bool
    foreach: bool | None
    capturable: bool
    differentiable: bool
    strict: bool
    max_batch_bytes: int | None
    workspace_limit: float | None
    state_dtype: torch.dtype | Literal["float16", "bfloat16", "float32", "float64"] | None
    state_bits: Literal[8, 32]
    stochastic_rounding: bool
    master_weights: bool
    weight_norm: Literal["free", "hyperball", "floor", "row_floor"]
    weight_norm_floor: float
    init_state: bool
    distributed_mesh: Any


class CommonOptions(SharedOptions, total=False):
    """Arguments of every class. Their defaults are those of the schema, unless a class has its own.

    Args:
        cautious_wd: decay only where the update and the parameter agree in sign.
        strict: True refuses parameters of fewer than two dimensions in a group of an algorithm for matrices;
            False leaves them to AdamW with the group's settings. Other algorithms take them anyway.
        state_dtype: dtype of moments, a ``torch.dtype`` or its name; None means float32, with float64
            parameters float64. In 16 bits they are rounded at random.
        state_bits: 8 quantizes moments to one byte each, with a float32 scale for each block; else 32. Group
            keys without an argument: ``block_size`` (256 elements along the last dimension) and
            ``min_quant_numel`` (4096: smaller states keep ``state_dtype``). See docs/low-precision.md.
        stochastic_rounding: round bfloat16 parameters up or down at random so that the mean is right; a
            function of the group's ``seed``, the parameter, the step and the element.
        master_weights: keep the float32 weights of bfloat16 parameters, at two more bytes each: the state
            ``master_remainder`` has their low halves. No update is lost.
        weight_norm: "free"; "hyperball": every matrix keeps the Frobenius norm R of its first step. With U
            the update for an ``lr`` of 1, ``X' = X - lr (R/|U|) U``, ``X <- X' R/|X'|``: ``lr`` is an angle,
            and ``weight_decay`` must be 0. "floor": ``U <- U max(1, c |X|/|U|)``; "row_floor": the same for
            each row (arXiv:2606.16899). Leading dimensions number matrices, unless ``flatten``; parameters of
            fewer than two dimensions are free. State of "hyperball": ``radius``, a number for each matrix.
            The first step refuses a matrix of zeros, which could never move. Classes whose update has a
            length of its own take "free" only, and so do those that work on elements with ``capturable``.
        weight_norm_floor: the ``c`` of the floors.
        max_batch_bytes: bound, in bytes, on the workspace of the matrices that are handled together; None
            means 2 MiB where no other process shares the work, else 32 MiB, on CUDA devices 256 MiB.
        workspace_limit: bytes of workspace that the plan keeps to, or a float: this share of the device's
            memory. Of several groups the least counts. None means the largest of 1 GiB, half of the bytes of
            the parameters that are stored here, and what one matrix needs. A plan that would need more has
            smaller buckets, then one in flight instead of two. See docs/planning.md.
        maximize: ascend instead of descend.
        foreach: accepted for compatibility; there is one implementation.
        capturable: on a CUDA device an ``lr`` that is a tensor there is read by the kernels, and classes
            that count steps do so there: a captured step counts.
        differentiable: must be False.
        init_state: make the states of all parameters at once, also of groups that are added later, instead of
            at the first step: ``state_dict()`` is then complete before it.
        distributed_mesh: mesh or process group whose ranks hold copies and have equal gradients; with DDP its
            ``process_group``. Work on whole matrices is split over it. It may be left out with DTensors, and
            with a model in DDP: it is read from them.
    """

    cautious_wd: bool


def gathered(own: Mapping[str, Any]) -> Gathered:
    """The common arguments of a class.

    Args:
        own: its defaults that are not those of the schema, by argument.
    """
    defaults = {key: field.default for key, field in schema.COMMON.items()} | schema.ONLY_ARGUMENTS | {**own}
    written, hints = CommonOptions.__annotations__, typing.get_type_hints(CommonOptions)
    parameters = tuple(
        inspect.Parameter(
            key,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults[key],
            annotation=getattr(written[key], "__forward_arg__", written[key]),
        )
        for key in written
        if key not in ModelOptions.__annotations__
    )
    options = inspect.Parameter(
        OPTIONS, inspect.Parameter.VAR_KEYWORD, annotation=f"Unpack[{ModelOptions.__name__}]"
    )
    return Gathered(
        parameters, options, {**hints, OPTIONS: Unpack[ModelOptions]}, CommonOptions.__doc__ or ""
    )


def spread(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The ``locals()`` of a constructor with the arguments that it gathered among the others.

    Spread once more they are the same: what was set since stays.
    """
    own = {key: value for key, value in arguments.items() if key != GATHERED}
    return {**own, **arguments.get(GATHERED, {})}
