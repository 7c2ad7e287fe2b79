"""What every test shares: plain assertions in the support modules, two threads at most, seeds and skips."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("support")

import torch  # noqa: E402

import areas  # noqa: E402
from support import spread  # noqa: E402
from support.versions import IS_OLD_TORCH  # noqa: E402

MAX_THREADS = 2
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
EMULATED = os.environ.get("OXIDION_TEST_DEVICE") == "emulated"
"""Whether memory of the host is to count as that of the emulated CUDA device."""


OF_OLD_TORCH = ("TypedStorage is deprecated", "The epoch parameter in `scheduler.step")
"""Warnings of torch up to 2.9 about itself: its checkpoints and schedulers call what it deprecates."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options that choose areas (``areas.py``); without them every test that is named runs."""
    choice = parser.getgroup("areas")
    choice.addoption("--area", action="append", default=[], help="an area; `product`: the tests of none")
    choice.addoption("--changed", action="store_true", help="parts of areas that differ from the lock alone")
    choice.addoption("--record", action="store_true", help="write the parts that passed into the lock")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Imports no module that has nothing of the areas that are chosen."""
    chosen = config.option.area
    if not chosen or collection_path.suffix != ".py":
        return None
    return None if areas.may_have(collection_path, chosen) else True


def pytest_configure(config: pytest.Config) -> None:
    """Turns to the emulated device where tests are to run on it; lets torch's warnings about itself pass."""
    if unknown := set(config.option.area) - {areas.PRODUCT, *areas.settings().areas}:
        raise pytest.UsageError(f"--area: no area {', '.join(sorted(unknown))}")
    if config.option.record and not hasattr(config, "workerinput"):
        (name,) = config.option.area
        if config.option.keyword or config.option.file_or_dir or config.option.deselect:
            raise pytest.UsageError("--record: only where all tests of the area run")
        config.pluginmanager.register(areas.Recorder(areas.settings().areas[name], config.option.changed))
    if file := os.environ.pop(areas.FAILURES, None):  # not for runs that a test starts
        config.pluginmanager.register(areas.Failures(Path(file)))
    if IS_OLD_TORCH:
        for warning in OF_OLD_TORCH:
            config.addinivalue_line("filterwarnings", f"ignore:{warning}:UserWarning")
    if EMULATED:
        from oxidion._cuda import device

        device.prepare(emulated=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Looks for no garbage among thousands of tests that are found, neither now nor during each of them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of the chosen areas, puts them into groups, skips what needs a device without one."""
    if config.option.area:
        names = [item.nodeid for item in items]
        areas.leave(config, items, areas.chosen(names, config.option.area, config.option.changed))
    if getattr(config.option, "loadgroup", False):
        items[:] = spread.in_groups(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Reports a test without its group: ``--last-failed`` of a run without groups has to find it."""
    report.nodeid = spread.without_group(report.nodeid)


@pytest.fixture(autouse=True)
def _same_start_for_every_test() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, MAX_THREADS))
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def benchmark_scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes benchmarks importable by their plain names; unloads them, as the examples have a `report` too."""
    scripts = [path.stem for path in BENCHMARKS.glob("*.py") if path.stem != "cuda"]  # a folder of tests
    loaded = {name: sys.modules.pop(name) for name in scripts if name in sys.modules}
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in scripts:
        sys.modules.pop(name, None)
    sys.modules.update(loaded)
