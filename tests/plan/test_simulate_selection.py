"""``python -m oxidion plan`` for the classes that select rows or columns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import oxidion
from oxidion.__main__ import main
from oxidion._planning.simulate import Settings, simulate

MODEL, MESH = "gpt-160m", {"fs": 8}


# Dion2 chooses columns of tall matrices, which are not cut here: "global" too sends only chosen ones.
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


def test_work_is_that_of_the_side_that_is_selected_along() -> None:
    # Rows are cut, so both choose rows, also of tall matrices, where Dion2 otherwise chooses columns.
    settings = [Settings(a, fraction=0.25) for a in ("dion2", "nordion2")]
    on_rows = [simulate(MODEL, MESH, s)[0].whole_flops for s in settings]
    assert on_rows[0] == on_rows[1] > 0
    alone = [simulate(MODEL, {"dp": 1}, s)[0].whole_flops for s in settings]
    assert alone[0] < 0.5 * alone[1]


def test_work_counts_every_element_of_a_stack_once() -> None:
    found = []
    for shape, keys in (((12, 8), {}), ((12, 8), {"num_heads": 4}), ((4, 3, 8), {})):
        param = nn.Parameter(torch.zeros(shape))
        optimizer = oxidion.Muon([{"params": [param], **keys}], newton_schulz_func=torch.clone)
        found.append(sum(row["flops"] for row in optimizer.explain()))
        found.append(sum(optimizer.plan().work()[:2]))
    assert found == [8 * 12 * 8] * 6
