"""Which contenders the benchmarks leave out, and what they say of them."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("benchmark_scripts")


def entry(name: str, family: str) -> Any:
    """A contender by its name."""
    from contenders import contenders

    return next(item for item in contenders(family, compiled=True) if item.name == name)


def at(monkeypatch: pytest.MonkeyPatch, single: float, half: float) -> None:
    """Products of torch at these rates in float32 and bfloat16."""
    import torch

    import floors

    monkeypatch.setattr(floors, "rate", {torch.float32: single, torch.bfloat16: half}.__getitem__)


def test_peers_that_emulate_bfloat16_slowly_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from floors import reason
    from workloads import named

    square, small = named("1024x1024"), named("600x64x64")
    torch_muon, ours = entry("torch.optim.Muon", "muon"), entry("oxidion.Muon", "muon")
    dion = entry("dion.Dion eager", "dion r=1/4")
    at(monkeypatch, 80e9, 1e9)
    # Five iterations of 30 m^3 operations in all, plus the update: 43 s.
    assert "bfloat16 at 1.0 GFLOP/s here, float32 at 80: a step would take 43 s" in reason(
        torch_muon, "2.11", square
    )
    assert reason(torch_muon, "2.11", small).endswith("a step would take 6 s or more")
    at(monkeypatch, 80e9, 2e9)
    assert reason(torch_muon, "2.11", small) == ""
    assert reason(ours, "0.1", square) == reason(dion, "commit 1", named("1024x4096")) == ""
    at(monkeypatch, 150e9, 75e9)
    assert reason(torch_muon, "2.11", named("gpt160m-l12")) == ""


def test_peers_missing_or_slow_on_long_lists_are_left_out() -> None:
    from floors import reason
    from workloads import named

    adamw = entry("oxidion.AdamW", "adamw")
    flat = named("flat-100m")
    assert reason(adamw, "not installed", flat) == "not installed"
    assert reason(adamw, "import failed: OSError: x", flat) == "import failed: OSError: x"
    assert reason(adamw, "0.1", flat) == ""
    compiled = entry("dion.Muon compiled", "muon")
    assert reason(compiled, "commit 1", named("600x64x64")) == "not run: more than 200 tensors"


def test_a_race_says_why_a_contender_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import floors
    import race
    from workloads import Workload

    monkeypatch.setattr(
        floors, "reason", lambda entry, *_: "" if entry.source == "oxidion" else "not run: why"
    )
    small = Workload("small", ((8, 4),), ((3,),), ("muon",))
    request = {"workload": "small", "family": "muon", "threads": 1, "compiled": False, "rounds": 1}
    found = race.race(small, request)
    rows = found["contenders"]
    assert found["base"] == "oxidion.Muon"
    assert rows["oxidion.Muon"]["ms"] > 0
    assert rows["torch.optim.Muon"] == {"status": "not run: why"}
