"""Estimated times of steps against measured ones, on two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest

from oxidion.__main__ import main

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "planned_times.py"
OPTIMIZERS = ("Lion", "AdamW", "GaLoreAdamW, rank 64", "Dion 1/4, keep", "Dion 1/4, gather", "Muon")
CLEARLY = 1.5
FACTOR = 3.0
"""A calm machine is within 2. Other processes that take the cores temporarily lengthen every sample of a long
step, and not the short products and messages that the estimate is made of."""


def test_estimates_have_the_order_and_size_of_measured_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, str(BENCHMARK), "--ranks", "2", "--rounds", "4", "--least"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--only", *OPTIMIZERS],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (run,) = json.loads((tmp_path / "planned_times.json").read_text("utf-8"))["runs"]
    steps = run["steps"]
    assert set(steps) == set(OPTIMIZERS)
    ratios = {name: row["estimate"] / row["measured"] for name, row in steps.items()}
    assert all(1 / FACTOR < ratio < FACTOR for ratio in ratios.values()), ratios
    clear = [
        (fast, slow)
        for fast, slow in permutations(steps, 2)
        if steps[fast]["measured"] * CLEARLY < steps[slow]["measured"]
    ]
    assert ("AdamW", "Muon") in clear
    wrong = [pair for pair in clear if steps[pair[0]]["estimate"] >= steps[pair[1]]["estimate"]]
    assert not wrong, steps
    # The command line takes the file.
    file = str(tmp_path / "planned_times-2.json")
    assert main(["plan", "--model", "gpt-160m", "--mesh", "fs=2", "--hardware", file]) == 0
    assert "optimizer step" in capsys.readouterr().out
