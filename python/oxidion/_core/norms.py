"""Norms of weights that an optimizer holds: settings that go with them. The core computes the steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

RADIUS = "radius"
"""The state with the norms that "hyperball" keeps; 0: the next step takes them."""

OWN = ("weight_norm",)
"""Keys that groups of another algorithm do not take from the class: embeddings in an optimizer of matrices
that keep their norm are free unless their group says otherwise."""


def check(group: Mapping[str, Any], where: str, *, leaves_update: bool, by_element: bool) -> None:
    """Refuses settings that do not go with the norms of weights that are held.

    Args:
        group: a complete group.
        where: what an error calls it.
        leaves_update: whether the core can bind the update of the algorithm.
        by_element: whether the algorithm works on elements.

    Raises:
        ValueError: for such settings.
    """
    rule = group["weight_norm"]
    if rule == "free":
        return
    if not leaves_update:
        raise ValueError(
            f"{group['algorithm']} takes weight_norm='free' only, as the length of its update is part of the "
            f"algorithm, got {rule!r} ({where})"
        )
    if by_element and group["capturable"]:
        raise ValueError(f"capturable needs weight_norm='free', got {rule!r} ({where})")
    if keep(group) and float(group["weight_decay"]) != 0:
        raise ValueError(
            f"weight_decay must be 0 with weight_norm='hyperball', which keeps the norm of the weights, "
            f"got {group['weight_decay']!r} ({where}): pass weight_decay=0"
        )


def keep(group: Mapping[str, Any]) -> bool:
    """True if matrices of this group keep their norm: no step could change one of zeros."""
    return group.get("weight_norm") == "hyperball"


def is_by_matrix(group: Mapping[str, Any]) -> bool:
    """True if leading dimensions of the weights of this group number matrices."""
    return not (group.get("flatten") or group.get("merge_dims"))


def can_move(weight: Tensor, by_matrix: bool) -> bool:
    """True if a weight is not all zero; ``by_matrix``: if no matrix over its last two dimensions is."""
    if weight.ndim > 2 and by_matrix:
        return bool(weight.flatten(-2).any(-1).all())
    return bool(weight.any())


def refuse_zeros(name: str) -> None:
    """Refuses a parameter of zeros that is to keep its norm.

    Raises:
        ValueError: that names it and the ways out.
    """
    raise ValueError(
        f"{name}: weight_norm='hyperball' keeps the norm of each matrix, and one is all zero: "
        "initialize them with other numbers, or put them in a group with weight_norm='free'"
    )
