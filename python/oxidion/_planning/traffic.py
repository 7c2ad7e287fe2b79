"""Traffic of a step: bytes that a rank sends, by axis of the mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank gives to the collectives of one axis in a step, and those that it sends for them.

    Attributes:
        axis: name.
        ranks: size.
        collectives: how many.
        bytes: sum of their inputs.
        sent: bytes on the wire that leave this rank, where every collective sends as few as it can.
        kinds: how many of each kind.
    """

    axis: str
    ranks: int
    collectives: int
    bytes: int
    sent: int
    kinds: dict[str, int]


def traffic(transfers: Iterable[Mapping[str, Any]], mesh: Mapping[str, int]) -> list[Traffic]:
    """Returns a plan's transfers by axis, in a step without a scheduled projection; sums cross axes."""
    found = []
    every = [transfer for transfer in transfers if not transfer["when_due"]]
    sizes = {**mesh, **{transfer["axis"]: len(transfer["ranks"]) for transfer in every}}
    for axis, size in sizes.items():
        own = [transfer for transfer in every if transfer["axis"] == axis]
        kinds = Counter(transfer["kind"] for transfer in own)
        given = sum(transfer["send"][1] for transfer in own)
        found.append(Traffic(axis, size, len(own), given, sum(map(sent, own)), dict(sorted(kinds.items()))))
    return found


def sent(transfer: Mapping[str, Any]) -> int:
    """Bytes that leave this rank for a collective over n ranks with an input of b bytes.

    ``b - own`` in an all-to-all or reduce-scatter, which keep the rank's own part; ``b (n - 1)`` in an
    all-gather; :func:`summed` in an all-reduce.
    """
    ranks, given = len(transfer["ranks"]), int(transfer["send"][1])
    if transfer["kind"] == "all_reduce":
        return summed(given, ranks)
    if transfer["kind"] == "all_gather":
        return given * (ranks - 1)
    return given - int(transfer["send_bytes"][transfer["coordinate"]])


def summed(given: int, ranks: int) -> int:
    """Bytes that leave a rank for a ring all-reduce of ``given`` bytes: 2 (n - 1) / n of them, rounded up."""
    return -(-2 * given * (ranks - 1) // ranks)
