"""Areas: patterns lead to files, and a change is followed by the tests that depend on it and no others."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import areas
import mutants.__main__ as faults

CLASSES = areas.settings().classes
AREAS = areas.settings().areas.values()


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Files that count as changed."""
    files: list[str] = []
    content = areas._content
    monkeypatch.setattr(areas, "_content", lambda name: content(name) + bytes(name in files))
    areas.digest.cache_clear()
    yield files
    areas.digest.cache_clear()


def digests() -> dict[str, str]:
    """Of all parts of all areas."""
    areas.digest.cache_clear()
    parts = (areas.NO_CLASS, *CLASSES)
    return {f"{area.name}/{part}": areas.digest(area, part) for area in AREAS for part in parts}


@pytest.mark.parametrize("area", AREAS, ids=lambda area: area.name)
def test_every_pattern_of_an_area_leads_to_files(area: areas.Area) -> None:
    files = areas.tracked()
    for pattern in (*area.tests, *area.kept, *area.sources):
        match = areas._matcher([pattern.partition("::")[0]]).match
        assert any(match(name) for name in files), pattern


@pytest.mark.parametrize(
    ("file", "found", "left"),
    [
        ("src/kernels/ops/lion.rs", {"lion"}, {"soap", "adamw", "muon"}),
        ("src/algorithm/soap/refresh.rs", {"soap", "soap_muon"}, {"lion", "dion"}),
        ("python/oxidion/optim/muon.py", {"muon", "normuon", "muon_h"}, {"soap", "dion"}),
    ],
)
def test_change_of_one_optimizer_calls_for_its_own_tests(
    changed: list[str], file: str, found: set[str], left: set[str]
) -> None:
    before = digests()
    changed.append(file)
    after = digests()
    parts = {name.partition("/")[2] for name, value in after.items() if before[name] != value}
    assert parts >= {*found, areas.NO_CLASS}
    assert parts.isdisjoint(left)


@pytest.mark.parametrize("file", ["src/algorithm/adamw.rs", "src/session/step.rs", "tests/contract/table.py"])
def test_change_of_what_is_shared_calls_for_every_class(changed: list[str], file: str) -> None:
    before = digests()
    changed.append(file)
    after = digests()
    assert all(after[f"classes/{name}"] != before[f"classes/{name}"] for name in CLASSES)


@pytest.mark.parametrize(
    ("test", "area", "part"),
    [
        ("tests/contract/test_step.py::test_a[Lion]", "classes", "lion"),
        ("tests/contract/test_step.py::test_a[Muon]", "", "muon"),
        ("tests/contract/test_step.py::test_a", "", "-"),
        ("tests/cuda/test_updates.py::test_a[lion-float32]", "emulator", "lion"),
        ("tests/cuda/test_graph.py::test_a", "cuda", "-"),
        ("tests/algorithm/test_soap.py::test_a", "", "soap"),
        ("tests/distributed/test_gloo.py::test_a[soap_muon-default]", "gloo", "soap_muon"),
        ("tests/distributed/test_gloo.py::test_a[muon-lion]", "gloo", "-"),
        ("tests/meta/test_docs.py::test_code_block_runs[docs/optimizers/soap.md-0]", "pages", "soap"),
        ("tests/meta/test_docs.py::test_code_block_runs[README.md-0]", "pages", "-"),
    ],
)
def test_test_belongs_to_its_area_and_part(test: str, area: str, part: str) -> None:
    assert (areas.area_of(test), areas.class_of(test)) == (area, part)


def test_planted_faults_fit_the_sources_and_are_in_all_layers() -> None:
    planted = faults.mutants()
    assert list(faults.problems(planted)) == []
    assert len(planted) >= 120
    layers = Counter(mutant.layer for mutant in planted)
    for layer in ("src/plan", "src/layout", "src/session", "python/oxidion/_core", "python/oxidion/_dist"):
        assert layers[layer] >= 5, layers
    assert all((areas.TESTS.parent / test).exists() for m in planted for test in m.tests if test != "cargo")


@pytest.mark.parametrize(
    ("passed", "reason", "green"),
    [(3, "no libtorch", True), (1, "no libtorch", False), (1, areas.NO_DEVICE, True)],
)
def test_part_that_was_mostly_skipped_differs_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, passed: int, reason: str, green: bool
) -> None:
    monkeypatch.setattr(areas, "LOCK", tmp_path / "areas.lock")
    monkeypatch.setattr(areas, "is_built", lambda: True)
    areas.recorded.cache_clear()
    area = areas.settings().areas["stress"]
    recorder = areas.Recorder(area, only_changed=False)
    place = ("tests/test_instruction_sets.py", 1, "test_a")
    for number in range(passed + 2):
        is_skipped = number >= passed
        recorder.pytest_runtest_logreport(
            pytest.TestReport(
                f"tests/test_instruction_sets.py::test_a[{number}]",
                place,
                {},
                "skipped" if is_skipped else "passed",
                (place[0], 1, f"Skipped: {reason}") if is_skipped else None,
                "setup" if is_skipped else "call",
            )
        )
    recorder.pytest_sessionfinish(pytest.ExitCode.OK)
    assert areas.is_green(area, areas.NO_CLASS) == green
    assert ("stress" in areas.differing()) != green
    areas.recorded.cache_clear()


REPORTS = [("test_a", "failed", "call"), ("test_a", "failed", "teardown"), ("test_b", "passed", "call")]


def test_failed_tests_are_named_after_all_areas(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(area: areas.Area, *_: object) -> int:
        plugin = areas.Failures(Path(os.environ[areas.FAILURES]))
        if area.name != "cuda":
            for test, outcome, when in REPORTS:
                report: Any = (f"tests/{area.name}.py::{test}@group", ("", 1, ""), {}, outcome, None, when)
                plugin.pytest_runtest_logreport(pytest.TestReport(*report))
            plugin.pytest_collectreport(pytest.CollectReport("tests/b.py", "failed", None, []))
        plugin.pytest_sessionfinish()
        return int(area.name != "cuda")

    monkeypatch.setattr(areas, "run", run)
    monkeypatch.setattr("sys.argv", ["areas.py", "run", "stress", "cuda", "timing"])
    monkeypatch.setenv(areas.FAILURES, "")
    assert areas.main() == 1
    each = [name for area in ("stress", "timing") for name in (f"tests/{area}.py::test_a", "tests/b.py")]
    lines = capsys.readouterr().out.splitlines()
    assert lines == [*(f"failed: {name}" for name in each), "not green: stress, timing"]
    monkeypatch.setattr("sys.argv", ["areas.py", "run", "cuda"])
    assert (areas.main(), capsys.readouterr().out) == (0, "")
