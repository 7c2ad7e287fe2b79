"""Groups of gloo processes that are kept alive for all tests of a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.workers import Pool, Workers


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The groups by their number of ranks."""
    groups = Pool()
    yield groups
    groups.stop()


@pytest.fixture
def groups(pool: Pool) -> Pool:
    """The same, for tests that choose."""
    return pool


@pytest.fixture
def two(pool: Pool) -> Workers:
    """Two ranks."""
    return pool[2]


@pytest.fixture
def four(pool: Pool) -> Workers:
    """Four ranks."""
    return pool[4]


@pytest.fixture
def eight(pool: Pool) -> Workers:
    """Eight ranks."""
    return pool[8]
