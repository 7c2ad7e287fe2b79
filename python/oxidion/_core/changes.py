"""Cheap detection of settings that were written into groups since the last step, to be checked again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from oxidion._core import schema

LIVE = {"params", "lr", "step", "betas", "beta1", "beta2", *schema.MOMENTA}
"""Keys that change from step to step; except for ``lr``, none is checked against another key."""


class _Seen(NamedTuple):
    """Settings of a group as they were when it was checked."""

    keys: int
    read: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    values: tuple[Any, ...]
    lr: object


class ChangeTracker:
    """Groups as they were when they were last checked."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def is_new(self, number: int, group: Mapping[str, Any]) -> bool:
        """True where settings of a group are others than those that were noted; its rate may be another one.

        Numbers that are tensors are filled in place, so a group with some is new at every step.
        """
        seen = self._seen.get(number)
        if seen is None or seen.keys != len(group) or (seen.lr is None) != (group.get("lr") is None):
            return True
        try:
            return bool(seen.read(group) != seen.values)
        except Exception:  # a key that is gone, or a value of the user's that compares to no truth value
            return True

    def has_other_rate(self, number: int, group: Mapping[str, Any]) -> bool:
        """True where the learning rate may be another one that the host has."""
        lr = group.get("lr")
        return "lr" not in device_keys(group) if isinstance(lr, Tensor) else lr is not self._seen[number].lr

    def note(self, number: int, group: Mapping[str, Any]) -> None:
        """Notes a group that was checked."""
        keys = [key for key in group if key not in LIVE]
        if len(keys) < 2 or any(isinstance(group[key], Tensor) for key in keys):
            self._seen.pop(number, None)
            return
        read = itemgetter(*keys)
        self._seen[number] = _Seen(len(group), read, read(group), group.get("lr"))

    def note_rate(self, number: int, group: Mapping[str, Any]) -> None:
        """Notes the learning rate of a group."""
        self._seen[number] = self._seen[number]._replace(lr=group["lr"])


def device_keys(group: Mapping[str, Any]) -> set[str]:
    """Keys of tensors that the host would have to wait for; the core looks at what they hold."""
    captured = group.get("capturable")
    own = ((key, value) for key, value in group.items() if isinstance(value, Tensor))
    return {key for key, value in own if captured or not value.is_cpu}


def is_still(group: Mapping[str, Any]) -> bool:
    """True at a learning rate of 0 that the host knows: such a step changes no weight."""
    return group["lr"] is not None and "lr" not in device_keys(group) and float(group["lr"]) == 0
