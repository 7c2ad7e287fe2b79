"""Tests of the test bench are left out as long as nothing that they depend on has changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from . import equipment

REPORT = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}"/></testsuites>'


@pytest.fixture
def own_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record of this test's, beside a report of three tests that passed."""
    monkeypatch.setattr(equipment, "RECORD", tmp_path / "equipment.sha256")
    (tmp_path / "report.xml").write_text(REPORT.format(3, 0, 0, 0))
    return tmp_path / "equipment.sha256"


def test_equipment_is_tested_until_it_is_recorded(own_record: Path) -> None:
    assert equipment.left_out() == ""
    equipment.record(own_record.with_name("report.xml"))
    assert equipment.left_out() == " and not equipment"
    assert own_record.read_text() == f"{equipment.digest()}  3 tests passed\n"


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (3, 1, 0, 0), (3, 0, 1, 0), (3, 0, 0, 1)])
def test_run_that_did_not_pass_whole_is_not_recorded(own_record: Path, counts: tuple[int, ...]) -> None:
    report = own_record.with_name("report.xml")
    report.write_text(REPORT.format(*counts))
    with pytest.raises(SystemExit, match="nothing is recorded"):
        equipment.record(report)
    assert not own_record.exists()


def test_all_that_the_tests_use_is_part_of_the_digest() -> None:
    names = {str(path.relative_to(equipment.ROOT)) for path in equipment.files()}
    assert names >= {
        "src/kernels/cuda/src/coded.cu",
        "src/kernels/cuda/src/blocks.cuh",
        "tests/cuda/compile.py",
        "tests/cuda/driver.py",
        "tests/cuda/emulator/fibers.h",
        "tests/cuda/emulator/driver.cpp",
        "tests/cuda/emulator/library.py",
        "tests/cuda/faults.py",
        "tests/cuda/test_planted_faults.py",
        "tests/cuda/test_coded_sums.py",  # what test_sum_faults.py calls
        "tests/support/cache.py",
        "tests/support/codes.py",
    }
    assert {path.name for path in equipment.marked()} >= {"test_sum_faults.py", "test_compile.py"}


@pytest.mark.parametrize(
    "name",
    [
        "src/kernels/cuda/src/blocks.cuh",
        "tests/cuda/emulator/fibers.h",
        "tests/cuda/faults.py",
        "another torch",
    ],
)
def test_whatever_changes_is_another_digest(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before, read = equipment.digest(), Path.read_text

    def changed(path: Path, *args: object) -> str:
        text = read(path, *args)  # type: ignore[arg-type]
        if name == "another torch":
            return text.replace("TORCH ?= 2.", "TORCH ?= 3.") if path.name == "Makefile" else text
        return text + "\n" if path == equipment.ROOT / name else text

    monkeypatch.setattr(Path, "read_text", changed)
    assert equipment.digest() != before


DECORATED = re.compile(r"((?:^@.*\n|^    .*\n|^\)\n)*)^def (test_(?:\w+_)?faults?_\w+)\(", re.MULTILINE)


def test_every_test_of_faults_on_the_emulator_is_marked() -> None:
    found, unmarked = 0, []
    for path in sorted((equipment.TESTS / "cuda").glob("test_*.py")):
        text = path.read_text()
        whole = re.search(r"^pytestmark = .*\bequipment\b", text, re.MULTILINE)
        tests = [test for test in DECORATED.finditer(text) if "pytest.mark.cuda" not in test[1]]
        found += len(tests)
        unmarked += [test[2] for test in tests if not whole and "@pytest.mark.equipment" not in test[1]]
    assert found > 12
    assert unmarked == ["test_every_test_of_faults_on_the_emulator_is_marked"]
