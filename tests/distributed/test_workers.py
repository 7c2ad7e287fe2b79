"""The processes that tests share: kept, and started anew once a rank is lost, with the test that lost it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from support.workers import PATIENCE, Pool

from . import faulty


@pytest.fixture
def own() -> Iterator[Pool]:
    """Processes that no other test has."""
    groups = Pool()
    yield groups
    groups.stop()


def test_groups_keep_their_processes_and_their_numbers_of_ranks(own: Pool) -> None:
    first = {world: own[world].run(faulty.processes) for world in (2, 4)}
    for world, told in first.items():
        assert [(rank, size) for rank, size, _ in told] == [(rank, world) for rank in range(world)]
        assert own[world].run(faulty.processes) == told
    assert len({process for told in first.values() for *_, process in told}) == 6


def test_number_of_ranks_that_no_group_has_is_refused(own: Pool) -> None:
    with pytest.raises(KeyError, match="3"):
        own[3]


def test_rank_that_ends_is_noticed_at_once_and_the_group_starts_anew(own: Pool) -> None:
    before = own[2].run(faulty.processes)
    start = time.monotonic()
    with pytest.raises(
        AssertionError, match=r"rank 1 ended with exit code 7 in .*faulty\.ends\(7,\)"
    ) as error:
        own[2].run(faulty.ends, 7)
    assert time.monotonic() - start < PATIENCE / 3
    assert "test_rank_that_ends_is_noticed_at_once" in str(error.value)
    after = own[2].run(faulty.processes)
    assert [rank for rank, *_ in after] == [0, 1]
    assert not {process for *_, process in before} & {process for *_, process in after}


def test_rank_that_hangs_is_named_and_the_group_starts_anew(own: Pool) -> None:
    own[2].patience = 1
    with pytest.raises(
        AssertionError, match=r"the ranks \[1\] hang in .*faulty\.hangs.*test_rank_that_hangs"
    ):
        own[2].run(faulty.hangs)
    assert len(own[2].run(faulty.processes)) == 2


def test_ranks_that_wait_for_one_that_raised_do_not_wait_for_long(own: Pool) -> None:
    own[2].grace = 1
    with pytest.raises(AssertionError, match=r"the ranks \[1\] hang[\s\S]*--- rank 0[\s\S]*had enough"):
        own[2].run(faulty.raises)
    assert len(own[2].run(faulty.processes)) == 2


def test_group_whose_ranks_all_raised_works_on(own: Pool) -> None:
    before = own[2].run(faulty.processes)
    with pytest.raises(
        AssertionError, match=r"--- rank 0[\s\S]*rank 0 has had[\s\S]*--- rank 1[\s\S]*rank 1 has had"
    ):
        own[2].run(faulty.raises_everywhere)
    assert own[2].run(faulty.processes) == before
