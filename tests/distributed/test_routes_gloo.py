"""Routes of Dion on real processes: equal results, planned bytes at the process group, planned workspace."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from support.workers import Pool, Workers

from . import routed
from .routed import Found, Route

CLOSE = 1e-12
ONE: list[Route] = ["keep", "gather"]


def check(found: Sequence[Found], routes: Sequence[Route]) -> None:
    """What is true of each rank."""
    for one in found:
        assert one.distance <= CLOSE
        assert one.given == one.planned
        assert all(sent > 0 for sent in one.given.values())
        assert one.arena == -(-one.arena_bytes // 4) * 4
    free, tight = found[: len(routes)], found[len(routes) :]
    for one, other in zip(free, tight, strict=False):
        assert one.routes == other.routes
        assert one.limit == 0
        assert 0 < other.arena <= other.limit
        assert other.arena < one.arena
    # What a route is called is what it does: none sends what another does.
    assert len({one.routes for one in free}) == len(free)
    assert len({tuple(sorted(one.given.items())) for one in free}) == len(free)
    assert free[0].routes == ("keep",)


@pytest.mark.parametrize(
    ("ranks", "axes", "routes", "is_tight"),
    [
        (4, {"fs": 4}, ONE, True),
        (4, {"fs": 2, "tp": 2}, [*ONE, ("fs",), ("tp",)], True),
        (8, {"fs": 8}, ONE, False),
        (8, {"fs": 4, "tp": 2}, [*ONE, ("fs",)], False),
        (8, {"dp": 2, "fs": 2, "tp": 2}, [*ONE, ("tp",)], False),
    ],
    ids=["fs4", "fs2-tp2", "fs8", "fs4-tp2", "dp2-fs2-tp2"],
)
def test_routes_end_alike_and_send_and_allocate_what_is_planned(
    groups: Pool, ranks: int, axes: dict[str, int], routes: list[Route], is_tight: bool
) -> None:
    for found in groups[ranks].run(routed.train, axes, routes, False, is_tight):
        assert len(found) == len(routes) * (1 + is_tight)
        check(found, routes)


def test_axis_is_gathered_with_the_one_that_shards_its_rows(four: Workers) -> None:
    """As ``fully_shard`` does after tensor parallelism."""
    routes: list[Route] = ["keep", ("tp",)]
    for found in four.run(routed.train, {"fs": 2, "tp": 2}, routes, True, False):
        check(found, routes)
        assert "gather fs and tp" in found[1].routes


@pytest.mark.parametrize(("saved", "loaded"), [("gather", "keep"), ("keep", "gather")])
def test_checkpoint_goes_on_along_another_route(four: Workers, saved: Route, loaded: Route) -> None:
    axes = {"fs": 2, "tp": 2}
    for difference, same, before, after in four.run(routed.goes_on, axes, saved, loaded):
        assert difference <= CLOSE
        assert same
        assert before != after
        assert ("keep",) in (before, after)
