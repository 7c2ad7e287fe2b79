"""Tables and a plot from the result of `step.py`; `python benchmarks/report.py RESULT.json` redoes them."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import series_of


def markdown(result: dict[str, Any]) -> str:
    """The whole result as Markdown."""
    sections = [_header(result), _imports(result), _races(result), _firsts(result), _qualities(result)]
    return "\n".join(section for section in sections if section)


def _header(result: dict[str, Any]) -> str:
    machine, settings = result["machine"], result["settings"]
    versions = ", ".join(f"{source} {version}" for source, version in result["versions"].items())
    sets = " ".join(machine["instruction_sets"])
    return (
        f"# Step benchmark\n\n{machine['cpu']}, {machine['cores']} cores ({sets}), Python {machine['python']}"
        f", {machine['date']}.\nSources: {versions}.\n{settings['rounds']} interleaved rounds; one-minute "
        f"load {result['load_at_start']:.2f} at the start, {result['load_at_end']:.2f} at the end.\n\n"
        "Times are medians in milliseconds a step. A ratio is peer time / oxidion time, median of the rounds "
        "with its 95 % bootstrap interval: above 1, oxidion is faster. The clock is process CPU time at one "
        "thread and wall time at more.\n"
    )


def _imports(result: dict[str, Any]) -> str:
    if not result["imports"]:
        return ""
    torch_ms, ours_ms = (_milliseconds(result["imports"], key) for key in ("torch", "oxidion"))
    runs = len(result["imports"])
    return (
        f"`import torch`: {torch_ms} ms; `import oxidion` after it: {ours_ms} ms (medians of {runs} runs).\n"
    )


def _races(result: dict[str, Any]) -> str:
    lines = [
        "## Step time\n",
        "| workload | family | threads | contender | ms | ratio | load | sigma max | ortho error | cosine |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    qualities = {
        (entry.get("workload"), entry.get("family"), name): row
        for entry in result["qualities"]
        for name, row in entry.get("rows", {}).items()
    }
    for race, name, row in _rows(result):
        load = f"{race['load'][0]:.1f}-{race['load'][1]:.1f}"
        figures = qualities.get((race["workload"], race["family"], name.replace(" compiled", " eager")), {})
        cells = [race["workload"], race["family"], str(race["threads"]), name]
        if row["status"] == "ok":
            clock = clock_of(race)
            cells += [f"{_median_ms(row, clock):.2f}", _ratio(row["ratio"][clock], base=name == race["base"])]
        else:
            cells += [row["status"], ""]
        lines.append("| " + " | ".join([*cells, load, *_quality_cells(figures)]) + " |")
    failures = [race["status"] for race in result["races"] if "contenders" not in race]
    return "\n".join([*lines, "", *failures]) if len(lines) > 3 or failures else ""


def clock_of(race: dict[str, Any]) -> str:
    """The clock whose figures are read: CPU time at one thread, wall time at more."""
    return "cpu" if race["threads"] == 1 else "wall"


def _rows(result: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
    for race in result["races"]:
        for name, row in race.get("contenders", {}).items():
            yield race, name, row


def _ratio(figures: dict[str, float], *, base: bool) -> str:
    return "base" if base else f"{figures['median']:.2f} [{figures['low']:.2f}, {figures['high']:.2f}]"


def _median_ms(row: dict[str, Any], clock: str) -> float:
    return 1e3 * statistics.median(series_of(row).rounds(clock).tolist())


def _quality_cells(figures: dict[str, Any]) -> list[str]:
    if "sigma_max" not in figures:
        return [figures.get("status", ""), "", ""]
    return [f"{figures['sigma_max']:.3f}", f"{figures['orthogonality']:.2g}", f"{figures['cosine']:.5f}"]


def _firsts(result: dict[str, Any]) -> str:
    if not result["first_steps"]:
        return ""
    lines = [
        "## First step in a fresh process\n",
        "Wall milliseconds, median over processes; extra memory is the growth of the resident peak beyond "
        "the state's own bytes. Construction includes what torch imports for its first optimizer.\n",
        "| workload | family | threads | contender | construct | first | warm | first / warm | by CPU time "
        "| state MB | extra MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in result["first_steps"]:
        good = [sample for sample in entry["samples"] if "first" in sample]
        cells = [entry["workload"], entry["family"], str(entry["threads"]), entry["contender"]]
        if good:
            cells += [_milliseconds(good, key) for key in ("construct", "first", "warm")]
            for clock in ("", "_cpu"):
                proportion = statistics.median(s["first" + clock] / s["warm" + clock] for s in good)
                cells.append(f"{proportion:.2f}")
            cells += [_megabytes(good, key) for key in ("state_bytes", "extra_bytes")]
        else:
            cells += [entry["samples"][0]["status"], "", "", "", "", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _milliseconds(samples: list[dict[str, Any]], key: str) -> str:
    values = [sample[key] for sample in samples if key in sample]
    return f"{1e3 * statistics.median(values):.2f}" if values else "failed"


def _megabytes(samples: list[dict[str, Any]], key: str) -> str:
    return f"{statistics.median(sample[key] for sample in samples) / 1e6:.1f}"


def _qualities(result: dict[str, Any]) -> str:
    if not result["qualities"]:
        return ""
    return (
        "Quality, worst over the shapes of the list: largest singular value of the update (of P for Dion); "
        "the orthogonality error `||U U^T - I||_F / sqrt(rank)` on the short side (of P^T P for Dion); the "
        "cosine to the exact polar factor (for Dion to P Q^T from the same momentum and Q), in float64.\n"
    )


def plot(result: dict[str, Any], path: Path) -> None:
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
        colours = ["tab:green" if low > 1 else "tab:red" if high < 1 else "tab:gray"
                   for low, high in zip(lows, highs, strict=True)]  # fmt: skip
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


def _bars(result: dict[str, Any], threads: int) -> list[tuple[str, float, float, float]]:
    bars = []
    for race, name, row in _rows(result):
        if race["threads"] == threads and row["status"] == "ok" and name != race["base"]:
            figures = row["ratio"][clock_of(race)]
            label = f"{race['workload']} · {race['family']} · {name}"
            bars.append((label, figures["median"], figures["low"], figures["high"]))
    return bars


def main() -> None:
    """Write the tables and the plot of each JSON file named on the command line."""
    for argument in sys.argv[1:]:
        path = Path(argument)
        result = json.loads(path.read_text(encoding="utf-8"))
        path.with_suffix(".md").write_text(markdown(result), encoding="utf-8")
        plot(result, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
