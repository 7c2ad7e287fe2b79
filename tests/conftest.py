"""What every test shares: plain assertions in the support modules, two threads at most, seeds and skips."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("support")

import torch  # noqa: E402

MAX_THREADS = 2
EMULATED = os.environ.get("OXIDION_TEST_DEVICE") == "emulated"
"""Whether memory of the host is to count as that of the emulated CUDA device."""


def pytest_configure() -> None:
    """Turns to the emulated device where the tests are to run on it."""
    if EMULATED:
        from oxidion import _device

        _device.prepare(emulated=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests that need a device that is not there, with the reason."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _same_start_for_every_test() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, MAX_THREADS))
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
