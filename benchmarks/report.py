"""Tables from the result of `step.py`; `python benchmarks/report.py RESULT.json` redoes them."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import bars
from charts import plot_ratios, plot_scaling
from floors import floor_seconds
from harness import clock_of, contender_rows, median_ms
from workloads import catalogue, named


def markdown(result: dict[str, Any]) -> str:
    """The whole result as Markdown."""
    sections = [_header(result), _imports(result), _races(result), _firsts(result), _qualities(result)]
    sections.insert(2, _bars(result))
    return "\n".join(section for section in sections if section)


def _header(result: dict[str, Any]) -> str:
    machine, settings = result["machine"], result["settings"]
    versions = ", ".join(f"{source} {version}" for source, version in result["versions"].items())
    sets = " ".join(machine["instruction_sets"])
    return (
        f"# Step benchmark\n\n{machine['cpu']}, {machine['cores']} cores ({sets}), Python {machine['python']}"
        f", {machine['date']}.\nSources: {versions}.\n{settings['rounds']} interleaved rounds; the "
        "one-minute load during each race is in its row.\n\n"
        "Times are medians in milliseconds a step. A ratio is peer time / oxidion time, median of the rounds "
        "with its 95 % bootstrap interval: above 1, oxidion is faster. The clock is process CPU time at one "
        "thread and wall time at more. The floor is the time that operations and memory traffic take at this "
        f"machine's rates (`floors.py`): {_rates(result)}.\n"
    )


def _rates(result: dict[str, Any]) -> str:
    return "; ".join(
        f"{row['threads']} thread{'s' if row['threads'] > 1 else ''} {row['float32'] / 1e9:.0f} GFLOP/s "
        "float32, "
        f"{row['bfloat16'] / 1e9:.0f} bfloat16, {row['bytes'] / 1e9:.1f} GB/s"
        for row in result.get("rates", [])
        if "bytes" in row
    )


def _imports(result: dict[str, Any]) -> str:
    if not result["imports"]:
        return ""
    torch_ms, ours_ms = (_milliseconds(result["imports"], key) for key in ("torch", "oxidion"))
    runs = len(result["imports"])
    return (
        f"`import torch`: {torch_ms} ms; `import oxidion` after it: {ours_ms} ms (medians of {runs} runs).\n"
    )


def _bars(result: dict[str, Any]) -> str:
    rows = [
        (what, f"{peer}, {least:g} times as fast", f"{found:.2f}", found >= least)
        for what, peer, least, found in bars.held(result)
    ]
    rows += [
        (
            f"first step, {what}",
            f"at most {bars.FIRST_STEP} warm steps of CPU time",
            f"{share:.2f}"
            if f"{whole:.2f}" == f"{share:.2f}"
            else f"{share:.2f}; with what came before {whole:.2f}",
            share <= bars.FIRST_STEP,
        )
        for what, share, whole in bars.first_steps(result)
    ]
    rows += [
        (f"extra memory, {what}", f"at most {most:g} of {peer}", f"{share:.2f}", share <= most)
        for what, peer, most, share in bars.extra_memory(result)
    ]
    rows += [
        (
            f"quality, {what}",
            f"as near to orthonormal as {peer}",
            "; ".join(f"{measure} {own:.3g}, there {other:.3g}" for measure, (own, other) in found.items()),
            all(own <= max(other, bars.ROUNDING) for own, other in found.values()),
        )
        for what, peer, found in bars.quality(result)
    ]
    if not rows:
        return ""
    lines = ["## Bars\n", "| what | must be | measured | |", "|---|---|---|---|"]
    lines += [
        f"| {what} | {must} | {found} | {'held' if good else '**missed**'} |"
        for what, must, found, good in rows
    ]
    return "\n".join([*lines, ""])


def _floor(race: dict[str, Any], rates: list[dict[str, Any]]) -> float | None:
    """Milliseconds of the floor of a race, None where none can be computed."""
    of_threads = next((row for row in rates if row["threads"] == race["threads"] and "bytes" in row), None)
    if of_threads is None or race.get("workload") not in {workload.name for workload in catalogue()}:
        return None
    seconds = floor_seconds(named(race["workload"]), race["family"], of_threads)
    return None if seconds is None else 1e3 * seconds


def _races(result: dict[str, Any]) -> str:
    lines = [
        "## Step time\n",
        "| workload | family | threads | contender | ms | ratio | of floor | load | sigma max "
        "| ortho error | cosine |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    qualities = {
        (entry.get("workload"), entry.get("family"), name): row
        for entry in result["qualities"]
        for name, row in entry.get("rows", {}).items()
    }
    for race, name, row in contender_rows(result):
        load = f"{race['load'][0]:.1f}-{race['load'][1]:.1f}"
        figures = qualities.get((race["workload"], race["family"], name.replace(" compiled", " eager")), {})
        cells = [race["workload"], race["family"], str(race["threads"]), name]
        if row["status"] == "ok":
            clock = clock_of(race)
            milliseconds = median_ms(row, clock)
            floor = _floor(race, result.get("rates", []))
            cells += [f"{milliseconds:.2f}", _ratio(row["ratio"][clock], base=name == race["base"])]
            cells.append("" if floor is None else f"{100 * floor / milliseconds:.0f} %")
        else:
            cells += [row["status"], "", ""]
        lines.append("| " + " | ".join([*cells, load, *_quality_cells(figures)]) + " |")
    failures = [race["status"] for race in result["races"] if "contenders" not in race]
    return "\n".join([*lines, "", *failures]) if len(lines) > 3 or failures else ""


def _ratio(figures: dict[str, float], *, base: bool) -> str:
    return "base" if base else f"{figures['median']:.2f} [{figures['low']:.2f}, {figures['high']:.2f}]"


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
        "the state's own bytes. Before each step other memory goes through the caches for 0.3 s, as when "
        "gradients are computed; what the system does for the process from the construction until then, as "
        "clearing pages that were asked for, is CPU time *before*. Rows where that was not measured have "
        "steps one after the other, and what torch imports for its first optimizer in their construction.\n",
        "| workload | family | threads | contender | construct | before | first | warm | first / warm "
        "| by CPU time | state MB | extra MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in result["first_steps"]:
        good = [sample for sample in entry["samples"] if "first" in sample]
        cells = [entry["workload"], entry["family"], str(entry["threads"]), entry["contender"]]
        if good:
            cells += [_milliseconds(good, key) for key in ("construct", "before_first", "first", "warm")]
            for clock in ("", "_cpu"):
                proportion = statistics.median(s["first" + clock] / s["warm" + clock] for s in good)
                cells.append(f"{proportion:.2f}")
            cells += [_megabytes(good, key) for key in ("state_bytes", "extra_bytes")]
        else:
            cells += [entry["samples"][0]["status"], "", "", "", "", "", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _milliseconds(samples: list[dict[str, Any]], key: str) -> str:
    values = [sample[key] for sample in samples if key in sample]
    return f"{1e3 * statistics.median(values):.2f}" if values else "not measured"


def _megabytes(samples: list[dict[str, Any]], key: str) -> str:
    return f"{statistics.median(sample[key] for sample in samples) / 1e6:.1f}"


def _qualities(result: dict[str, Any]) -> str:
    if not result["qualities"]:
        return ""
    return (
        "Quality, worst over the shapes of the list: largest singular value of the update (of P for Dion; of "
        "the rows or columns that moved for Dion2 and NorDion2; before the normalization of rows for NorMuon "
        "and NorDion2); "
        "the orthogonality error `||U U^T - I||_F / sqrt(rank)` on the short side (of P^T P for Dion); the "
        "cosine to the exact polar factor (for Dion to P Q^T from the same momentum and Q), in float64.\n"
    )


def main() -> None:
    """Write the tables and the plots of each JSON file named on the command line."""
    for argument in sys.argv[1:]:
        path = Path(argument)
        result = json.loads(path.read_text(encoding="utf-8"))
        path.with_suffix(".md").write_text(markdown(result), encoding="utf-8")
        plot_ratios(result, path.with_suffix(".png"))
        plot_scaling(result, path.with_name(f"{path.stem}_scaling.png"))


if __name__ == "__main__":
    main()
