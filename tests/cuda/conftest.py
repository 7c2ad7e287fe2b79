"""The driver without a device, built once for all tests that launch on it."""

from __future__ import annotations

import pytest

from . import driver


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a process needs to be run on the emulated device."""
    return driver.build(tmp_path_factory.mktemp("driver"))
