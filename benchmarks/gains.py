"""Tables of the two pages about speed, from the results of every machine; pictures; ratios of an earlier run.

``python benchmarks/gains.py`` writes the tables into the pages; a test holds them to the recorded results.
``python benchmarks/gains.py RESULT.json`` draws the picture of a result.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contenders import FAST, HALF, OURS
from harness import RESULTS, between, table

SUMMARY_PAGE = RESULTS.parents[1] / "docs" / "performance.md"
RECORD_PAGE = RESULTS / "performance.md"
#: Results and what the page calls their machines; each has two cores.
MACHINES = {
    "step": "Xeon without AMX",
    "amx": "Xeon, AMX",
    "zen3": "EPYC Zen 3",
    "epyc": "EPYC Zen 4",
    "zen5": "EPYC Zen 5",
}
LISTS = {
    "gpt160m-l1": "one layer of GPT-160M",
    "gpt160m-l12": "twelve layers of GPT-160M",
    "gpt2-74": "74 tensors of GPT-2",
    "mixed": "mixed list of 36 small tensors",
    "1024x4096": "1024 x 4096",
    "1024x2752": "1024 x 2752",
    "1024x1024": "1024 x 1024",
    "2048x2048": "2048 x 2048",
    "600x64x64": "600 of 64 x 64",
    "200x256x256": "200 of 256 x 256",
    "1000x64x64+4000x768": "1000 of 64 x 64 with 4000 vectors",
    "4000x768": "4000 vectors of 768",
    "flat-100m": "100 M in one tensor",
    "memory-1024x4096": "1024 x 4096",
    "memory-100m": "100 M in 83 tensors",
}
RANDOM = "oxidion.GaLoreAdamW random"
_GPT = ("gpt160m-l1", "gpt160m-l12")
_SHAPES = ("1024x4096", "1024x2752", "1024x1024", "2048x2048")
_SMALL = ("600x64x64", "200x256x256", "1000x64x64+4000x768", "mixed")
_MEMORY = ("memory-1024x4096", "memory-100m")
_ONE = ("gpt160m-l1", "1024x4096")
_FLAT = ("gpt160m-l1", "gpt2-74", "mixed", "4000x768", "flat-100m")
#: Family, the contender that is ours (none: the base of the race), its name on the page, and the lists.
CASES: tuple[tuple[str, str | None, str, tuple[str, ...]], ...] = (
    ("muon", None, "Muon", (*_GPT, *_SHAPES, *_SMALL)),
    ("muon", FAST, 'Muon, `"fast"`', (*_GPT, *_SHAPES)),
    ("normuon", None, "NorMuon", _ONE),
    ("dion r=1/4", None, "Dion 1/4", (*_GPT, "1024x4096", "600x64x64", "mixed")),
    ("dion r=1/4", HALF, "Dion 1/4, bfloat16 products", (*_GPT, "1024x4096", "mixed")),
    ("dion r=1/16", None, "Dion 1/16", (*_GPT, "1024x4096", "mixed")),
    ("dion2 1/4", None, "Dion2 1/4", _ONE),
    ("nordion2 1/4", None, "NorDion2 1/4", _ONE),
    ("adamw", None, "AdamW", _FLAT),
    ("lion", None, "Lion", _FLAT),
    ("lamb", None, "Lamb", _MEMORY),
    ("adafactor", None, "Adafactor", _MEMORY),
    ("came", None, "CAME", _MEMORY),
    ("adamw 8-bit", None, "AdamW, 8-bit states", _MEMORY),
    ("galore r=128", None, "GaLoreAdamW, rank 128", ("memory-1024x4096",)),
    ("galore r=128 refresh", None, 'GaLoreAdamW\'s refresh, `"gram"`', _MEMORY),
    ("galore r=128 refresh", RANDOM, 'GaLoreAdamW\'s refresh, `"random"`', _MEMORY),
)
#: Rows of the table that opens the page: name, families, the contender that is ours, and the lists.
SUMMARY: tuple[tuple[str, tuple[str, ...], str | None, tuple[str, ...]], ...] = (
    ("Muon, NorMuon", ("muon", "normuon"), None, (*_GPT, *_SHAPES, "200x256x256", "mixed")),
    ("Muon, many matrices of 64 x 64", ("muon",), None, ("600x64x64", "1000x64x64+4000x768")),
    ("Dion, rank 1/4", ("dion r=1/4",), None, (*_GPT, "1024x4096")),
    ("Dion, rank 1/4, bfloat16 products", ("dion r=1/4",), HALF, (*_GPT, "1024x4096")),
    ("Dion, rank 1/16", ("dion r=1/16",), None, (*_GPT, "1024x4096")),
    ("Dion2, NorDion2, 1/4", ("dion2 1/4", "nordion2 1/4"), None, _ONE),
    ("AdamW, large tensors", ("adamw",), None, ("flat-100m", "gpt2-74")),
    ("AdamW, lists that fit the cache", ("adamw",), None, ("gpt160m-l1", "mixed")),
    ("AdamW, 4000 vectors of 768", ("adamw",), None, ("4000x768",)),
    ("Lion", ("lion",), None, _FLAT),
    ("Lamb", ("lamb",), None, _MEMORY),
    ("Adafactor", ("adafactor",), None, _MEMORY),
    ("CAME", ("came",), None, _MEMORY),
    ("AdamW, 8-bit states", ("adamw 8-bit",), None, _MEMORY),
    ("GaLoreAdamW, between refreshes", ("galore r=128",), None, ("memory-1024x4096",)),
    ('GaLoreAdamW, a refresh by `"random"`', ("galore r=128 refresh",), RANDOM, _MEMORY),
)
#: Workload, family, and how the picture names them, in the order of the picture.
HEADLINE = (
    ("gpt160m-l1", "muon", "Muon, one layer of GPT-160M"),
    ("1024x4096", "muon", "Muon, one 1024 × 4096 matrix"),
    ("600x64x64", "muon", "Muon, 600 matrices of 64 × 64"),
    ("1024x4096", "normuon", "NorMuon, one 1024 × 4096 matrix"),
    ("1024x4096", "dion r=1/4", "Dion, rank 1/4, the same matrix"),
    ("1024x4096", "dion r=1/16", "Dion, rank 1/16, the same matrix"),
    ("1024x4096", "dion2 1/4", "Dion2, 1/4, the same matrix"),
    ("memory-1024x4096", "adafactor", "Adafactor, the same matrix"),
    ("memory-1024x4096", "came", "CAME, the same matrix"),
    ("gpt2-74", "lion", "Lion, all tensors of GPT-2"),
    ("4000x768", "adamw", "AdamW, 4000 vectors of 768"),
    ("flat-100m", "adamw", "AdamW, one tensor of 100 million"),
)
#: Rows of the table of all peers, behind those of the picture: result, workload, family, name.
PEERS = (
    *(("step", *key) for key in HEADLINE),
    ("step", "memory-1024x4096", "lamb", "Lamb, the same matrix"),
    ("step", "memory-1024x4096", "galore r=128 refresh", "GaLoreAdamW, a refresh, the same matrix"),
    ("zen3", "memory-1024x4096", "adamw 8-bit", "AdamW, 8-bit states, the same matrix, on a Zen 3"),
)
#: A ratio has fallen when its interval lies below the earlier one's by this share.
MARGIN = 0.05


def fastest_peer(race: dict[str, Any]) -> str | None:
    """Contender of another package that runs the race's algorithm fastest; none where none ran."""
    algorithm = race["family"].split()[0]
    times = {
        name: row["ms"]
        for name, row in race["contenders"].items()
        if row["status"] == "ok" and not name.startswith(f"{OURS}.") and algorithm in name.lower()
    }
    return min(times, key=lambda name: race["contenders"][name]["ratio"][race["base"]][0], default=None)


# --- the tables of the page ----------------------------------------------------------------------


def tables(results: dict[str, dict[str, Any]]) -> dict[Path, dict[str, str]]:
    """The tables by page, in Markdown; a cell holds one thread and two, a dash what was not run."""
    head = ["case", *MACHINES.values()]
    ratios: list[list[str]] = []
    times: list[list[str]] = []
    for family, ours, name, lists in CASES:
        for workload in lists:
            both = [_cells(results[machine], workload, family, ours) for machine in MACHINES]
            for rows, cells in zip((ratios, times), zip(*both, strict=True), strict=True):
                if any(cells):
                    rows.append([f"{name}, {LISTS[workload]}", *cells])
    spans = [
        [name, *(_span(results[machine], families, ours, lists) for machine in MACHINES)]
        for name, families, ours, lists in SUMMARY
    ]

    def text(rows: list[list[str]], head: list[str] = head) -> str:
        return re.sub(r" {2,}", " ", table(head, rows))

    peers = text(_peers(results), ["case", "oxidion, ms", "times as long"])
    return {
        SUMMARY_PAGE: {"gains": text(spans), "peers": peers},
        RECORD_PAGE: {"ratios": text(ratios), "milliseconds": text(times)},
    }


def _peers(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Milliseconds of a step at one thread, and how many times as long each other implementation takes."""
    found = []
    for machine, workload, family, name in PEERS:
        for race in results[machine]["races"]:
            if (race.get("workload"), race.get("family"), race["threads"]) != (workload, family, 1):
                continue
            base, algorithm = race["base"], race["family"].split()[0]
            others = [
                (row["ratio"][base][0], peer_name(contender))
                for contender, row in race["contenders"].items()
                if row["status"] == "ok"
                and not contender.startswith(f"{OURS}.")
                and algorithm in contender.lower()
            ]
            shown = ", ".join(f"{peer} {_figure(ratio)}" for ratio, peer in sorted(others))
            found.append([name, _figure(race["contenders"][base]["ms"]), shown])
    return found


def _span(result: dict[str, Any], families: tuple[str, ...], ours: str | None, lists: tuple[str, ...]) -> str:
    """The smallest and the largest ratio of some races, at any thread count."""
    races = [_measured(result, workload, family, ours)[0] for family in families for workload in lists]
    figures = sorted(figure for race in races for figure in race.values())
    texts = [f"{figure:.0f}" if figure >= 10 else f"{figure:.1f}" for figure in figures]
    return "" if not texts else texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def _cells(result: dict[str, Any], workload: str, family: str, ours: str | None) -> list[str]:
    """Ratio to the fastest peer and milliseconds, each at one thread and at two."""
    both = _measured(result, workload, family, ours)
    cells = (", ".join(_figure(by_threads.get(count)) for count in (1, 2)) for by_threads in both)
    return [cell.replace("–, –", "") for cell in cells]


def _measured(
    result: dict[str, Any], workload: str, family: str, ours: str | None
) -> tuple[dict[int, float], dict[int, float]]:
    """Ratios to the fastest peer and milliseconds, by thread count."""
    ratios, times = {}, {}
    for race in result["races"]:
        rows = race.get("contenders", {})
        name = ours or race.get("base")
        if (race.get("workload"), race.get("family")) == (workload, family) and name in rows:
            times[race["threads"]] = rows[name]["ms"]
            if peer := fastest_peer(race):
                ratios[race["threads"]] = rows[peer]["ratio"][name][0]
    return ratios, times


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def written(text: str, page: Path, results: dict[str, dict[str, Any]]) -> str:
    """The text of a page with its tables rewritten between their marks."""
    for name, made in tables(results)[page].items():
        text = between(text, name, made)
    return text


def recorded() -> dict[str, dict[str, Any]]:
    """The results of all machines."""
    return {name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in MACHINES}


# --- the picture ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One bar: how many times as fast as the peer, with the interval of that."""

    label: str
    peer: str
    median: float
    low: float
    high: float


def rows(result: dict[str, Any]) -> list[Row]:
    """Rows of `HEADLINE` that the result has; every race of a result that has none of them."""
    count = fewest_threads(result)
    races = {
        (race["workload"], race["family"]): race
        for race in result["races"]
        if "contenders" in race and race["threads"] == count
    }
    found = [row for key in HEADLINE if (race := races.get(key[:2])) for row in _row(race, key[2])]
    return found or [row for (w, family), race in races.items() for row in _row(race, f"{family}, {w}")]


def fewest_threads(result: dict[str, Any]) -> int:
    """Thread count of the rows: one wherever it was measured."""
    return min((race["threads"] for race in result["races"] if "contenders" in race), default=1)


def _row(race: dict[str, Any], label: str) -> Iterator[Row]:
    if peer := fastest_peer(race):
        yield Row(label, peer_name(peer), *race["contenders"][peer]["ratio"][race["base"]])


def peer_name(contender: str) -> str:
    """Name of a contender as its users write it."""
    package, _, rest = re.sub(r" (eager|default)$", "", contender).partition(".")
    if package == "torch":
        return re.sub(r" (?=fused|foreach)", ", ", f"torch.{rest}")
    name = "microsoft/dion" if package.startswith("dion") else re.sub(r" .*", "", package)
    return name + (", compiled" if contender.endswith(" compiled") else "")


def machine_line(result: dict[str, Any]) -> str:
    """Machine, thread count, torch and day of a result in one line."""
    machine, count = result["machine"], fewest_threads(result)
    cpu = " ".join(re.sub(r"\((R|TM)\)|\bProcessor\b", "", machine["cpu"]).split())
    threads = f"{count} thread{'s' if count > 1 else ''} of {machine['cores']} cores"
    return f"{cpu}, {threads}, torch {result['versions']['torch']}, {machine['date'][:10]}"


def plot(result: dict[str, Any], path: Path) -> None:
    """Bars of `rows`: how many times as fast as the fastest other implementation."""
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
    # Green where oxidion is faster, red where it is slower, grey where the interval holds 1.
    colors = ["#2e8b57" if bar.low > 1 else "#c0392b" if bar.high < 1 else "#8a8a8a" for bar in bars]
    axis.barh(places, medians, color=colors, height=0.66)
    axis.errorbar(medians, places, xerr=spans, fmt="none", ecolor="#222222", linewidth=1.2)
    place_of: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
    for place, bar in zip(places, bars, strict=True):
        axis.annotate(f"{bar.median:.1f}×", (bar.high, place), (5, 0), fontsize=11, weight="bold", **place_of)
        axis.annotate(bar.peer, (bar.high, place), (40, 0), fontsize=9.5, color="#444444", **place_of)
    axis.axvline(1.0, color="#222222", linewidth=1, linestyle="--")
    axis.set_yticks(places, [bar.label for bar in bars], fontsize=11)
    axis.tick_params(axis="y", length=0)
    axis.invert_yaxis()
    # The names of peers need room to the right of the bars; the axis ends with the bars.
    end = math.ceil(max(bar.high for bar in bars))
    axis.set_xlim(0, 2.1 * end)
    axis.set_xticks(range(0, end + 1, math.ceil(end / 10)))
    axis.spines["bottom"].set_bounds(0, end)
    axis.set_xlabel("times as fast as the fastest other implementation", fontsize=11, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    title = "One optimizer step on a CPU: oxidion against others"
    figure.text(0.015, 0.955, title, fontsize=13, weight="bold")
    note = f"{machine_line(result)}; medians with 95 % intervals"
    figure.text(0.015, 0.015, note, fontsize=9.5, color="#444444")
    figure.tight_layout(rect=(0, 0.04, 1, 0.95))
    figure.savefig(path, dpi=160)
    plt.close(figure)


# --- the ratios of an earlier run ------------------------------------------------------------------


def ratios(result: dict[str, Any]) -> dict[str, list[float]]:
    """Median and interval of every peer's ratio, by workload, family, threads and peer."""
    return {
        "/".join((race["workload"], race["family"], str(race["threads"]), name)): row["ratio"][race["base"]]
        for race in result["races"]
        for name, row in race.get("contenders", {}).items()
        if row["status"] == "ok" and name != race["base"]
    }


def fallen(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The ratios whose interval now lies more than `MARGIN` below the interval that they had."""
    old, new = ratios(before), ratios(after)
    return [
        f"{key}: {old[key][0]:.2f} -> {new[key][0]:.2f}"
        for key in old.keys() & new.keys()
        if new[key][2] < old[key][1] * (1 - MARGIN)
    ]


def main() -> None:
    """Draws the pictures of the results that are named, else writes the tables of the page."""
    for name in map(Path, sys.argv[1:]):
        plot(json.loads(name.read_text(encoding="utf-8")), name.with_suffix(".png"))
    if not sys.argv[1:]:
        for page in (SUMMARY_PAGE, RECORD_PAGE):
            text = written(page.read_text(encoding="utf-8"), page, recorded())
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
