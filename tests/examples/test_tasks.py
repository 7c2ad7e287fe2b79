"""``benchmarks/tasks.py``: what its bars compare, and the problem that needs no data."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "tasks.py"


@pytest.fixture(scope="module")
def tasks() -> Any:
    """The script as a module."""
    folder = str(SCRIPT.parent)
    sys.path.insert(0, folder)
    try:
        import tasks as module
    finally:
        sys.path.remove(folder)
    assert isinstance(module, ModuleType)
    return module


def test_memory_moves_every_right_logit_by_the_learning_rate(tasks: Any) -> None:
    """Muon without momentum: 20 steps of 0.1 bring right logits to about 2 and leave the others at about 0.

    At the start the gradient is, in the basis of questions and answers, ``-(I - J / 99) diag(frequency)``,
    J of ones. But for the direction of ones its polar factor is near ``-I``. The polynomials of Newton-Schulz
    bring singular values to between 0.7 and 1.2, and the direction of ones is one in 99 of each fact.
    """
    problem = tasks.PROBLEMS["memory"]
    found = problem.train(problem.optimizers[tasks.MUON], 20, 0)
    low, high = (math.exp(2 * factor) / (math.exp(2 * factor) + tasks.FACTS - 1) for factor in (0.7, 1.3))
    assert low < found["worst"] < found["best"] < high


def test_bars_hold_of_the_memory_and_are_written(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--problems", "memory", "--seeds", "0", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "tasks.json").read_text())
    assert [bar["holds"] for bar in result["bars"]] == [True] * 3
    assert {row["optimizer"] for row in result["rows"]} >= {"SOAP, lr 0.1", "AdamW, lr 0.01"}
    assert [file.name for file in tmp_path.iterdir()] == ["tasks.json"]
    assert done.stdout.count("| yes |") == 3


def test_missed_bars_end_with_1(tasks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tasks.main(["--problems", "memory", "--seeds", "0", "--steps", "1", "--out", str(tmp_path)]) == 1
    assert "| worst / best of AdamW is 0.05 or less | **no** |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("problem", "figures", "wanted"),
    [
        ("perceptron", (0.64, 0.64), [True, True]),
        ("perceptron", (0.639, 0.7), [False, True]),
        ("perceptron", (0.7, 0.639), [True, False]),
        ("convolutions", (0.9, 0.93), [True, True]),
        ("convolutions", (0.92, 0.93), [True, False]),
        ("convolutions", (0.8, 0.92), [False, True]),
    ],
)
def test_bars_compare_means_with_what_is_known(
    tasks: Any, problem: str, figures: tuple[float, float], wanted: list[bool]
) -> None:
    names = ("AdamW, lr 0.01", "Muon, lr 0.02")
    rows = [
        {"problem": problem, "optimizer": name, "figures": {"accuracy": [value + 1e-9, 0.0, 1.0]}}
        for name, value in zip(names, figures, strict=True)
    ]
    assert [bar["holds"] for bar in tasks.verdicts(rows)] == wanted


def test_every_problem_has_a_bar_and_every_bar_a_problem(tasks: Any) -> None:
    assert set(tasks.BARS) == set(tasks.PROBLEMS)
    shapes = [tuple(p.shape) for p in tasks.convolutions().parameters() if p.ndim > 1]
    assert shapes == [(25, 1, 5), (25, 25, 3), (25, 25, 3), (10, 125)]


def test_results_in_the_checkout_hold_every_bar() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "tasks.json").read_text())
    assert len(result["bars"]) == 7
    assert all(bar["holds"] for bar in result["bars"])
    assert {row["seeds"] for row in result["rows"]} == {2}


def test_page_has_the_tables_of_the_results(tasks: Any) -> None:
    page = (ROOT / "benchmarks" / "results" / "convergence.md").read_text()
    result = json.loads((ROOT / "benchmarks" / "results" / "tasks.json").read_text())
    assert f"<!-- tasks: begin -->\n{tasks.markdown(result)}<!-- tasks: end -->" in page
