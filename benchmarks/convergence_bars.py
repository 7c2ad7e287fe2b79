"""Judges the curves of `convergence.py` by what is expected of right code at this size.

A bar compares mean held-out losses at the end, each at the best learning rate of an optimizer. Those that are
marked as open were expected by others, of other models, and do not hold here; the page says what was found.

    python benchmarks/convergence_bars.py --page docs/convergence.md

Prints the table; ends with 1 where a bar is missed that is not open, or one that is open holds by now.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convergence_report import by_rate
from harness import RESULTS, between, table

LEVEL = 0.02
"""Smaller differences of losses are no results: seeds differ by so much."""


class Curves:
    """The summary of one result: losses at the end by optimizer and rate, and curves at the best rate."""

    def __init__(self, kept: dict[str, Any]) -> None:
        self.kept = kept

    @classmethod
    def read(cls, name: str) -> Curves:
        """That of a file of results."""
        return cls(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))

    def by_rate(self, optimizer: str) -> dict[float, float]:
        """Mean loss at the end of each learning rate."""
        return by_rate(self.kept, optimizer)

    def best(self, optimizer: str) -> float:
        """The smallest of these."""
        return min(self.by_rate(optimizer).values())

    def best_is_inside(self, optimizer: str) -> bool:
        """True if learning rates on both sides of the best one were run."""
        losses = list(self.by_rate(optimizer).values())
        return 0 < losses.index(min(losses)) < len(losses) - 1

    def span(self, optimizer: str, factor: float) -> float:
        """The least span of losses over rates whose last is ``factor`` times the first."""
        rates = self.by_rate(optimizer)
        spans = []
        for first in rates:
            inside = [loss for rate, loss in rates.items() if first <= rate <= 1.001 * factor * first]
            if any(abs(rate / (factor * first) - 1) < 1e-3 for rate in rates):
                spans.append(max(inside) - min(inside))
        return min(spans)

    def lead(self, optimizer: str, step: int) -> float:
        """How far the average of the weights is ahead of the last ones at a step."""
        curve = self.kept["curves"][optimizer]
        last, mean = (curve[key][curve["step"].index(step)] for key in ("last_weights", "mean"))
        return float(last - mean)

    def reaches(self, optimizer: str, loss: float) -> int:
        """The first evaluation at which the mean curve is at or below a loss."""
        curve = self.kept["curves"][optimizer]
        points = zip(curve["step"], curve["mean"], strict=True)
        return next((step for step, mean in points if mean <= loss), sys.maxsize)


@dataclass(frozen=True)
class Bar:
    """What is expected of some curves.

    Attributes:
        text: for the table.
        results: names of the files that it reads.
        judge: figures for the table, and whether it holds.
        is_open: whether it is known not to hold.
    """

    text: str
    results: tuple[str, ...]
    judge: Callable[..., tuple[str, bool]]
    is_open: bool = False


def _listed(losses: list[float]) -> str:
    return ", ".join(f"{loss:.3f}" for loss in losses)


def ranks_in_order(curves: Curves, first: Curves) -> tuple[str, bool]:
    """Dion's losses grow as its rank falls."""
    names = ("dion_full_rank", "dion_half_rank", None, "dion_sixteenth_rank")
    losses = [first.by_rate("dion")[0.02] if name is None else curves.best(name) for name in names]
    return _listed(losses), all(a < b for a, b in itertools.pairwise(losses))


def spread_shrinks(curves: Curves, wide: Curves) -> tuple[str, bool]:
    """What a sixteenth of the rank costs is less in a wider model."""
    narrow, wider = (c.best("dion_sixteenth_rank") - c.best("dion_full_rank") for c in (curves, wide))
    return _listed([narrow, wider]), wider < narrow - LEVEL


def in_order(first: Curves) -> tuple[str, bool]:
    """NorMuon is at most level with Muon, and both are far ahead of AdamW."""
    losses = [first.best(name) for name in ("normuon", "muon", "adamw")]
    return _listed(losses), losses[0] <= losses[1] + LEVEL and losses[1] < losses[2] - 0.1


def sooner(first: Curves) -> tuple[str, bool]:
    """Muon is at AdamW's loss after five eighths of the steps."""
    step = first.reaches("muon", first.best("adamw"))
    return f"step {step} of 400", step <= 250


def without_momentum(curves: Curves, first: Curves) -> tuple[str, bool]:
    """Muon without momentum is far behind AdamW."""
    losses = [curves.best("muon_without_momentum"), first.best("adamw")]
    return _listed(losses), losses[0] > losses[1] + 0.1


def bases(curves: Curves) -> tuple[str, bool]:
    """SOAP with two bases is at most at 1.86."""
    return _listed([curves.best("soap")]), curves.best("soap") <= 1.86


def one_basis(curves: Curves, first: Curves) -> tuple[str, bool]:
    """SOAP with one basis is ahead of AdamW."""
    losses = [curves.best("soap_short_side"), first.best("adamw")]
    return _listed(losses), losses[0] < losses[1] - LEVEL


def basis_helps(curves: Curves) -> tuple[str, bool]:
    """SOAPMuon is ahead of itself without its basis."""
    losses = [curves.best("soap_muon"), curves.best("soap_muon_without_basis")]
    return _listed(losses), losses[0] <= losses[1] - LEVEL


def near_adamw(name: str, most: float) -> Callable[..., tuple[str, bool]]:
    """An optimizer is within so much of AdamW, at a learning rate that is not at the edge of its grid."""

    def judge(curves: Curves, first: Curves) -> tuple[str, bool]:
        losses = [curves.best(name), first.best("adamw")]
        return _listed(losses), losses[0] <= losses[1] + most and curves.best_is_inside(name)

    return judge


def apollo_first(curves: Curves) -> tuple[str, bool]:
    """APOLLO is at most level with GaLore."""
    losses = [curves.best("apollo_adamw"), curves.best("galore_adamw")]
    return _listed(losses), losses[0] <= losses[1] + LEVEL


def held_norms(start: Curves, first: Curves) -> tuple[str, bool]:
    """MuonH from matrices of fitting norms is level with Muon or ahead."""
    losses = [start.best("muon_h"), first.best("muon")]
    return _listed(losses), losses[0] <= losses[1] + LEVEL


def flatter(start: Curves, first: Curves) -> tuple[str, bool]:
    """MuonH depends less on its learning rate than Muon."""
    spans = [start.span("muon_h", 4), first.span("muon", 4)]
    return _listed(spans), spans[0] < spans[1]


def average_leads(averages: Curves) -> tuple[str, bool]:
    """The average of the weights is ahead before the rate falls."""
    leads = [averages.lead(name, 240) for name in ("muon_ema", "adamw_ema")]
    return _listed(leads), min(leads) >= 0.05


def average_ends_level(averages: Curves) -> tuple[str, bool]:
    """The average of the weights is level with them at the end."""
    leads = [averages.lead(name, 400) for name in ("muon_ema", "adamw_ema")]
    return _listed(leads), max(map(abs, leads)) <= 0.01


FIRST, FURTHER, START, WIDE, AVERAGES = (
    "convergence",
    "convergence-further",
    "convergence-start",
    "convergence-wide",
    "convergence-averages",
)
BARS = (
    Bar("NorMuon at most level with Muon, both 0.1 ahead of AdamW", (FIRST,), in_order),
    Bar("Muon is at AdamW's last loss by step 250", (FIRST,), sooner),
    Bar("Dion: full rank before 1/2 before 1/4 before 1/16", (FURTHER, FIRST), ranks_in_order),
    Bar("what rank 1/16 costs shrinks from width 128 to 256", (FURTHER, WIDE), spread_shrinks),
    Bar("SOAP with two bases at most at 1.86", (FURTHER,), bases),
    Bar("SOAP with one basis ahead of AdamW", (FURTHER, FIRST), one_basis),
    Bar("SOAPMuon 0.02 ahead of itself without its basis", (FURTHER,), basis_helps),
    Bar("MuonH, larger start: level with Muon or ahead", (START, FIRST), held_norms),
    Bar("MuonH, larger start: flatter over a factor of 4", (START, FIRST), flatter),
    Bar("average of weights 0.05 ahead before the decay (Muon, AdamW)", (AVERAGES,), average_leads),
    Bar("average of weights within 0.01 at the end (Muon, AdamW)", (AVERAGES,), average_ends_level),
    Bar("Lamb within 0.15 of AdamW", (FURTHER, FIRST), near_adamw("lamb", 0.15)),
    Bar("GaLoreAdamW within 0.05 of AdamW", (FURTHER, FIRST), near_adamw("galore_adamw", 0.05)),
    Bar("APOLLOAdamW at most level with GaLoreAdamW", (FURTHER,), apollo_first),
    Bar("CAME within 0.05 of AdamW", (FURTHER, FIRST), near_adamw("came", 0.05)),
    Bar(
        "Adafactor with a momentum within 0.05 of AdamW",
        (FURTHER, FIRST),
        near_adamw("adafactor_momentum", 0.05),
    ),
    Bar(
        "Adafactor without one within 0.05 of AdamW",
        (FURTHER, FIRST),
        near_adamw("adafactor", 0.05),
        is_open=True,
    ),
    Bar("Muon without momentum 0.1 behind AdamW", (FURTHER, FIRST), without_momentum, is_open=True),
)


def verdicts(bars: tuple[Bar, ...] = BARS) -> list[tuple[Bar, str, bool]]:
    """Each bar with its figures and whether it holds."""
    curves = {name: Curves.read(name) for bar in bars for name in bar.results}
    return [(bar, *bar.judge(*(curves[name] for name in bar.results))) for bar in bars]


def markdown(judged: list[tuple[Bar, str, bool]]) -> str:
    """The table of the page."""
    rows = ([bar.text, figures, "yes" if holds else "**no**"] for bar, figures, holds in judged)
    return table(["expected", "found", "holds"], rows)


def main() -> int:
    """Runs the command line; 1 where an outcome is not the expected one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--page", type=Path, help="page whose table is rewritten")
    page = parser.parse_args().page
    judged = verdicts()
    print(markdown(judged))
    if page is not None:
        text = between(page.read_text(encoding="utf-8"), "bars", markdown(judged))
        page.write_text(text, encoding="utf-8")
    return int(any(holds == bar.is_open for bar, _, holds in judged))


if __name__ == "__main__":
    sys.exit(main())
