"""Copies of the weights among the states: they have to follow where a caller writes the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from oxidion._core import averages, norms
from oxidion._dist.comm import local


def follow(own: Mapping[str, Any], write: Callable[[Tensor], object], changes: Tensor) -> None:
    """Has the states of a parameter follow a linear map of its weights.

    The weights z that "schedule_free" steps are mapped too, and with them the average, which lies between z
    and the parameter. Norms that are kept are taken from the new weights at the next step. The average of
    "ema" stays that of the weights that there were.

    Args:
        own: the states.
        write: maps a tensor that is laid out as the parameter is stored here, in place.
        changes: True if the map changes anything, on every rank that stores a part of the parameter.
    """
    if averages.SHARE in own and averages.KEY in own:
        write(local(own[averages.KEY]))
    if isinstance(radius := own.get(norms.RADIUS), Tensor):
        local(radius).mul_(changes.logical_not().to(local(radius).device))
