"""Base of the classes whose weights can keep their norm."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from oxidion._core.base import OxOptimizer


class WeightNormOptimizer(OxOptimizer):
    """An optimizer with the group keys ``weight_norm`` and ``weight_norm_floor``, which bind matrices."""

    @classmethod
    @override
    def _check_settings(cls, group: dict[str, Any], where: str) -> None:
        if group.get("weight_norm") == "hyperball" and float(group.get("weight_decay", 0.0)) != 0:
            raise ValueError(
                f"weight_decay must be 0 with weight_norm='hyperball', which keeps the norm of the weights, "
                f"got {group['weight_decay']!r} ({where}): pass weight_decay=0"
            )

    @classmethod
    @override
    def _refuses_zeros(cls, group: dict[str, Any]) -> bool:
        return group.get("weight_norm") == "hyperball"

    @classmethod
    @override
    def _refuse_zeros(cls, name: str) -> None:
        raise ValueError(
            f"{name}: weight_norm='hyperball' keeps the norm of the weights, and these are all zero: "
            "initialize them with other numbers, or put them in a group with weight_norm='free'"
        )
