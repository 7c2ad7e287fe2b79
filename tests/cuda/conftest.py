"""The driver without a device, built once for all tests that launch on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import driver


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[driver.Environment]:
    """What a process needs to be run on the emulated device."""
    made = driver.Environment(driver.build(tmp_path_factory.mktemp("driver")))
    yield made
    made.forks.stop()
