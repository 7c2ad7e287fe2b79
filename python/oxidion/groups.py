"""Parameter groups of a model: which weights are orthonormalized or projected, and which are not."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from oxidion._core.base import OxOptimizer
from oxidion._dist.comm import local

logger = logging.getLogger(__name__)

HEAD = re.compile(r"(^|\.)(lm_head|head|output|output_layer|classifier|unembed|embed_out)(\.|$)")
"""Names under which models keep their output layer."""

BLOCK = re.compile(r"\.\d+\.")
"""A number within a path: the module is one of many, so it is not the output layer."""

NORMALIZATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


def _address(param: Tensor) -> int:
    """Address of a parameter's memory; 0 where this process stores nothing of it."""
    own = local(param)
    return 0 if own.device.type == "meta" or own.numel() == 0 else own.untyped_storage().data_ptr()


def _reasons(model: nn.Module, scalar_patterns: Iterable[str]) -> dict[int, str]:
    """For each parameter that must not be orthonormalized, by identity: why."""
    reasons: dict[int, str] = {}
    embeddings = [m.weight for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    tables = {_address(weight) for weight in embeddings} - {0}
    reasons.update({id(weight): "embedding" for weight in embeddings})
    patterns = [re.compile(pattern) for pattern in scalar_patterns]
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            path = f"{prefix}.{name}" if prefix else name
            if id(param) in reasons:
                continue
            if param.ndim < 2:
                reasons[id(param)] = f"{param.ndim}-D"
            elif isinstance(module, NORMALIZATIONS):
                reasons[id(param)] = "normalization"
            elif _address(param) in tables:
                reasons[id(param)] = "shares the memory of an embedding"
            elif HEAD.search(path) and not BLOCK.search(path):
                reasons[id(param)] = "output layer by its name"
            elif any(pattern.search(path) for pattern in patterns):
                reasons[id(param)] = "name pattern"
    return reasons


def param_groups(
    model: nn.Module,
    algorithm: str = "dion",
    lr: float | Tensor | None = None,
    *,
    scalar_algorithm: str = "adamw",
    scalar_lr: float | Tensor | None = None,
    weight_decay: float | None = None,
    scalar_weight_decay: float = 0.0,
    scalar_patterns: Iterable[str] = (),
    **group_keys: Any,
) -> list[dict[str, Any]]:
    """Groups for an optimizer of this package, with the names of the parameters.

    Weights of two dimensions that are neither embeddings nor the output layer go to ``algorithm``;
    convolutions and other weights of more dimensions too, as one matrix each (``flatten=True``). Embeddings,
    the output layer (tied to an embedding, or named like one), normalizations and biases go to
    ``scalar_algorithm``. The decisions are logged to ``oxidion.groups`` at INFO.

    Args:
        model: the model, before or after ``fully_shard``.
        algorithm: for the matrices.
        lr: of the matrices; None leaves the optimizer's default.
        scalar_algorithm: for the rest.
        scalar_lr: of the rest; None means ``lr``.
        weight_decay: of the matrices; None leaves the optimizer's default.
        scalar_weight_decay: of the rest.
        scalar_patterns: regular expressions; parameters whose name matches one are not orthonormalized.
        **group_keys: further keys of the matrix groups.

    Returns:
        One to three groups; each parameter that requires a gradient is in exactly one.

    Raises:
        ValueError: for a model without parameters that require gradients.
    """
    reasons = _reasons(model, scalar_patterns)
    own_class = OxOptimizer._registry.get(algorithm)
    takes_matrices = own_class is None or own_class.MATRIX
    matrices: list[tuple[str, Tensor]] = []
    stacks: list[tuple[str, Tensor]] = []
    scalars: list[tuple[str, Tensor]] = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            logger.info("%s: frozen, left out", name)
            continue
        reason = reasons.get(id(param))
        if reason is not None:
            scalars.append((name, param))
        elif param.ndim > 2 and takes_matrices:
            stacks.append((name, param))
        else:
            matrices.append((name, param))
        logger.info(
            "%s %s: %s", name, tuple(param.shape), f"{scalar_algorithm} ({reason})" if reason else algorithm
        )
    own = {"algorithm": algorithm, "lr": lr, "weight_decay": weight_decay, **group_keys}
    rest = {
        "algorithm": scalar_algorithm,
        "lr": lr if scalar_lr is None else scalar_lr,
        "weight_decay": scalar_weight_decay,
    }
    wanted = [(matrices, own), (stacks, {**own, "flatten": True}), (scalars, rest)]
    groups = [
        {"params": params, **{key: value for key, value in keys.items() if value is not None}}
        for params, keys in wanted
        if params
    ]
    if not groups:
        raise ValueError("model has no parameter that requires a gradient")
    return groups


def _is_normalization(module: nn.Module) -> bool:
    """Also those of models with a class of their own: ``LlamaRMSNorm``, ``T5LayerNorm``."""
    return isinstance(module, NORMALIZATIONS) or type(module).__name__.endswith("Norm")


def _embeddings(model: nn.Module) -> set[int]:
    """Identities of the weights of embeddings, also where another layer has them too."""
    tables = (m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    return {id(table.weight) for table in tables}


def _why_not(
    path: str, param: Tensor, module: nn.Module, tables: set[int], include: str | None, min_dim: int
) -> str | None:
    """Why a parameter is not projected; None where it is."""
    if param.ndim < 2:
        return f"{param.ndim}-D"
    if min(param.shape[-2:]) < min_dim:
        return f"a side below {min_dim}"
    if _is_normalization(module):
        return "normalization"
    if include is not None and re.search(include, path):
        return None
    if id(param) in tables:
        return "embedding"
    if HEAD.search(path) and not BLOCK.search(path):
        return "output layer by its name"
    if not isinstance(module, nn.Linear) or param.ndim != 2:
        return f"a weight of {type(module).__name__}"
    return None


def galore_param_groups(
    model: nn.Module,
    rank: int = 128,
    update_proj_gap: int = 200,
    scale: float = 0.25,
    proj_type: str = "std",
    *,
    include: str | None = None,
    exclude: str | None = None,
    min_dim: int | None = None,
    weight_decay: float | None = None,
    other_weight_decay: float | None = None,
    **group_keys: Any,
) -> list[dict[str, Any]]:
    """Groups for `GaLoreAdamW` (and the APOLLO classes), with the names of the parameters.

    Projected are the weights of ``nn.Linear`` except the output layer (tied to an embedding, or named like
    one). Embeddings, the output layer and weights of other modules are projected where ``include`` matches
    their name. Parameters of fewer than two dimensions and normalizations never are, and do not decay. Each
    parameter that requires a gradient is in exactly one group. Decisions are logged to ``oxidion.groups``.

    Args:
        model: the model, before or after ``fully_shard``.
        rank: of the projection.
        update_proj_gap: steps between two projections.
        scale: factor of the update.
        proj_type: the side that is projected.
        include: regular expression of names that are projected too.
        exclude: regular expression of names that are not; it wins over ``include``.
        min_dim: matrices with a shorter side are not projected; None: those with a side of at most ``rank``.
        weight_decay: of projected and other weights; None leaves the optimizer's default.
        other_weight_decay: of weights that are not projected; None means ``weight_decay``.
        **group_keys: further keys of the projected group.

    Returns:
        One to three groups: projected, not projected, without decay.

    Raises:
        ValueError: for a model without parameters that require gradients.
    """
    shortest = rank + 1 if min_dim is None else min_dim
    tables = _embeddings(model)
    projected: list[tuple[str, Tensor]] = []
    others: list[tuple[str, Tensor]] = []
    bare: list[tuple[str, Tensor]] = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            path = f"{prefix}.{name}" if prefix else name
            if id(param) in seen:
                continue
            seen.add(id(param))
            if not param.requires_grad:
                logger.info("%s: frozen, left out", path)
                continue
            reason = _why_not(path, param, module, tables, include, shortest)
            if exclude is not None and re.search(exclude, path):
                reason = "excluded by its name"
            if reason is None:
                projected.append((path, param))
            elif param.ndim < 2 or _is_normalization(module):
                bare.append((path, param))
            else:
                others.append((path, param))
            logger.info("%s %s: %s", path, tuple(param.shape), reason or f"projected, rank {rank}")
    own = {
        "rank": rank,
        "update_proj_gap": update_proj_gap,
        "scale": scale,
        "proj_type": proj_type,
        "weight_decay": weight_decay,
        **group_keys,
    }
    decay = weight_decay if other_weight_decay is None else other_weight_decay
    wanted = (
        (projected, own),
        (others, {"weight_decay": decay}),
        (bare, {"weight_decay": 0.0}),
    )
    groups = []
    for params, keys in wanted:
        if params:
            settings = {key: value for key, value in keys.items() if value is not None}
            # An optimizer of which rank is an argument would give it to groups that have none.
            groups.append({"params": params, **({} if params is projected else {"rank": None}), **settings})
    if not groups:
        raise ValueError("model has no parameter that requires a gradient")
    return groups
