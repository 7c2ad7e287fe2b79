"""Plots from the result of `step.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contenders import OURS
from floors import floor_seconds
from report import clock_of, contender_rows, median_ms
from workloads import catalogue, named

SCALING = "gpt160m-l"


def plot_ratios(result: dict[str, Any], path: Path) -> None:
    """Bars of the ratios on a logarithmic axis, one panel a thread count."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    threads = sorted({race["threads"] for race in result["races"] if "contenders" in race})
    bars = {count: rows for count in threads if (rows := _bars(result, count))}
    if not bars:
        return
    height = 1.5 + 0.22 * max(len(entries) for entries in bars.values())
    figure, axes = plt.subplots(1, len(bars), figsize=(8 * len(bars), height), squeeze=False)
    for axis, count in zip(axes[0], bars, strict=True):
        labels, medians, lows, highs = zip(*bars[count], strict=True)
        spans = [[m - low for m, low in zip(medians, lows, strict=True)],
                 [high - m for m, high in zip(medians, highs, strict=True)]]  # fmt: skip
        colours = [_colour(*bar) for bar in zip(labels, lows, highs, strict=True)]
        lengths = [median - 1 for median in medians]
        axis.barh(range(len(labels)), lengths, left=1, color=colours, height=0.7)
        axis.errorbar(medians, range(len(labels)), xerr=spans, fmt="none", ecolor="black", linewidth=1.5)
        axis.set_yticks(range(len(labels)), labels, fontsize=7)
        axis.invert_yaxis()
        axis.set_xscale("log")
        ticks = [
            tick for tick in (0.25, 0.5, 1, 2, 4, 8, 16, 32) if min(lows) / 1.5 < tick < max(highs) * 1.5
        ]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_xticks([], minor=True)
        axis.axvline(1.0, color="black", linewidth=1)
        clock = "CPU time" if count == 1 else "wall time"
        axis.set_xlabel(f"{clock} of the peer / {clock} of oxidion")
        axis.set_title(f"{count} thread{'s' if count > 1 else ''}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _colour(label: str, low: float, high: float) -> str:
    """Green where oxidion is faster, red where it is slower; blue is another setting of its own."""
    if f" · {OURS}." in label:
        return "tab:blue"
    return "tab:green" if low > 1 else "tab:red" if high < 1 else "tab:gray"


def _bars(result: dict[str, Any], threads: int) -> list[tuple[str, float, float, float]]:
    bars = []
    for race, name, row in contender_rows(result):
        if race["threads"] == threads and row["status"] == "ok" and name != race["base"]:
            figures = row["ratio"][clock_of(race)]
            label = f"{race['workload']} · {race['family']} · {name}"
            bars.append((label, figures["median"], figures["low"], figures["high"]))
    return bars


def plot_scaling(result: dict[str, Any], path: Path) -> None:
    """Step time of the GPT lists against parameters, with the floor; one panel a family and thread count."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = _lines(result)
    if not panels:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 5), squeeze=False)
    for axis, ((family, threads), lines) in zip(axes[0], sorted(panels.items()), strict=True):
        for name, points in lines.items():
            counts, times = zip(*sorted(points), strict=True)
            style = {"color": "black", "linestyle": "--"} if name == "floor" else {"marker": "o"}
            axis.plot(counts, times, label=name, **style)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("parameters")
        axis.set_ylabel("milliseconds a step")
        axis.set_title(f"{family}, {threads} thread{'s' if threads > 1 else ''}")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _lines(result: dict[str, Any]) -> dict[tuple[str, int], dict[str, list[tuple[int, float]]]]:
    """By family and thread count: (parameters, milliseconds) of every contender that ran on several lists."""
    panels: dict[tuple[str, int], dict[str, list[tuple[int, float]]]] = {}
    rates = {row["threads"]: row for row in result.get("rates", []) if "bytes" in row}
    lists = {workload.name for workload in catalogue() if workload.name.startswith(SCALING)}
    for race, name, row in contender_rows(result):
        if race["workload"] not in lists or row["status"] != "ok":
            continue
        lines = panels.setdefault((race["family"], race["threads"]), {})
        lines.setdefault(name, []).append((race["numel"], median_ms(row, clock_of(race))))
        if name == race["base"] and race["threads"] in rates:
            floor = floor_seconds(named(race["workload"]), race["family"], rates[race["threads"]])
            if floor is not None:
                lines.setdefault("floor", []).append((race["numel"], 1e3 * floor))
    several = {
        key: {name: points for name, points in lines.items() if len(points) > 1}
        for key, lines in panels.items()
    }
    return {key: lines for key, lines in several.items() if lines}
