"""Plots from the result of `step.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from floors import floor_seconds
from harness import clock_of, contender_rows, median_ms
from headline import Row, machine_line, rows
from workloads import catalogue, named

SCALING = "gpt160m-l"


def plot_ratios(result: dict[str, Any], path: Path) -> None:
    """Bars of `headline.rows`: how many times as fast as the fastest other implementation."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    bars = rows(result)
    if not bars:
        return
    # Eight inches are 800 pixels of a page, so a point is what it is in print; the background is never clear.
    figure, axis = plt.subplots(figsize=(8, 1.5 + 0.36 * len(bars)), facecolor="white")
    places = range(len(bars))
    medians = [bar.median for bar in bars]
    spans = [[bar.median - bar.low for bar in bars], [bar.high - bar.median for bar in bars]]
    axis.barh(places, medians, color=[_colour(bar) for bar in bars], height=0.66)
    axis.errorbar(medians, places, xerr=spans, fmt="none", ecolor="#222222", linewidth=1.2)
    beside: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
    for place, bar in zip(places, bars, strict=True):
        axis.annotate(f"{bar.median:.1f}×", (bar.high, place), (5, 0), fontsize=11, weight="bold", **beside)
        axis.annotate(bar.peer, (bar.high, place), (40, 0), fontsize=9.5, color="#444444", **beside)
    axis.axvline(1.0, color="#222222", linewidth=1, linestyle="--")
    axis.set_yticks(places, [bar.label for bar in bars], fontsize=11)
    axis.tick_params(axis="y", length=0)
    axis.invert_yaxis()
    axis.set_xlim(0, 2.1 * max(bar.high for bar in bars))
    axis.set_xlabel("times as fast as the fastest other implementation", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    figure.text(
        0.015, 0.955, "One optimizer step on a CPU: oxidion against others", fontsize=13, weight="bold"
    )
    note = f"{machine_line(result)}; medians with 95 % intervals"
    figure.text(0.015, 0.015, note, fontsize=9.5, color="#444444")
    figure.tight_layout(rect=(0, 0.04, 1, 0.95))
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _colour(bar: Row) -> str:
    """Green where oxidion is faster, red where it is slower, grey where the interval holds 1."""
    return "#2e8b57" if bar.low > 1 else "#c0392b" if bar.high < 1 else "#8a8a8a"


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
