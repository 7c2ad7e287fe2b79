"""Base and group keys of the classes with moments of a projected gradient."""

from __future__ import annotations

import logging
from typing import Any

from typing_extensions import override

from oxidion._core import validate
from oxidion._core.base import OxOptimizer
from oxidion._core.validate import Field

PROJECTIONS = ("std", "reverse_std", "left", "right", "full", "unsharded")

LOW_RANK_SCHEMA: dict[str, Field] = {
    "betas": validate.betas((0.9, 0.999)),
    "eps": validate.number(1e-8),
    "rank": validate.count(None, optional=True),
    "update_proj_gap": validate.count(200),
    "decay_order": validate.word("torch", "torch", "galore"),
    "seed": validate.count(0, low=0),
    "owned_states": validate.flag(False),
}
"""Group keys of every class."""


class LowRankOptimizer(OxOptimizer):
    """Base of optimizers with moments of a projected gradient; what is not projected gets AdamW."""

    _TAKES_VECTORS = True

    @classmethod
    @override
    def _advise(cls, name: str, shape: tuple[int, ...], group: dict[str, Any]) -> None:
        rank = group["rank"]
        if rank is not None and len(shape) >= 2 and rank >= min(shape[-2:]):
            logging.getLogger("oxidion.groups").warning(
                "%s: rank %d of a matrix of shape %s projects nothing, optimized by adamw", name, rank, shape
            )
