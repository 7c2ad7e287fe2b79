"""``benchmarks/convergence_bars.py``: its figures from runs written by hand, and the committed curves."""

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


def run(optimizer: str, lr: float, losses: list[float], seed: int = 0) -> dict[str, Any]:
    curve = {"held_out_step": [20 * (i + 1) for i in range(len(losses))], "held_out_loss": losses}
    final = {"final_held_out_loss": losses[-1], "curve": curve}
    return {"optimizer": optimizer, "lr": lr, "seed": seed, **final}


def test_means_rates_and_steps_are_those_of_the_runs() -> None:
    curves = bars.Curves(
        [
            run("a", 0.1, [3.0, 1.0]),
            run("a", 0.1, [4.0, 2.0], seed=1),
            run("a", 0.2, [3.0, 1.25]),
            run("a", 0.4, [3.0, 2.5]),
            run("b", 0.1, [3.0, 2.0]),
        ]
    )
    assert curves.by_rate("a") == {0.1: 1.5, 0.2: 1.25, 0.4: 2.5}
    assert curves.best("a") == 1.25
    assert curves.best_is_inside("a")
    assert not curves.best_is_inside("b")
    assert curves.span("a", 4) == 1.25
    assert curves.span("a", 2) == 0.25
    assert curves.reaches("a", 0.1, 3.5) == 20
    assert curves.reaches("a", 0.1, 1.6) == 40
    assert curves.reaches("a", 0.1, 0.5) == sys.maxsize
    with pytest.raises(KeyError):
        curves.best("c")


@pytest.mark.parametrize("at", range(len(bars.BARS)))
def test_committed_curves_are_as_the_page_says(at: int) -> None:
    ((bar, figures, holds),) = bars.verdicts((bars.BARS[at],))
    assert holds != bar.is_open, figures
    line = f"| {bar.text} | {figures} | {'yes' if holds else '**no**'} |"
    assert line in (ROOT / "docs" / "convergence.md").read_text()


@pytest.mark.parametrize("bar", [bar for bar in bars.BARS if not bar.is_open], ids=lambda bar: bar.text)
def test_a_bar_is_missed_by_some_curves(bar: Any) -> None:
    """Losses of every optimizer the other way round, or all alike, are no longer what is expected."""

    def changed(name: str, way: float) -> Any:
        curves = bars.Curves.read(name)
        for one in curves._runs:
            series = one["curve"]
            for key in ("held_out_loss", "last_weights_loss"):
                if key in series:
                    series[key] = [4.0 + way * loss for loss in series[key]]
            one["final_held_out_loss"] = series["held_out_loss"][-1]
        return curves

    def worse(name: str, only: str) -> Any:
        curves = bars.Curves.read(name)
        for one in curves._runs:
            if one["optimizer"].startswith(only):
                one["final_held_out_loss"] += 1.0
                one["curve"]["held_out_loss"] = [loss + 1.0 for loss in one["curve"]["held_out_loss"]]
        return curves

    tried = [[changed(name, way) for name in bar.results] for way in (-1.0, 0.0)]
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
    )
    tried += [[worse(name, only) for name in bar.results] for only in first]
    assert not all(bar.judge(*curves)[1] for curves in tried)
