"""All algorithms on a mesh, or one axis at many sizes, as one table and one drawing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from oxidion._core.table import Table
from oxidion._planning import clock
from oxidion._planning.models import AXES, MOST_DIGITS, Mesh, check_ranks, spelled
from oxidion._planning.progress import progress
from oxidion._planning.simulate import Settings, Simulation, human, simulate

CHOICES = (
    {"algorithm": "adamw"},
    {"algorithm": "muon"},
    {"algorithm": "normuon"},
    {"algorithm": "dion", "rank_fraction": 1.0},
    {"algorithm": "dion", "rank_fraction": 0.25},
    {"algorithm": "dion", "rank_fraction": 0.0625},
    {"algorithm": "dion2", "fraction": 0.25},
    {"algorithm": "nordion2", "fraction": 0.25},
    {"algorithm": "galore_adamw"},
)
"""Settings that ``--compare`` puts side by side."""

MOST_SIZES = 24


def swept(base: Mesh, sweep: str) -> list[Mesh]:
    """The meshes of ``fs=8..1024``: the axis at each power of two times its first size, up to the last.

    Raises:
        ValueError: for anything else.
    """
    axis, _, bounds = sweep.partition("=")
    first, dots, last = bounds.partition("..")
    if axis not in AXES or not dots or not (first.isascii() and first.isdigit() and last.isdigit()):
        raise ValueError(f"--sweep must be an axis and two sizes as in fs=8..1024, got {sweep!r}")
    low, high = int(first[:MOST_DIGITS]), int(last[:MOST_DIGITS])
    if not 1 <= low <= high or high > low << MOST_SIZES:
        raise ValueError(f"--sweep must go from a size >= 1 to one that is not smaller, got {sweep!r}")
    sizes = [low << k for k in range(MOST_SIZES + 1) if low << k <= high]
    check_ranks({**base, axis: sizes[-1]})
    return [
        {name: {**base, axis: size}[name] for name in AXES if name in {**base, axis: size}} for size in sizes
    ]


def simulations(
    models: Iterable[str], meshes: Iterable[Mesh], settings: Settings, *, every: bool
) -> list[Simulation]:
    """Plans of all models and meshes, with all algorithms or that of the settings; shows how far it is."""
    choices = [replace(settings, **choice) for choice in CHOICES] if every else [settings]
    wanted = [(model, mesh, choice) for model in models for mesh in meshes for choice in choices]
    found = []
    with progress(len(wanted), "plans") as report:
        for done, (model, mesh, choice) in enumerate(wanted):
            report(done)
            found.append(simulate(model, mesh, choice)[0])
    return found


def table(found: list[Simulation]) -> Table:
    """A row for each plan."""
    rows = []
    for one in found:
        row = {
            "model": Path(one.model).stem,
            "mesh": spelled(one.mesh),
            "algorithm": one.settings.method,
            "sent": human(sum(t.sent for t in one.wire), "B"),
            "states": human(one.memory["states"], "B"),
            "workspace": human(one.memory["workspace"], "B"),
            "busiest": human(one.busiest_flops, "FLOP"),
            "balance": f"{one.balance:.2f}",
        }
        if one.time is not None:
            row |= {"step": clock.human(one.time.total), "exposed": clock.human(one.time.exposed)}
            if one.time.share is not None:
                row["of training"] = f"{100 * one.time.share:.2f} %"
        rows.append(row)
    return Table(rows)


def plot(found: list[Simulation], path: Path) -> None:
    """Draws bytes and, if estimated, times against the number of ranks, as SVG by the file's name, else PNG.

    Raises:
        ImportError: without matplotlib.
    """
    from matplotlib.figure import Figure

    timed = any(one.time is not None for one in found)
    figure = Figure(figsize=(12 if timed else 6.5, 4.5), layout="constrained")
    drawings = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    lines: dict[tuple[str, str], list[Simulation]] = {}
    for one in found:
        lines.setdefault((Path(one.model).stem, one.settings.method), []).append(one)
    for (model, method), line in lines.items():
        ranks = [math.prod(one.mesh.values()) for one in line]
        label = f"{model}, {method}"
        drawings[0].plot(
            ranks, [sum(t.sent for t in one.wire) / 1e9 for one in line], marker="o", label=label
        )
        if timed:
            seconds = [1e3 * one.time.total for one in line if one.time is not None]
            drawings[1].plot(ranks, seconds, marker="o", label=label)
    drawings[0].set(title="Bytes that a rank sends in a step", ylabel="GB", xlabel="ranks")
    if timed:
        drawings[1].set(title="Estimated time of a step", ylabel="ms", xlabel="ranks", yscale="log")
    for drawing in drawings:
        drawing.set_xscale("log", base=2)
    figure.legend(*drawings[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, format="svg" if path.suffix.lower() == ".svg" else "png", dpi=120)
