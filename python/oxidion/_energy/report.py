"""``python -m oxidion rank``: what low ranks capture of a checkpoint, as tables, JSON and a picture."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from torch import Tensor

from oxidion._core.table import Table
from oxidion._energy.files import Unfit
from oxidion._energy.momenta import WEIGHTS, Candidate, candidates
from oxidion._energy.spectrum import spectrum

POINTS = 64
"""Rank fractions at which curves are drawn."""
MOST_CURVES = 10
"""Kinds of parameters with curves of their own."""
HALF = 0.5


@dataclass(frozen=True)
class Row:
    """One parameter.

    Attributes:
        name: of the parameter.
        kind: the name without its numbers.
        shape: of the parameter.
        energies: shares of the energy at the rank fractions of the report.
        needed: the smallest rank fraction that captures the energy that the report asks for.
        curve: shares at `POINTS` rank fractions, the last one 1.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    energies: list[float]
    needed: float
    curve: list[float]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Report:
    """Parameters of a checkpoint.

    Attributes:
        source: name of the checkpoint, or of the two whose difference it is.
        key: of the states, or "weights".
        fractions: rank fractions.
        energy: the share that is asked for.
        rows: one for each parameter.
        skipped: names and reasons of those left out.
    """

    source: str
    key: str
    fractions: list[str]
    energy: float
    rows: list[Row]
    skipped: dict[str, str]

    @property
    def rank_fraction(self) -> float:
        """The weighted median of what the parameters need, rounded up to thousandths.

        It is the smallest rank fraction at which parameters with at least half of all elements keep the
        energy that is asked for, each of its own.
        """
        half = HALF * sum(row.elements for row in self.rows)
        done = 0
        for row in sorted(self.rows, key=lambda row: row.needed):
            done += row.elements
            if done >= half:
                break
        return _rounded_up(row.needed)

    def kinds(self) -> Table:
        """One row per kind: shares are means over its parameters, and so is what they need."""
        return Table([self._summary(kind, rows) for kind, rows in self.by_kind().items()])

    def by_kind(self) -> dict[str, list[Row]]:
        """The rows of each kind."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.kind, []).append(row)
        return found

    def _summary(self, kind: str, rows: Sequence[Row]) -> dict[str, Any]:
        means = [
            math.fsum(values) / len(rows) for values in zip(*(row.energies for row in rows), strict=True)
        ]
        return {
            "kind": kind,
            "parameters": len(rows),
            "elements": sum(row.elements for row in rows),
            **dict(zip(self.fractions, means, strict=True)),
            self._needs: math.fsum(row.needed for row in rows) / len(rows),
        }

    @property
    def _needs(self) -> str:
        return f"{self.energy:g} at"

    def __str__(self) -> str:
        """A table of parameters, one of their kinds, and the rank fraction that follows."""
        each = [
            {
                "name": row.name,
                "shape": row.shape,
                **dict(zip(self.fractions, row.energies, strict=True)),
                self._needs: row.needed,
            }
            for row in self.rows
        ]
        most = _rounded_up(max(row.needed for row in self.rows))
        half, share = self.rank_fraction, self.energy
        last = [
            f"rank_fraction={half:g} keeps {share:g} of the energy for half of the elements",
            f"rank_fraction={most:.3f} keeps it for all parameters",
        ]
        left = [f"left out: {name}, {reason}" for name, reason in self.skipped.items()]
        head = f"{self.source}: energy of {self.key} by rank fraction"
        return "\n\n".join([head, str(Table(each)), str(self.kinds()), "\n".join([*left, *last])]) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can hold."""
        return {
            "source": self.source,
            "key": self.key,
            "energy": self.energy,
            "rank_fraction": self.rank_fraction,
            "fractions": self.fractions,
            "parameters": [
                {
                    "name": row.name,
                    "kind": row.kind,
                    "shape": list(row.shape),
                    "energies": row.energies,
                    "needed": row.needed,
                    "curve": row.curve,
                }
                for row in self.rows
            ],
            "skipped": self.skipped,
        }


def report(
    paths: Sequence[Path],
    *,
    key: str | None,
    names: Path | None,
    match: str,
    fractions: Sequence[Fraction],
    energy: float,
) -> Report:
    """Decomposes the matrices of a checkpoint.

    Args:
        paths: one checkpoint, or two, whose difference is looked at.
        key: of the states, or "weights".
        names: a checkpoint of the model, for names.
        match: regular expression, found in the names of those looked at.
        fractions: rank fractions.
        energy: the share that is asked for.

    Raises:
        OSError: where a checkpoint cannot be read.
        ValueError: for checkpoints that are none, that do not go together, or have no matrices.
    """
    key, found = candidates(paths[0], key, names)
    older: dict[str, Candidate] = {}
    if len(paths) > 1:
        older = {each.name: each for each in candidates(paths[1], key, names)[1]}
    rows, skipped = [], {}
    for each in found:
        if len(each.shape) < 2 or not re.search(match, each.name):
            continue
        if each.skipped:
            skipped[each.name] = each.skipped
            continue
        try:
            value = _difference(each, older) if len(paths) > 1 else each.value()
        except Unfit as error:
            skipped[each.name] = str(error)
            continue
        made = spectrum(value, each.settings)
        if isinstance(made, str):
            skipped[each.name] = made
            continue
        rows.append(
            Row(
                each.name,
                _kind(each),
                each.shape,
                [made.energy(fraction) for fraction in fractions],
                float(made.needed(energy)),
                [made.energy(Fraction(n, POINTS)) for n in range(1, POINTS + 1)],
            )
        )
    source = " - ".join(map(str, paths))
    if not rows:
        left = "".join(f"; {name} is left out: {reason}" for name, reason in list(skipped.items())[:3])
        asked = f"--match {match}: " if match else ""
        raise ValueError(f"{asked}{source} has no matrices among its {key} that are looked at{left}")
    return Report(source, key, [str(fraction) for fraction in fractions], energy, rows, skipped)


def _difference(newer: Candidate, older: dict[str, Candidate]) -> Tensor:
    if newer.name not in older:
        raise ValueError(f"{newer.name} is in the first checkpoint only")
    value, before = newer.value(), older[newer.name].value()
    if value.shape != before.shape:
        raise ValueError(
            f"{newer.name} must have one shape in both, got {tuple(value.shape)} and {tuple(before.shape)}"
        )
    return value.double() - before.double()


def _rounded_up(fraction: float) -> float:
    """A rank fraction in thousandths that is no smaller, so that it keeps as much."""
    return min(1.0, math.ceil(fraction * 1000) / 1000)


def _kind(candidate: Candidate) -> str:
    """The name with stars for its numbers; of a parameter without a name its shape."""
    if re.fullmatch(r"(.*\.)?parameter \d+", candidate.name):
        return "×".join(map(str, candidate.shape))
    return re.sub(r"(?<![^._])\d+(?![^._])", "*", candidate.name)


def plot(report: Report, path: Path) -> None:
    """Draws the mean share of each kind by rank fraction, as SVG by the name of the file, else as PNG.

    Raises:
        ImportError: without matplotlib.
    """
    from matplotlib.figure import Figure

    kinds = sorted(report.by_kind().items(), key=lambda item: -sum(row.elements for row in item[1]))
    if len(kinds) > MOST_CURVES:
        rest = [row for _, rows in kinds[MOST_CURVES - 1 :] for row in rows]
        kinds = [*kinds[: MOST_CURVES - 1], (f"{len(kinds) - MOST_CURVES + 1} other kinds", rest)]
    figure = Figure(figsize=(9, 4.8), layout="constrained", facecolor="white")
    axis = figure.subplots()
    places = [n / POINTS for n in range(1, POINTS + 1)]
    for kind, rows in kinds:
        means = [math.fsum(values) / len(rows) for values in zip(*(row.curve for row in rows), strict=True)]
        axis.plot(places, means, label=f"{kind} ({len(rows)})")
    line: dict[str, Any] = {"color": "#222222", "linestyle": "--", "linewidth": 1}
    axis.axhline(report.energy, **line)
    axis.axvline(report.rank_fraction, **line)
    axis.annotate(
        f"rank_fraction={report.rank_fraction:g}",
        (report.rank_fraction, 0.02),
        (6, 0),
        textcoords="offset points",
    )
    what = "weights" if report.key == WEIGHTS else f"the {report.key}"
    axis.set(
        title=f"Energy of {what} that low ranks capture",
        xlabel="rank fraction: rank / short side of the matrix",
        ylabel="captured share of the squared Frobenius norm",
        xlim=(0, 1),
        ylim=(0, 1.01),
    )
    figure.legend(loc="outside right upper", title="mean over parameters")
    kind = "svg" if path.suffix.lower() == ".svg" else "png"
    figure.savefig(path, format=kind, dpi=120)
