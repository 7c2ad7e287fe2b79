"""Bytes on the wire: what ranks send is what others receive, and what the collectives' names say."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from oxidion._planning.models import parse_mesh
from oxidion._planning.simulate import Settings, simulate
from oxidion._planning.traffic import sent, summed

MODEL = "gpt-160m"  # layers of 768, which neither 5 nor 7 divides


def plans(mesh: str, settings: Settings) -> list[list[dict[str, Any]]]:
    """The transfers of every rank."""
    sizes = parse_mesh(mesh)
    ranks = range(math.prod(sizes.values()))
    return [simulate(MODEL, sizes, Settings(**{**vars(settings), "rank": r}))[1].transfers for r in ranks]


@pytest.mark.parametrize("mesh", ["fs=5", "dp=2,fs=3", "fs=2,tp=2", "tp=3"])
@pytest.mark.parametrize("algorithm", ["muon", "dion", "dion2"])
def test_what_ranks_send_is_what_the_others_receive(mesh: str, algorithm: str) -> None:
    every = plans(mesh, Settings(algorithm, 0.25, "float32"))
    assert len({len(transfers) for transfers in every}) == 1
    given: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for transfers in every:
        for t in transfers:
            own, kind = t["coordinate"], t["kind"]
            given[kind] += sent(t)
            if kind == "all_gather":
                taken[kind] += t["recv"][1] - t["send"][1]
            elif kind != "all_reduce":
                taken[kind] += sum(n for rank, n in enumerate(t["recv_bytes"]) if rank != own)
    assert "all_to_all" in given or "all_gather" in given
    assert {k: given[k] for k in taken} == dict(taken)


def test_all_reduce_sends_each_byte_twice_but_for_its_own_share() -> None:
    assert [summed(1200, n) for n in (1, 2, 3, 4)] == [0, 1200, 1600, 1800]
    assert summed(10, 3) == 14  # 13.3 rounded up


def test_a_rank_alone_sends_nothing() -> None:
    result, _ = simulate(MODEL, {"dp": 1}, Settings("dion", 0.25))
    assert [traffic.sent for traffic in result.wire] == [0]
    assert result.gradient_sync == 0


def test_what_a_rank_keeps_is_not_on_the_wire() -> None:
    """Muon's two all-to-alls move all but the part that is the rank's own."""
    ranks = 4
    (traffic,) = simulate(MODEL, {"fs": ranks}, Settings("muon", dtype="float64"))[0].wire
    assert traffic.kinds == {"all_to_all": traffic.collectives}
    assert traffic.sent == traffic.bytes * (ranks - 1) // ranks
