"""Few rows of a table that together have all that any row has: most often, each pair of two features."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Row = TypeVar("Row")


def covering(rows: Sequence[Row], has: Callable[[Row], set[Hashable]]) -> list[Row]:
    """Rows that have all that any row has, in the order of the table.

    The row that adds most is taken first, of equal ones the first of the table: the choice depends on nothing
    else.
    """
    sets = [has(row) for row in rows]
    missing = set[Hashable]().union(*sets)
    candidates = [(-len(own), at) for at, own in enumerate(sets)]
    heapq.heapify(candidates)
    chosen = []
    while missing:
        _, at = heapq.heappop(candidates)
        adds = len(sets[at] & missing)
        if candidates and (-adds, at) > candidates[0]:
            if adds:
                heapq.heappush(candidates, (-adds, at))
            continue
        chosen.append(at)
        missing -= sets[at]
    return [rows[at] for at in sorted(chosen)]
