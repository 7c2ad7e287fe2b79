"""Settings of the suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.threads import computing_threads


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices of eight rows gain nothing from threads, and waiting for a second one costs milliseconds."""
    with computing_threads(1):
        yield
