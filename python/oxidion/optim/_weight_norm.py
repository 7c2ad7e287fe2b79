"""Base of the classes whose weights can keep their norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from oxidion._core import validate
from oxidion._core.base import OxOptimizer
from oxidion._dist.comm import is_distributed


class WeightNormOptimizer(OxOptimizer):
    """An optimizer with the group keys ``weight_norm`` and ``weight_norm_floor``, which bind matrices."""

    @classmethod
    @override
    def check_together(cls, group: dict[str, Any], where: str) -> None:
        if group.get("weight_norm") == "hyperball" and float(group["weight_decay"]) != 0:
            raise ValueError(
                f"weight_decay must be 0 with weight_norm='hyperball', which keeps the norm of the weights, "
                f"got {group['weight_decay']!r} ({where}): pass weight_decay=0"
            )

    @classmethod
    @override
    def check_values(cls, group: dict[str, Any], number: int, state: Mapping[Any, Any]) -> None:
        if group.get("weight_norm") != "hyperball":
            return
        for name, param in zip(validate.names_of(group, number), group["params"], strict=True):
            # Of a shard only the step can tell.
            known = "radius" in state.get(param, {}) or is_distributed(param) or not param.requires_grad
            if not known and param.ndim > 1 and param.numel() and not bool(param.detach().any()):
                raise ValueError(
                    f"{name}: weight_norm='hyperball' keeps the norm of the weights, and these are all zero: "
                    "initialize them with other numbers, or put them in a group with weight_norm='free'"
                )
