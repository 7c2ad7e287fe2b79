"""Judges the curves of `convergence.py` by what is expected of right code at this size.

A bar compares mean held-out losses at the end, each at the best learning rate of an optimizer. Those that are
marked as open were expected by others, of other models, and do not hold here; the page says what was found.

    python benchmarks/convergence_bars.py --page benchmarks/results/convergence.md

Prints the table; ends with 1 where a bar is missed that is not open, or one that is open holds by now.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convergence_report import by_rate
from harness import RESULTS, rewrite, table

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


FILES = {
    "main": "convergence",
    "further": "convergence-further",
    "start": "convergence-start",
    "wide": "convergence-wide",
    "averages": "convergence-averages",
}
"""Results by the word that figures begin with."""
AVERAGED = ("muon_ema", "adamw_ema")
MEASURES: dict[str, Callable[[Curves], float]] = {
    "dion of rank 1/4": lambda curves: curves.by_rate("dion")[0.02],
    "cost of rank 1/16": lambda curves: curves.best("dion_sixteenth_rank") - curves.best("dion_full_rank"),
    "step of adamw's loss": lambda curves: curves.reaches("muon", curves.best("adamw")),
    "span of muon_h": lambda curves: curves.span("muon_h", 4),
    "span of muon": lambda curves: curves.span("muon", 4),
    "least lead at 240": lambda curves: min(curves.lead(name, 240) for name in AVERAGED),
    "largest lead at 400": lambda curves: max(abs(curves.lead(name, 400)) for name in AVERAGED),
}
"""Figures of curves by their names; that of any other name is the smallest loss of an optimizer."""


@dataclass(frozen=True)
class Bar:
    """Figures or numbers, in an order where each is at most the next one plus ``margin``.

    A bar with ``is_open`` is known to fail. The best learning rate of ``inside`` must lie between others.
    """

    text: str
    figures: tuple[str | float, ...]
    margin: float = 0.0
    is_open: bool = False
    inside: str = ""

    def judge(self, curves: Mapping[str, Curves]) -> tuple[str, bool]:
        """Figures for the table, and whether it holds."""
        found = [figure if isinstance(figure, float) else read(figure, curves) for figure in self.figures]
        shown = ", ".join(f"{value:.3f}" if value < 100 else f"{value:.0f}" for value in found)
        in_order = all(one <= other + self.margin for one, other in itertools.pairwise(found))
        result, _, name = self.inside.partition(" ")
        return shown, in_order and (not name or curves[result].best_is_inside(name))


def read(figure: str, curves: Mapping[str, Curves]) -> float:
    """The figure that a text names, as ``further soap``."""
    result, _, name = figure.partition(" ")
    return MEASURES.get(name, lambda curves: curves.best(name))(curves[result])


DIONS = (
    "further dion_full_rank",
    "further dion_half_rank",
    "main dion of rank 1/4",
    "further dion_sixteenth_rank",
)
BARS = (
    Bar("NorMuon at most level with Muon", ("main normuon", "main muon"), LEVEL),
    Bar("Muon 0.1 ahead of AdamW", ("main muon", "main adamw"), -0.1),
    Bar("Muon is at AdamW's last loss by step 250", ("main step of adamw's loss", 250.0)),
    Bar("Dion: full rank before 1/2 before 1/4 before 1/16", DIONS),
    Bar(
        "rank 1/16 costs less at width 256 than at 128",
        ("wide cost of rank 1/16", "further cost of rank 1/16"),
        -LEVEL,
    ),
    Bar("SOAP with two bases at most at 1.86", ("further soap", 1.86)),
    Bar("SOAP with one basis ahead of AdamW", ("further soap_short_side", "main adamw"), -LEVEL),
    Bar(
        "SOAPMuon 0.02 ahead of itself without its basis",
        ("further soap_muon", "further soap_muon_without_basis"),
        -LEVEL,
    ),
    Bar("MuonH, larger start: level with Muon or ahead", ("start muon_h", "main muon"), LEVEL),
    Bar("MuonH, larger start: flatter over a factor of 4", ("start span of muon_h", "main span of muon")),
    Bar("average of weights 0.05 ahead before the decay (Muon, AdamW)", (0.05, "averages least lead at 240")),
    Bar("average of weights within 0.01 at the end (Muon, AdamW)", ("averages largest lead at 400", 0.01)),
    Bar("Lamb within 0.15 of AdamW", ("further lamb", "main adamw"), 0.15, inside="further lamb"),
    Bar(
        "GaLoreAdamW within 0.05 of AdamW",
        ("further galore_adamw", "main adamw"),
        0.05,
        inside="further galore_adamw",
    ),
    Bar(
        "APOLLOAdamW at most level with GaLoreAdamW",
        ("further apollo_adamw", "further galore_adamw"),
        LEVEL,
    ),
    Bar("CAME within 0.05 of AdamW", ("further came", "main adamw"), 0.05, inside="further came"),
    Bar(
        "Adafactor with a momentum within 0.05 of AdamW",
        ("further adafactor_momentum", "main adamw"),
        0.05,
        inside="further adafactor_momentum",
    ),
    Bar(
        "Adafactor without one within 0.05 of AdamW",
        ("further adafactor", "main adamw"),
        0.05,
        is_open=True,
        inside="further adafactor",
    ),
    Bar(
        "Muon without momentum 0.1 behind AdamW",
        ("main adamw", "further muon_without_momentum"),
        -0.1,
        is_open=True,
    ),
)


def verdicts() -> list[tuple[Bar, str, bool]]:
    """Each bar with its figures and whether it holds."""
    curves = {word: Curves.read(name) for word, name in FILES.items()}
    return [(bar, *bar.judge(curves)) for bar in BARS]


def markdown(judged: list[tuple[Bar, str, bool]]) -> str:
    """The table of the page."""
    rows = ([bar.text, figures, "yes" if holds else "**no**"] for bar, figures, holds in judged)
    return table(["expected", "found", "holds"], rows)


def main() -> int:
    """Runs the command line; 1 where an outcome is not the expected one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--page", type=Path, help="page whose table is rewritten")
    judged = verdicts()
    rewrite(parser.parse_args().page, "bars", markdown(judged))
    print(markdown(judged))
    return int(any(holds == bar.is_open for bar, _, holds in judged))


if __name__ == "__main__":
    sys.exit(main())
