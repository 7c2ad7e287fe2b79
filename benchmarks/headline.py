"""Rows of the picture that a reader sees first: races, each against the fastest other implementation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from contender import OURS
from harness import clock_of
from workloads import ADAFACTOR, ADAMW, CAME, DION2, DION_4, DION_16, LION, MUON, NORMUON

#: Workload, family, and how the picture names them, in the order of the picture.
HEADLINE = (
    ("gpt160m-l1", MUON, "Muon, one layer of GPT-160M"),
    ("1024x4096", MUON, "Muon, one 1024 × 4096 matrix"),
    ("600x64x64", MUON, "Muon, 600 matrices of 64 × 64"),
    ("1024x4096", NORMUON, "NorMuon, one 1024 × 4096 matrix"),
    ("1024x4096", DION_4, "Dion, rank 1/4, the same matrix"),
    ("1024x4096", DION_16, "Dion, rank 1/16, the same matrix"),
    ("1024x4096", DION2, "Dion2, 1/4, the same matrix"),
    ("memory-1024x4096", ADAFACTOR, "Adafactor, the same matrix"),
    ("memory-1024x4096", CAME, "CAME, the same matrix"),
    ("gpt2-74", LION, "Lion, all tensors of GPT-2"),
    ("4000x768", ADAMW, "AdamW, 4000 vectors of 768"),
    ("flat-100m", ADAMW, "AdamW, one tensor of 100 million"),
)


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
        figures = race["contenders"][peer]["ratio"][clock_of(race)]
        yield Row(label, peer_name(peer), figures["median"], figures["low"], figures["high"])


def fastest_peer(race: dict[str, Any]) -> str | None:
    """Contender of another package that runs the race's algorithm fastest; none where none ran."""
    algorithm = race["family"].split()[0]
    ratios = {
        name: row["ratio"][clock_of(race)]["median"]
        for name, row in race["contenders"].items()
        if row["status"] == "ok" and not name.startswith(f"{OURS}.") and algorithm in name.lower()
    }
    return min(ratios, key=lambda name: ratios[name]) if ratios else None


def peer_name(contender: str) -> str:
    """Name of a contender as its users write it."""
    package, _, rest = re.sub(r" (eager|default)$", "", contender).partition(".")
    if package.startswith("dion"):
        return "microsoft/dion" + (", compiled" if contender.endswith(" compiled") else "")
    if package == "torch":
        return re.sub(r" (?=fused|foreach)", ", ", f"torch.{rest}")
    return re.sub(r" .*", "", package)


def machine_line(result: dict[str, Any]) -> str:
    """Machine, thread count, torch and day of a result in one line."""
    machine, count = result["machine"], fewest_threads(result)
    cpu = " ".join(re.sub(r"\((R|TM)\)|\bProcessor\b", "", machine["cpu"]).split())
    threads = f"{count} thread{'s' if count > 1 else ''} of {machine['cores']} cores"
    return f"{cpu}, {threads}, torch {result['versions']['torch']}, {machine['date'][:10]}"
