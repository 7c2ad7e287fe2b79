"""Sorts the parameters of a model into groups for GaLore and APOLLO: which weights are projected."""

from __future__ import annotations

import logging
import re
from typing import Any

from torch import Tensor, nn

from oxidion.groups import BLOCK, HEAD

logger = logging.getLogger("oxidion.groups")

NORMALIZATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


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
