from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.threads import computing_threads


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    with computing_threads(1):
        yield
