"""The small scripts other than the GPT: handwritten LoRA, digits, MNIST-1D, the swap from microsoft/dion."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

FAKE_DION = """
import torch
import oxidion


class Dion(oxidion.Dion):
    def step(self, closure=None):
        print("a step of dion")
        return super().step(closure)
"""
"""A package that is called dion and has its class; microsoft/dion is in no registry."""


def run(script: str, *arguments: str, path: Path | None = None) -> str:
    """What a script prints."""
    paths = [str(path)] if path else []
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    assert "guessed" not in done.stderr  # by param_groups: every parameter is known or named
    return done.stdout


@pytest.mark.parametrize("optimizer", ["AdamW", "Dion", "Muon"])
def test_lora_script_lowers_the_loss_and_leaves_the_base(optimizer: str) -> None:
    text = run("train_lora.py", "--steps", "60", "--optimizer", optimizer, "--rank", "3")
    # Two thin matrices for each of the three layers: 3 * (32 + 64 + 64 + 64 + 64 + 16).
    assert text.startswith(f"{optimizer}: 912 of 8224 parameters are trained\n")
    before, after = map(float, re.findall(r"loss (\S+) -> (\S+)", text)[0])
    assert after < before / 2
    assert "the base is unchanged: True" in text


def test_digits_script_learns_the_digits_in_two_epochs() -> None:
    if importlib.util.find_spec("sklearn") is None and not os.environ.get("OXIDION_REQUIRE_FRAMEWORKS"):
        pytest.skip("no scikit-learn: pip install --group frameworks")
    text = run("train_digits.py", "--epochs", "2", "--width", "8")
    accuracies = [float(number) for number in re.findall(r"held-out accuracy (\S+)$", text, re.MULTILINE)]
    assert len(accuracies) == 2
    assert accuracies[-1] > 0.6  # one digit of ten is 0.1


def test_mnist1d_script_learns_more_than_chance_in_few_steps() -> None:
    text = run("train_mnist1d.py", "--steps", "150", "--count", "1500")
    accuracies = [float(number) for number in re.findall(r"held-out accuracy (\S+)$", text, re.MULTILINE)]
    assert len(accuracies) == 5
    assert accuracies[-1] > 0.3  # chance is 0.1


@pytest.fixture
def mnist1d() -> dict[str, Any]:
    """The names of the script, which a test may change."""
    return runpy.run_path(str(EXAMPLES / "train_mnist1d.py"))


def test_mnist1d_signals_are_balanced_standardized_and_seeded(mnist1d: dict[str, Any]) -> None:
    signals, targets = mnist1d["mnist1d"](200, seed=3)
    assert signals.shape == (200, 1, 40)
    assert targets.bincount().tolist() == [20] * 10
    assert abs(signals.mean().item()) < 1e-6
    assert signals.std(correction=0).item() == pytest.approx(1.0, abs=1e-6)
    again, _ = mnist1d["mnist1d"](200, seed=3)
    other, _ = mnist1d["mnist1d"](200, seed=4)
    assert signals.equal(again)
    assert not signals.equal(other)
    assert len(signals.unique(dim=0)) == 200


def test_mnist1d_noise_is_blurred_by_a_gaussian_of_two_points(mnist1d: dict[str, Any]) -> None:
    noise = mnist1d["smooth_noise"](200_000, np.random.default_rng(0))
    # White noise under a Gaussian of deviation s has variance 1 / (2 s sqrt(pi)); neighbours are correlated
    # by exp(-1 / (4 s^2)). 200,000 points, about 30,000 of them independent: 4 standard errors are 3 %.
    assert noise.var() == pytest.approx(1 / (4 * np.sqrt(np.pi)), rel=0.04)
    correlation = np.corrcoef(noise[:-1], noise[1:])[0, 1]
    assert correlation == pytest.approx(np.exp(-1 / 16), abs=0.01)


def test_mnist1d_example_without_noise_is_its_template_moved(mnist1d: dict[str, Any]) -> None:
    make = mnist1d["example"]
    make.__globals__.update(NOISE=0.0, CORRELATED_NOISE=0.0, SHEAR=0.0, SCALE=0.0, LENGTH=72)
    template = np.array([0, 1, 2, 3, 4, 5, 6, 5, 4, 3, 2, 1], dtype=np.float64)
    signal = make(template, np.random.default_rng(1))
    # A triangle of height 6 over 12 of 48 to 72 points, stretched to 72: at most 18 are not zero.
    assert signal.max() == pytest.approx(6, abs=0.35)
    assert (signal != 0).sum() <= 18
    rolled = np.roll(signal, -int(np.flatnonzero(signal)[0]))
    assert rolled.argmax() in range(5, 10)


def test_swap_from_dion_script_says_that_a_package_is_missing() -> None:
    if importlib.util.find_spec("dion") is not None:
        pytest.skip("a package called dion is installed")
    text = run("swap_from_dion.py", "--steps", "100")
    before, after = map(float, re.findall(r"^oxidion\.Dion: loss (\S+) -> (\S+)$", text, re.MULTILINE)[0])
    assert after < before / 5
    assert "microsoft/dion is not installed" in text


def test_swap_from_dion_script_goes_on_from_the_other_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "dion.py").write_text(FAKE_DION)
    text = run("swap_from_dion.py", "--steps", "20", path=tmp_path)
    assert text.count("a step of dion") == 20 + 10
    losses = re.findall(r"^(.+): loss \S+ -> (\S+)$", text, re.MULTILINE)
    assert [name for name, _ in losses] == ["dion.Dion", "oxidion.Dion", "dion.Dion, then oxidion.Dion"]
    # Both classes are the same here: a checkpoint that is lost on the way would end elsewhere.
    assert len({loss for _, loss in losses}) == 1
