"""``benchmarks/convergence_bars.py``: figures from a handwritten summary, and the committed curves."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    name = "convergence_bars"
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up there
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return module


bars = load()


def test_means_rates_and_steps_are_those_of_the_summary() -> None:
    losses = {
        "a": {"0.1": {"0": 1.0, "1": 2.0}, "0.2": {"0": 1.25}, "0.4": {"0": 2.5}},
        "b": {"0.1": {"0": 2.0}},
    }
    curve = {"step": [20, 40], "mean": [3.5, 1.5], "last_weights": [4.0, 1.25]}
    curves = bars.Curves({"losses": losses, "curves": {"a": curve}})
    assert curves.by_rate("a") == {0.1: 1.5, 0.2: 1.25, 0.4: 2.5}
    assert curves.best("a") == 1.25
    assert curves.span("a", 4) == 1.25
    assert curves.span("a", 2) == 0.25
    assert [curves.reaches("a", loss) for loss in (3.5, 1.6, 0.5)] == [20, 40, sys.maxsize]
    assert [curves.lead("a", step) for step in (20, 40)] == [0.5, -0.25]
    assert curves.best_is_inside("a")
    assert not curves.best_is_inside("b")
    with pytest.raises(KeyError):
        curves.best("c")


@pytest.mark.parametrize("at", range(len(bars.BARS)))
def test_committed_curves_are_as_the_page_says(at: int) -> None:
    bar, figures, holds = bars.verdicts()[at]
    assert holds != bar.is_open, figures
    line = f"| {bar.text} | {figures} | {'yes' if holds else '**no**'} |"
    assert line in (ROOT / "benchmarks" / "results" / "convergence.md").read_text()


@pytest.mark.parametrize("bar", [bar for bar in bars.BARS if not bar.is_open], ids=lambda bar: bar.text)
def test_a_bar_is_missed_by_some_curves(bar: Any) -> None:
    """Losses of every optimizer the other way round, or all alike, are no longer what is expected."""

    def changed(name: str, only: str, factor: float, more: float) -> Any:
        curves = bars.Curves.read(name)
        for optimizer, rates in curves.kept["losses"].items():
            for seeds in rates.values():
                if optimizer.startswith(only):
                    seeds |= {seed: more + factor * loss for seed, loss in seeds.items()}
        for optimizer, curve in curves.kept["curves"].items():
            for key in ("mean",) if only else ("mean", "last_weights"):
                if optimizer.startswith(only) and key in curve:
                    curve[key] = [more + factor * loss for loss in curve[key]]
        return curves

    tried = [{word: changed(name, "", way, 4.0) for word, name in bars.FILES.items()} for way in (-1.0, 0.0)]
    first = (
        "muon",
        "normuon",
        "soap",
        "dion_half",
        "dion_sixteenth",
        "lamb",
        "galore",
        "apollo",
        "adamw_ema",
        "muon_h",
        "came",
        "adafactor",
    )
    tried += [{word: changed(name, only, 3.0, 1.0) for word, name in bars.FILES.items()} for only in first]
    assert not all(bar.judge(curves)[1] for curves in tried)


@pytest.mark.parametrize("bar", [bar for bar in bars.BARS if bar.inside], ids=lambda bar: bar.text)
def test_best_learning_rate_at_the_edge_of_its_grid_misses_a_bar(bar: Any) -> None:
    curves = {word: bars.Curves.read(name) for word, name in bars.FILES.items()}
    result, _, name = bar.inside.partition(" ")
    losses = curves[result].by_rate(name)
    best = min(losses, key=losses.__getitem__)
    rates = curves[result].kept["losses"][name]
    curves[result].kept["losses"][name] = {rate: rates[rate] for rate in rates if float(rate) <= best}
    assert not bar.judge(curves)[1]
