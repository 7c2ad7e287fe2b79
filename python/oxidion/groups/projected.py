"""Groups for the optimizers that project gradients on a low rank."""

from __future__ import annotations

import logging
import re
from typing import Any

from torch import Tensor, nn

from oxidion.groups.kinds import Held, Model

logger = logging.getLogger("oxidion.groups")


def _why_not(model: Model, held: Held, include: str | None, min_dim: int) -> tuple[str | None, bool]:
    """The reason not to project a parameter, if any; and whether it is a bias, gain or normalization."""
    kind = model.kind(held)
    if held.param.ndim < 2:
        return f"{held.param.ndim}-D", True
    if kind.rule == "normalization":
        return kind.rule, True
    if min(held.param.shape[-2:]) < min_dim:
        return f"a side below {min_dim}", False
    if include is not None and re.search(include, held.path):
        return None, False
    if not kind.is_matrix or not kind.rule.startswith(("linear layers", "adapters")) or held.param.ndim != 2:
        return kind.rule, False
    return None, False


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

    Projected are the weights of linear layers, sorted as by `param_groups`: output layers, routers and
    embeddings are not, nor are weights of other modules, unless ``include`` matches their name.
    Parameters of fewer than two dimensions and normalizations never are, and do not decay. Each parameter
    that requires a gradient is in exactly one group. Decisions are logged to ``oxidion.groups``.

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
    projected: list[tuple[str, Tensor]] = []
    others: list[tuple[str, Tensor]] = []
    bare: list[tuple[str, Tensor]] = []
    facts = Model(model)
    for held in facts:
        if not held.param.requires_grad:
            logger.info("%s: frozen, left out", held.path)
            continue
        reason, is_bare = _why_not(facts, held, include, shortest)
        if exclude is not None and re.search(exclude, held.path):
            reason = reason or "excluded by its name"
        taken = projected if reason is None else bare if is_bare else others
        taken.append((held.path, held.param))
        logger.info("%s %s: %s", held.path, tuple(held.param.shape), reason or f"projected, rank {rank}")
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
            # An optimizer that has rank as an argument would give it to groups without one.
            groups.append({"params": params, **({} if params is projected else {"rank": None}), **settings})
    if not groups:
        raise ValueError("model has no parameter that requires a gradient")
    return groups
