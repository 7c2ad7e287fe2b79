"""Tables of docs/performance.md: ratios and milliseconds of every case on every machine that was measured.

``python benchmarks/gains.py`` writes them into the page; a test holds the page to the recorded results.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from contenders import FAST, HALF
from harness import clock_of, median_ms, ratio, series_of
from headline import fastest_peer
from workloads import (
    ADAFACTOR,
    ADAMW,
    ADAMW8,
    CAME,
    DION2,
    DION_4,
    DION_16,
    GALORE,
    GALORE_REFRESH,
    LAMB,
    LION,
    MUON,
    NORDION2,
    NORMUON,
)

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "performance.md"
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
_GPT = ("gpt160m-l1", "gpt160m-l12")
_SHAPES = ("1024x4096", "1024x2752", "1024x1024", "2048x2048")
_SMALL = ("600x64x64", "200x256x256", "1000x64x64+4000x768", "mixed")
_MEMORY = ("memory-1024x4096", "memory-100m")
#: Family, the contender that is ours (none: the base of the race), its name on the page, and the lists.
CASES: tuple[tuple[str, str | None, str, tuple[str, ...]], ...] = (
    (MUON, None, "Muon", (*_GPT, *_SHAPES, *_SMALL)),
    (MUON, FAST, 'Muon, `"fast"`', (*_GPT, *_SHAPES)),
    (NORMUON, None, "NorMuon", ("gpt160m-l1", "1024x4096")),
    (DION_4, None, "Dion 1/4", (*_GPT, "1024x4096", "600x64x64", "mixed")),
    (DION_4, HALF, "Dion 1/4, bfloat16 products", (*_GPT, "1024x4096", "mixed")),
    (DION_16, None, "Dion 1/16", (*_GPT, "1024x4096", "mixed")),
    (DION2, None, "Dion2 1/4", ("gpt160m-l1", "1024x4096")),
    (NORDION2, None, "NorDion2 1/4", ("gpt160m-l1", "1024x4096")),
    (ADAMW, None, "AdamW", ("gpt160m-l1", "gpt2-74", "mixed", "4000x768", "flat-100m")),
    (LION, None, "Lion", ("gpt160m-l1", "gpt2-74", "mixed", "4000x768", "flat-100m")),
    (LAMB, None, "Lamb", _MEMORY),
    (ADAFACTOR, None, "Adafactor", _MEMORY),
    (CAME, None, "CAME", _MEMORY),
    (ADAMW8, None, "AdamW, 8-bit states", _MEMORY),
    (GALORE, None, "GaLoreAdamW, rank 128", ("memory-1024x4096",)),
    (GALORE_REFRESH, None, 'GaLoreAdamW\'s refresh, `"gram"`', _MEMORY),
    (GALORE_REFRESH, "oxidion.GaLoreAdamW random", 'GaLoreAdamW\'s refresh, `"random"`', _MEMORY),
)
#: Rows of the table that opens the page: name, families, the contender that is ours, and the lists.
SUMMARY: tuple[tuple[str, tuple[str, ...], str | None, tuple[str, ...]], ...] = (
    ("Muon, NorMuon", (MUON, NORMUON), None, (*_GPT, *_SHAPES, "200x256x256", "mixed")),
    ("Muon, many matrices of 64 x 64", (MUON,), None, ("600x64x64", "1000x64x64+4000x768")),
    ("Dion, rank 1/4", (DION_4,), None, (*_GPT, "1024x4096")),
    ("Dion, rank 1/4, bfloat16 products", (DION_4,), HALF, (*_GPT, "1024x4096")),
    ("Dion, rank 1/16", (DION_16,), None, (*_GPT, "1024x4096")),
    ("Dion2, NorDion2, 1/4", (DION2, NORDION2), None, ("gpt160m-l1", "1024x4096")),
    ("AdamW, large tensors", (ADAMW,), None, ("flat-100m", "gpt2-74")),
    ("AdamW, lists that fit the cache", (ADAMW,), None, ("gpt160m-l1", "mixed")),
    ("AdamW, 4000 vectors of 768", (ADAMW,), None, ("4000x768",)),
    ("Lion", (LION,), None, ("gpt160m-l1", "gpt2-74", "mixed", "4000x768", "flat-100m")),
    ("Lamb", (LAMB,), None, _MEMORY),
    ("Adafactor", (ADAFACTOR,), None, _MEMORY),
    ("CAME", (CAME,), None, _MEMORY),
    ("AdamW, 8-bit states", (ADAMW8,), None, _MEMORY),
    ("GaLoreAdamW, between refreshes", (GALORE,), None, ("memory-1024x4096",)),
    ('GaLoreAdamW, a refresh by `"random"`', (GALORE_REFRESH,), "oxidion.GaLoreAdamW random", _MEMORY),
)


def tables(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The Markdown of the tables; a cell holds one thread and two threads, a dash what was not run."""
    head = ["case", *MACHINES.values()]
    ratios: list[list[str]] = []
    times: list[list[str]] = []
    for family, ours, name, lists in CASES:
        for workload in lists:
            both = [_cells(results[machine], workload, family, ours) for machine in MACHINES]
            for table, cells in zip((ratios, times), zip(*both, strict=True), strict=True):
                if any(cells):
                    table.append([f"{name}, {LISTS[workload]}", *cells])
    spans = [
        [name, *(_span(results[machine], families, ours, lists) for machine in MACHINES)]
        for name, families, ours, lists in SUMMARY
    ]
    return {
        "gains": _markdown(head, spans),
        "ratios": _markdown(head, ratios),
        "milliseconds": _markdown(head, times),
    }


def _span(result: dict[str, Any], families: tuple[str, ...], ours: str | None, lists: tuple[str, ...]) -> str:
    """The smallest and the largest ratio of some races, at any thread count."""
    races = [_measured(result, workload, family, ours)[0] for family in families for workload in lists]
    figures = sorted(figure for race in races for figure in race.values())
    texts = [f"{figure:.0f}" if figure >= 10 else f"{figure:.1f}" for figure in figures]
    return "" if not texts else texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return re.sub(r" {2,}", " ", "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]))


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
            clock = clock_of(race)
            times[race["threads"]] = median_ms(rows[name], clock)
            if peer := fastest_peer(race):
                compared = ratio(series_of(rows[peer]), series_of(rows[name]), clock)
                ratios[race["threads"]] = compared["median"]
    return ratios, times


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def written(page: str, results: dict[str, dict[str, Any]]) -> str:
    """The page with its tables written anew between their marks."""
    for name, table in tables(results).items():
        mark = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
        page, count = mark.subn(lambda match, table=table: f"{match[1]}{table}\n{match[2]}", page)
        if count != 1:
            raise ValueError(f"the page has {count} marks `<!-- {name}: begin -->`, one is expected")
    return page


def recorded() -> dict[str, dict[str, Any]]:
    """The results of all machines."""
    return {name: json.loads((HERE / "results" / f"{name}.json").read_text()) for name in MACHINES}


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), recorded()))
