"""Comparisons of the ranks: how many collectives they take, and deferred ones."""

from __future__ import annotations

from typing import Any

import pytest

from oxidion._dist.grid import FACTS, PRIME, grid_of, weights_of
from support.workers import Pool, Workers

from . import lagging

ONE, PLANE, CUBE = {"fs": 2}, {"dp": 2, "fs": 2}, {"dp": 2, "fs": 2, "tp": 2}
MESHES = pytest.mark.parametrize("axes", [ONE, PLANE], ids=["one-axis", "two-axes"])
MODES = pytest.mark.parametrize("is_late", [False, True], ids=["waited", "late"])


def size_of(axes: dict[str, int]) -> int:
    return 2 ** len(axes)


def answers(groups: Pool, axes: dict[str, int], job: Any, *args: object) -> list[Any]:
    return groups[size_of(axes)].run(job, *args)


@MODES
@pytest.mark.parametrize("axes", [ONE, PLANE, CUBE], ids=["one-axis", "two-axes", "three-axes"])
def test_a_comparison_takes_one_collective_for_each_axis(
    groups: Pool, axes: dict[str, int], is_late: bool
) -> None:
    for found in answers(groups, axes, lagging.collectives_of_a_comparison, axes, is_late):
        assert list(found.values()) == [1] * len(axes)


SAID = {
    "lr": "lr of group 0 differs: rank {near} has 0.01, rank {last} has 0.0123",
    "weight_decay": "weight_decay of group 0 differs",
    "step": "step of group 0 differs: rank {near} has 3, rank {last} has 4. A rank has left out a step",
    "gradient": "second: rank {near} has a gradient, rank {last} none",
    "plan": "the plans differ: rank {near} has ",
}
BRIEFLY = {
    "lr": "they differ in learning rates or other scalars",
    "weight_decay": "they differ in learning rates or other scalars",
    "step": "or the number of the step",
    "gradient": "they differ in parameters that have gradients",
    "plan": "they differ in plans",
}


@MESHES
@pytest.mark.parametrize("kind", SAID)
def test_what_one_rank_does_otherwise_is_named_in_the_same_step(
    groups: Pool, axes: dict[str, int], kind: str
) -> None:
    for rank, answer in enumerate(answers(groups, axes, lagging.differing, kind, axes, False, "state_dict")):
        error, text = answer["third"]
        assert error == "PlanMismatch"
        assert names(kind, axes, text), text
        assert answer["unchanged"]
        shifted = kind == "step" and rank == size_of(axes) - 1
        assert answer["step"] == 2 + shifted
        assert answer["then"] == [("", "")]
        assert answer["went on to"] == 4


def names(kind: str, axes: dict[str, int], text: str) -> bool:
    """True where a text names the last rank and what it has, and a rank on one of its axes."""
    last = size_of(axes) - 1
    near = [last ^ (1 << at) for at in range(len(axes))]
    return any(SAID[kind].format(last=last, near=n) in text for n in near)


@MESHES
@pytest.mark.parametrize("kind", SAID)
def test_write_without_a_wait_is_named_at_the_next_step(
    groups: Pool, axes: dict[str, int], kind: str
) -> None:
    asked = "step state_dict step"
    for rank, answer in enumerate(answers(groups, axes, lagging.differing, kind, axes, True, asked)):
        is_last = rank == size_of(axes) - 1
        assert answer["third"] == ("", "")
        # A rank that knows that its plan is another one computes nothing.
        assert answer["unchanged"] == (kind == "plan" and is_last)
        first, second, third = answer["then"]
        assert first[0] == "PoisonedOptimizer"
        assert names(kind, axes, first[1]), first[1]
        assert first[1].startswith("the ranks disagreed about step ")
        assert ", which was taken: parameters and states are those of such a step. Load a " in first[1]
        assert first == second == third
        assert answer["unchanged since"]
        assert answer["went on to"] == 4


@MODES
@pytest.mark.parametrize("kind", ["lr", "gradient"])
def test_on_three_axes_every_rank_hears(eight: Workers, kind: str, is_late: bool) -> None:
    for answer in eight.run(lagging.differing, kind, CUBE, is_late, "step"):
        error, text = answer["then"][0] if is_late else answer["third"]
        assert error == ("PoisonedOptimizer" if is_late else "PlanMismatch")
        assert names(kind, CUBE, text), text
        assert answer["went on to"] == 4


@MESHES
@pytest.mark.parametrize("kind", SAID)
def test_no_checkpoint_of_a_step_is_written_if_ranks_disagreed(
    groups: Pool, axes: dict[str, int], kind: str
) -> None:
    asked = "state_dict synchronize_for_checkpoint step"
    for answer in answers(groups, axes, lagging.differing, kind, axes, True, asked):
        assert answer["third"] == ("", "")
        first, second, third = answer["then"]
        assert first == second
        assert first[0] == third[0] == "PoisonedOptimizer"
        assert BRIEFLY[kind] in first[1]
        assert names(kind, axes, third[1]), third[1]
        assert answer["went on to"] == 4


@MESHES
@pytest.mark.parametrize("kind", ["unusable", "not to be captured"])
@pytest.mark.parametrize("then", ["step state_dict", "state_dict step"])
def test_a_rank_that_cannot_take_a_step_leaves_no_rank_waiting(
    groups: Pool, axes: dict[str, int], then: str, kind: str
) -> None:
    replies = answers(groups, axes, lagging.differing, kind, axes, True, then)
    last = len(replies) - 1
    for rank, answer in enumerate(replies):
        assert answer["third"][0] == ("ValueError" if rank == last else "")
        assert answer["unchanged"] == (rank == last)
        for error, text in answer["then"]:
            assert error == "PoisonedOptimizer"
            assert f"(rank {last} could not begin it)" in text
        assert answer["went on to"] == 4


@MESHES
def test_an_error_on_all_ranks_poisons_no_rank(groups: Pool, axes: dict[str, int]) -> None:
    for first, error, second in answers(groups, axes, lagging.refused_everywhere, axes):
        assert first == second == ("", "")
        assert error[0] == "ValueError"


@MESHES
def test_infinities_placements_or_axes_of_one_rank_block_no_rank(groups: Pool, axes: dict[str, int]) -> None:
    words = {
        "infinity": "found infinities on some ranks",
        "placement": "gradient of other placements",
        "axes": "on other axes than before" if len(axes) > 1 else "the plans differ",
    }
    for kind, word in words.items():
        replies = answers(groups, axes, lagging.differing, kind, axes, True, "step state_dict")
        for rank, answer in enumerate(replies):
            assert answer["third"] == ("", "")
            assert answer["unchanged"] == (rank == len(replies) - 1)
            for error, text in answer["then"]:
                assert error == "PoisonedOptimizer"
                assert word in text
            assert answer["went on to"] == 4


@MESHES
def test_a_rank_that_alone_rebinds_its_states_takes_the_step(groups: Pool, axes: dict[str, int]) -> None:
    """Its plan is that of the others: in the next step all wait, and compare their copies."""
    for answer in answers(groups, axes, lagging.differing, "bound again", axes, True, "step state_dict"):
        assert answer["third"] == ("", "")
        assert not answer["unchanged"]
        assert answer["then"] == [("", ""), ("", "")]
        assert answer["copies checked"] == len(axes)


def test_steps_with_collectives_by_step_number_are_waited_for(two: Workers) -> None:
    for when_due, error, text in two.run(lagging.waited_for, "GaLoreAdamW"):
        assert any(when_due)
        assert error == "PlanMismatch"
        assert "step of group 0 differs" in text


@MESHES
@pytest.mark.parametrize("name", ["Muon", "Dion", "AdamW", "APOLLOAdamW"])
def test_late_comparisons_change_no_bit(groups: Pool, axes: dict[str, int], name: str) -> None:
    assert all(answers(groups, axes, lagging.alike, axes, name))


@pytest.mark.parametrize(("every", "steps"), [(1, [*range(1, 9)]), (3, [1, 4, 6, 7]), (0, [1, 6])])
def test_late_comparisons_come_as_often_as_others(two: Workers, every: int, steps: list[int]) -> None:
    assert two.run(lagging.compared, every) == [steps, steps]


@MODES
def test_ranks_that_are_on_no_grid_all_hear(four: Workers, is_late: bool) -> None:
    for error, text, same in four.run(lagging.on_overlapping_groups, is_late):
        assert error == "PlanMismatch"
        assert "narrow: rank 2 has a gradient, rank 3 none" in text
        assert same


@MODES
def test_ranks_in_a_ring_all_hear(four: Workers, is_late: bool) -> None:
    for first, second, third in four.run(lagging.in_a_ring, is_late):
        assert first == second == ("", "")
        assert third[0] == "PlanMismatch"
        assert "rank 2 has 0.0123" in third[1]


@MESHES
def test_the_host_waits_for_no_device_in_a_warm_step(groups: Pool, axes: dict[str, int]) -> None:
    waits = ["wait in the step"] * len(axes)
    for rank, answer in enumerate(answers(groups, axes, lagging.on_a_device, axes)):
        assert answer["first"] == waits
        assert answer["second"] == ["record"]
        assert answer["warm"] == ["query", "read", "record"]
        assert answer["slow"] == ["query", "wait", "read", "record"]
        assert answer["captured"] == []
        assert answer["after"] == ["query", "read", "record"]
        assert answer["state_dict"] == answer["again"]
        assert answer["looked"] == ["query", "read"]
        for each in ("state_dict", "then"):
            assert answer[each][0] == "PoisonedOptimizer", rank
        assert "they differ in learning rates" in answer["state_dict"][1]
        assert "rank 0 has" in answer["then"][1] or len(axes) > 1
        assert f"rank {size_of(axes) - 1} has 0.0123" in answer["then"][1]


def groups_of(*lines: tuple[int, ...]) -> Any:
    return dict.fromkeys(lines)


@pytest.mark.parametrize(
    ("lines", "me", "grid"),
    [
        ([(4, 5, 6)], 5, (4, (1, 3))),
        ([(1, 5), (4, 5, 6, 7)], 5, (0, (4, 2), (1, 4))),
        ([(2, 10), (8, 10), (10, 11)], 10, (0, (8, 2), (2, 2), (1, 2))),
        # Non-adjacent ranks, as those of one stage of a pipeline.
        ([(3, 11), (3, 5)], 3, (3, (8, 2), (2, 2))),
        # A line within another, distances that differ, an axis that is too long for the one around it.
        ([(0, 1, 2, 3), (2, 3)], 2, None),
        ([(0, 1, 3)], 1, None),
        ([(0, 2), (0, 1, 2)], 0, None),
    ],
)
def test_axes_of_a_grid_are_found(lines: list[tuple[int, ...]], me: int, grid: object) -> None:
    assert grid_of(groups_of(*lines), me) == grid


@pytest.mark.parametrize("ranks", [(0, 1), (3, 5, 7), tuple(range(0, 4096, 8))], ids=len)
def test_weights_add_up_to_nothing_and_no_part_of_them_does(ranks: tuple[int, ...]) -> None:
    rows = [weights_of(ranks, rank) for rank in ranks]
    assert all(len(row) == FACTS for row in rows)
    for column in zip(*rows, strict=True):
        assert sum(column) % PRIME == 0
        assert len(set(column)) == len(column)
        assert 0 not in column
    assert sum(max(column) for column in zip(*rows, strict=True)) * 2**17 < 2**63
    others = tuple(rank + 1 for rank in ranks)
    assert not set(weights_of(others, others[0])) & set(rows[0])
