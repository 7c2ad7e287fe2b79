"""Axes of a process as a grid, and the weights by which its ranks find out in sums whether they are alike.

Each rank of an axis multiplies a fact by a weight of its own. The weights of an axis add up to 0, so equal
facts do too, and others do not but by a chance of 1 in `PRIME`. On a grid such sums can be added up over one
axis after the other: at the end every rank knows of all lines of all axes. With the largest and the least
value instead of a weighted sum only the ranks of its own line would hear of a difference on the last
axis.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import Any, NamedTuple

from oxidion._dist.collectives import my_rank
from oxidion._dist.comm import Groups, Ranks, RootAxes

PRIME = (1 << 43) - 57
"""Products of weights and facts are taken modulo this: those of 2**20 ranks add up within 63 bits."""

FACTS = 5
"""Facts that have a weight: plan, gradients, scalars, axes, grid."""

Weights = tuple[int, ...]


class Known(NamedTuple):
    """Axes of a rank's meshes, as it reports them to the others.

    Attributes:
        axes: all axes of the meshes that the parameters are on parts of.
        used: those among them that parameters are on.
        kinds: a checksum of how many groups are used and of ``used``.
        is_grid: whether the groups are the axes of a grid, as far as this rank can see.
        grid: a checksum of the grid and of ``kinds``.
        weights: of this rank by axis.
    """

    axes: RootAxes
    used: list[Any]
    kinds: int
    is_grid: bool
    grid: int
    weights: dict[Ranks, Weights]


NO_AXES = Known({}, [], 0, False, 0, {})


def known(groups: Groups, axes: RootAxes) -> Known:
    """The entry for these axes, whose ``groups``, in their order, are used."""
    used = sorted(key for key, (ranks, _) in axes.items() if ranks in groups)
    kinds = zlib.crc32(repr((len(groups), used)).encode())
    me = my_rank() if groups else 0
    shape = grid_of(groups, me)
    weights = {ranks: weights_of(ranks, me) for ranks in groups}
    return Known(axes, used, kinds, shape is not None, zlib.crc32(repr((kinds, shape)).encode()), weights)


def grid_of(groups: Groups, me: int) -> tuple[Any, ...] | None:
    """Returns the grid whose axes through a rank these are: its first rank, distance and size of each axis.

    Returns:
        None if they are not the axes of a grid with the outermost first. Ranks that all find the same grid
        are on it and have all of its lines as groups. Each distance exceeds the extent of the inner axes, so
        that a rank has one place on it.
    """
    axes, first = [], me
    for ranks in groups:
        distance = ranks[1] - ranks[0]
        if list(ranks) != list(range(ranks[0], ranks[0] + distance * len(ranks), distance)):
            return None
        axes.append((distance, len(ranks)))
        first -= me - ranks[0]
    extent = 0
    for distance, size in reversed(axes):
        if distance <= extent:
            return None
        extent += distance * (size - 1)
    return (first, *axes)


def weights_of(ranks: Ranks, me: int) -> Weights:
    """The weights of a rank on an axis, one for each fact."""
    count = FACTS * (len(ranks) - 1)
    drawn = struct.unpack(f"<{count}Q", hashlib.shake_128(repr(ranks).encode()).digest(8 * count))
    place = ranks.index(me)
    if place:
        return tuple(weight % PRIME for weight in drawn[FACTS * (place - 1) : FACTS * place])
    return tuple(-sum(drawn[fact::FACTS]) % PRIME for fact in range(FACTS))
