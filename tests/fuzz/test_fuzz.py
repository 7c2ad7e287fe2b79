"""The fuzzer itself, and a slice of its cases: ``make fuzz`` runs as many as one likes."""

from __future__ import annotations

import pytest
import torch

import fuzz.__main__ as driver
from fuzz.draw import CONTENTS, Draw

SLICE = {
    "steps": 40,
    "hostile": 20,
    "layouts": 15,
    "state_dicts": 40,
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


def test_same_seed_target_and_number_draw_the_same_case() -> None:
    def drawn(*at: object) -> list[object]:
        draw = Draw(*at)  # type: ignore[arg-type]
        return [draw.shape(), draw.random(), draw.content("mixed", (3, 2)).tolist(), torch.rand(1).item()]

    assert drawn(0, "steps", 1) == drawn(0, "steps", 1)
    assert (
        len({str(drawn(*at)) for at in [(0, "steps", 1), (1, "steps", 1), (0, "plans", 1), (0, "steps", 2)]})
        == 4
    )


def test_drawn_tensors_have_their_content_in_any_memory() -> None:
    draw = Draw(0, "draw", 0)
    layouts = set()
    for _ in range(30):
        shape = draw.shape()
        values = draw.normal(shape)
        placed = draw.laid_out(values)
        assert torch.equal(placed, values)
        layouts.add((placed.is_contiguous(), bool(placed.storage_offset())))
        for kind in CONTENTS:
            assert draw.content(kind, shape).shape == values.shape
    assert len(layouts) > 2
    for kind, holds in (("inf", torch.isinf), ("nan", torch.isnan), ("zeros", lambda x: x == 0)):
        assert holds(draw.content(kind, (3, 4))).any()


def test_wrong_case_crash_and_panic_are_findings_and_the_others_run(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert driver.main(["--target", "planted", "--cases", "8", "--seed", "3"]) == 1
    out = capfd.readouterr().out
    again = [line for line in out.splitlines() if line.startswith("again: ")]
    assert again == [
        f"again: PYTHONPATH=tests python -m fuzz --target planted --seed 3 --only {number}"
        for number in (2, 4, 5)
    ]
    assert "AssertionError: wrong numbers" in out
    assert "the process ended with -11" in out
    assert "Panic: a panic" in out
    assert "8 cases" in out
    assert "3 findings" in out
    with pytest.raises(AssertionError, match="wrong numbers"):
        driver.main(["--target", "planted", "--seed", "3", "--only", "2"])


def test_case_that_asks_for_all_memory_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OXIDION_FUZZ_MEMORY", "1")
    found = driver.run_target("planted", 0, 2, 2)
    assert [number for number, _ in found.findings] == [0, 1]
    assert "MemoryError" in found.findings[0][1]
    assert found.cases == 2


def test_case_that_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "PATIENCE", 1.0)
    monkeypatch.setenv("OXIDION_FUZZ_HANG", "1")
    found = driver.run_target("planted", 0, 2, 2)
    assert found.findings[0][0] == 0
    assert "(hangs)" in found.findings[0][1]
    assert found.cases == 2
