"""``python -m oxidion plan`` for the classes that select rows or columns."""

from __future__ import annotations

import pytest

from oxidion.__main__ import main
from oxidion._simulate import Settings, simulate

MODEL, MESH = "gpt-160m", {"fs": 8}


@pytest.mark.parametrize("algorithm", ["dion2", "nordion2"])
def test_selecting_locally_sends_the_fraction(algorithm: str) -> None:
    sent = {}
    for scope in ("local", "global"):
        settings = Settings(algorithm, dtype="float32", fraction=0.25, selection_scope=scope)
        (axis,) = simulate(MODEL, MESH, settings)[0].wire
        sent[scope] = axis.bytes
    assert 0.24 * sent["global"] < sent["local"] < 0.27 * sent["global"]


def test_options_of_the_selection_are_taken_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--algorithm", "nordion2", "--fraction", "0.5", "--selection-scope", "global"]
    assert main(["plan", "--model", MODEL, "--mesh", "fs=8", *options]) == 0
    assert "nordion2 at fraction 0.5 (global)" in capsys.readouterr().out
