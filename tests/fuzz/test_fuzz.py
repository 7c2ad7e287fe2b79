"""A slice of the fuzzer's cases: ``make fuzz`` runs as many as one likes."""

from __future__ import annotations

import pytest

import fuzz.__main__ as driver

SLICE = {
    "steps": 40,
    "hostile": 20,
    "layouts": 15,
    "state_dicts": 40,
    "imports": 500,
    "plans": 40,
    "command_line": 40,
    "checkpoints": 40,
}
"""Cases of each target in ``make test``."""


@pytest.mark.parametrize("target", SLICE)
def test_first_cases_of_every_target_have_no_finding(target: str) -> None:
    found = driver.run_target(target, 0, SLICE[target], SLICE[target])
    assert not found.findings, "\n".join(text for _, text in found.findings)
    assert found.cases == SLICE[target]
