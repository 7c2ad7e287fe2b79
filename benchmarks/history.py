"""The ratios of earlier runs: one line of JSON for each, and what fell since a result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness import clock_of, contender_rows

#: A ratio has fallen when its interval lies below the earlier one's by this share.
MARGIN = 0.05

Key = tuple[str, str, int, str]


def ratios(result: dict[str, Any]) -> dict[Key, dict[str, float]]:
    """Median and interval of every peer's ratio, by workload, family, threads and peer."""
    found: dict[Key, dict[str, float]] = {}
    for race, name, row in contender_rows(result):
        if row["status"] == "ok" and name != race["base"]:
            found[race["workload"], race["family"], race["threads"], name] = row["ratio"][clock_of(race)]
    return found


def append(result: dict[str, Any], path: Path) -> None:
    """Adds a line: date, machine, load, versions, and the medians of the races that were run, if any were."""
    day = result["machine"]["date"]
    fresh = {
        race["workload"]
        for race in result["races"]
        if "contenders" in race and race["date"] >= result["began"]
    }
    medians = {
        "/".join(map(str, key)): round(value["median"], 3)
        for key, value in ratios(result).items()
        if key[0] in fresh
    }
    if not medians:
        return
    machine = {key: result["machine"][key] for key in ("cpu", "cores")}
    load = [round(result[key], 1) for key in ("load_at_start", "load_at_end")]
    line = {"date": day, **machine, "load": load, "versions": result["versions"], "ratios": medians}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def fallen(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The ratios whose interval now lies more than `MARGIN` below the interval that they had."""
    old, new = ratios(before), ratios(after)
    return [
        f"{'/'.join(map(str, key))}: {old[key]['median']:.2f} -> {new[key]['median']:.2f}"
        for key in old.keys() & new.keys()
        if new[key]["high"] < old[key]["low"] * (1 - MARGIN)
    ]
