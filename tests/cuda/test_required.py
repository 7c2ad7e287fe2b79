"""Where the emulator is required, what it is built with has to be there: nothing is skipped in silence."""

from __future__ import annotations

import pytest

from . import driver
from .compile import missing

CI = driver.TESTS.parent / ".ci" / "run"


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
