"""Where the emulator is required, what it is built with has to be there: nothing is skipped in silence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import driver
from .compile import missing

CI = driver.TESTS.parent / ".ci" / "run"
ONE = "test_columns.py"


@pytest.mark.parametrize(("required", "outcome"), [("1", "failed"), ("0", "skipped")])
def test_missing_compiler_fails_tests_where_it_is_required(
    tmp_path: Path, required: str, outcome: str
) -> None:
    place = str(driver.TESTS / "cuda" / ONE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=1", place]
    environment = {**os.environ, "PATH": str(tmp_path), "OXIDION_REQUIRE_EMULATOR": required}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode == 0) == (outcome == "skipped"), done.stdout[-2000:]
    assert f" {outcome}" in done.stdout or f" {outcome.replace('failed', 'error')}" in done.stdout
    assert "passed" not in done.stdout


@pytest.mark.parametrize("required", [False, True])
def test_what_is_absent_skips_unless_it_is_required(monkeypatch: pytest.MonkeyPatch, required: bool) -> None:
    monkeypatch.setattr(driver, "REQUIRED", required)
    assert driver.unless("nvidia/cu13").args == (not required,)
    assert driver.unless("").args == (False,)


def test_continuous_integration_requires_the_emulator() -> None:
    assert "export OXIDION_REQUIRE_EMULATOR=1" in CI.read_text()


@pytest.mark.skipif(not driver.REQUIRED, reason="OXIDION_REQUIRE_EMULATOR is not set")
def test_compilers_are_there_where_they_are_required() -> None:
    assert missing() == ""
