"""``python -m oxidion plan`` for the classes that select rows or columns."""

from __future__ import annotations

import pytest

from oxidion.__main__ import main
from oxidion._simulate import Settings, simulate

MODEL, MESH = "gpt-160m", {"fs": 8}


# Dion2 chooses columns of tall matrices, which are not cut here: with "global" too only chosen ones travel.
@pytest.mark.parametrize(("algorithm", "low", "high"), [("dion2", 0.3, 0.4), ("nordion2", 0.24, 0.27)])
def test_selecting_locally_sends_the_fraction(algorithm: str, low: float, high: float) -> None:
    sent = {}
    for scope in ("local", "global"):
        settings = Settings(algorithm, dtype="float32", fraction=0.25, selection_scope=scope)
        (axis,) = simulate(MODEL, MESH, settings)[0].wire
        sent[scope] = axis.bytes
    assert low * sent["global"] < sent["local"] < high * sent["global"]


def test_options_of_the_selection_are_taken_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--algorithm", "nordion2", "--fraction", "0.5", "--selection-scope", "global"]
    assert main(["plan", "--model", MODEL, "--mesh", "fs=8", *options]) == 0
    assert "nordion2 at fraction 0.5 (global)" in capsys.readouterr().out
