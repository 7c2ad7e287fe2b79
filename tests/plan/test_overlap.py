"""The schedule of several ranks: what is in flight while what computes, and where it is written down."""

from __future__ import annotations

import pytest

from oxidion._oxidion import Plan

COMPUTE, ISSUE, WAIT = 0, 1, 2
EXPECTED = """\
bucket 0  muon  4 × [8, 4] float32 · group 0 · fs rows/4 · whole matrices over (fs)
bucket 1  muon  4 × [4, 8] float32 · group 0 · fs rows/4 · whole matrices over (fs)
bucket 2  adamw  2 tensors, 4 elements float32 · group 1 · no communication
  0  compute  b0.prepare
  1  issue    c0 all_to_all  fs  b0.u  128 B per rank
  2  compute  b1.prepare
  3  issue    c1 all_to_all  fs  b1.u  128 B per rank
  4  compute  b2.apply
  5  wait     c0
  6  compute  b0.unpack(u)+orthonormalize[1]+pack(u)
  7  issue    c2 all_to_all  fs  b0.u  128 B per rank
  8  wait     c1
  9  compute  b1.unpack(u)+orthonormalize[1]+pack(u)
 10  issue    c3 all_to_all  fs  b1.u  128 B per rank
 11  wait     c2
 12  compute  b0.apply
 13  wait     c3
 14  compute  b1.apply
"""


def fsdp(shapes: list[tuple[int, ...]], algorithm: str, rank: int = 0, **keys: object) -> Plan:
    """The plan of one rank of four: matrices by ``algorithm``, vectors by AdamW, sharded on dimension 0."""
    axis = ("fs", [0, 1, 2, 3], rank, "S", 0)
    groups = [{"algorithm": algorithm, "orth_dtype": "float32", **keys}, {"algorithm": "adamw"}]
    params = [(f"p{i}", shape, "float32", int(len(shape) < 2), [axis]) for i, shape in enumerate(shapes)]
    return Plan.of_shapes(groups, params)


SHAPES = [(8, 4)] * 4 + [(4, 8)] * 4 + [(8,), (8,)]


def test_plan_of_fsdp_prints_the_expected_schedule() -> None:
    text = str(fsdp(SHAPES, "muon", use_polar_express=True))
    assert text.startswith(EXPECTED), text
    assert text.splitlines()[-1].endswith("hazards 0")


@pytest.mark.parametrize("algorithm", ["dion", "muon"])
def test_buckets_compute_while_other_collectives_are_in_flight(algorithm: str) -> None:
    shapes = [(16 * i, 8) for i in range(1, 7) for _ in range(4)] + [(64,)] * 3
    plan = fsdp(shapes, algorithm, **({"rank_fraction": 0.5} if algorithm == "dion" else {}))
    flying: set[int] = set()
    covered, alone = 0, 0
    for op, k in plan.schedule:
        if op == ISSUE:
            flying.add(k)
        elif op == WAIT:
            flying.remove(k)
        elif flying:
            covered += 1
        else:
            alone += 1
        assert len(flying) <= 2
    assert not flying
    # Only the first bucket's first stage and the last one's last stages have nothing to hide behind.
    assert covered > 3 * alone


def test_elementwise_buckets_fill_the_first_gap() -> None:
    plan = fsdp(SHAPES, "dion", rank_fraction=0.5)
    lines = [line for line in str(plan).splitlines() if line[:3].strip().isdigit()]
    filler = next(i for i, line in enumerate(lines) if "b2.apply" in line)
    issued = sum("issue" in line for line in lines[:filler])
    waited = sum("wait" in line for line in lines[:filler])
    assert (issued, waited) == (2, 0)


def test_two_lanes_have_own_memory_and_each_is_shared_in_turn() -> None:
    one = fsdp([(64, 32)] * 4, "muon").arena_bytes
    two = fsdp([(64, 32)] * 4 + [(32, 64)] * 4, "muon").arena_bytes
    four = fsdp([(64, 32)] * 4 + [(32, 64)] * 4 + [(48, 32)] * 4 + [(32, 48)] * 4, "muon").arena_bytes
    assert one < two
    assert four == two


def test_every_rank_takes_its_share_and_idle_ones_the_remainder() -> None:
    # Three buckets of five matrices on four ranks: one matrix is left over in each.
    shapes = [(8, 4)] * 5 + [(12, 4)] * 5 + [(16, 4)] * 5
    plans = [fsdp(shapes, "muon", rank) for rank in range(4)]
    owners = [row["owner"] for row in plans[0].rows()]
    assert all([row["owner"] for row in plan.rows()] == owners for plan in plans)
    taken = {owner: owners.count(owner) for owner in owners}
    assert sorted(taken.values()) == [3, 4, 4, 4]
    assert set(taken) == {f"fs={i}" for i in range(4)}


def test_explain_says_owner_bytes_and_placements() -> None:
    plan = fsdp(SHAPES, "muon")
    row = plan.rows()[0]
    assert row["placements"] == "fs:Shard(0)/4"
    assert row["owner"] == "fs=0"
    assert row["wire_bytes"] == 2 * 128 // 4
    assert row["state_bytes"] == 8 * 4 * 4 // 4
    assert sum(r["wire_bytes"] for r in plan.rows()) == sum(t["send"][1] for t in plan.transfers)
    assert plan.rows()[-1]["owner"] == "local"


def test_workspace_bound_keeps_one_matrix_a_rank_in_each_bucket() -> None:
    free = fsdp([(64, 32)] * 16, "muon")
    bound = fsdp([(64, 32)] * 16, "muon", max_batch_bytes=1)
    assert len(free.transfers) == 2
    assert len(bound.transfers) == 2 * 16 // 4
    for plan in (fsdp([(5, 32)] * 16, "muon", rank, max_batch_bytes=2000) for rank in range(4)):
        assert len(plan.transfers) == len(fsdp([(5, 32)] * 16, "muon", max_batch_bytes=2000).transfers)


@pytest.mark.parametrize("algorithm", ["muon", "normuon", "dion2", "nordion2", "dion"])
def test_heads_whole_on_every_rank_need_no_communication(algorithm: str) -> None:
    for rank in range(4):
        plan = fsdp([(32, 12)] * 2, algorithm, rank, num_heads=8)
        assert plan.transfers == []
        assert str(plan).count("4 × [4, 12]") == 1  # two heads of each weight
    assert fsdp([(32, 12)] * 2, algorithm, num_heads=2).transfers != []
    assert fsdp([(30, 12)] * 2, algorithm, num_heads=6).transfers != []
