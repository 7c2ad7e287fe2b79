"""The ratios that the package sets itself, and whether a result holds them.

A ratio is peer time / oxidion time; where several peers are named the fastest that ran counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from contenders import FAST, HALF
from harness import ratio, series_of
from workloads import (
    ADAFACTOR,
    ADAMW,
    ADAMW8,
    CAME,
    DION2,
    DION_4,
    DION_16,
    GALORE_REFRESH,
    LAMB,
    LION,
    MUON,
    NORDION2,
    NORMUON,
)

TORCH_MUON, FUSED = "torch.optim.Muon", "torch.optim.AdamW fused"
FIRST_STEP = 1.5
#: The race whose first steps are compared with those of peers that compile.
FIRST_STEP_OF = ("1024x4096", MUON)
#: Extra memory of a step as a share of the peer's.
MEMORY = {TORCH_MUON: 1.0, "dion.Muon eager": 0.5, "dion.Dion eager": 0.5}

#: Whose updates ours must be as near to orthonormal ones as.
BASELINE = {
    MUON: TORCH_MUON,
    DION_4: "dion.Dion eager",
    DION_16: "dion.Dion eager",
    NORMUON: "dion.NorMuon eager",
    DION2: "dion.Dion2 eager",
    NORDION2: "dion.NorDion2 eager",
}
#: Distances that are rounding in float32.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Bar:
    """One row: on this workload `ours` must be `least` times as fast as each of `peers`."""

    workload: str
    family: str
    ours: str
    peers: tuple[str, ...]
    least: float


def _dion(name: str) -> tuple[str, ...]:
    return (f"dion.{name} eager", f"dion.{name} compiled")


BARS = (
    *(
        Bar(shape, MUON, "oxidion.Muon", (TORCH_MUON,), least)
        for shape, least in (("1024x4096", 1.8), ("1024x2752", 1.65), ("1024x1024", 1.4), ("2048x2048", 1.4))
    ),
    *(
        Bar(shape, MUON, FAST, (TORCH_MUON,), least)
        for shape, least in (("1024x4096", 2.0), ("1024x2752", 1.9), ("1024x1024", 1.8), ("2048x2048", 1.8))
    ),
    Bar("gpt160m-l12", MUON, "oxidion.Muon", (TORCH_MUON, *_dion("Muon")), 1.6),
    Bar("gpt160m-l12", MUON, FAST, (TORCH_MUON, *_dion("Muon")), 1.85),
    Bar("600x64x64", MUON, "oxidion.Muon", (TORCH_MUON,), 3),
    Bar("200x256x256", MUON, "oxidion.Muon", (TORCH_MUON,), 2),
    *(Bar(list_, DION_4, "oxidion.Dion", _dion("Dion"), 2.2) for list_ in ("1024x4096", "gpt160m-l12")),
    *(Bar(list_, DION_4, HALF, _dion("Dion"), 3) for list_ in ("1024x4096", "gpt160m-l12")),
    *(Bar(list_, DION_16, "oxidion.Dion", _dion("Dion"), 3.5) for list_ in ("1024x4096", "gpt160m-l12")),
    Bar("1024x4096", NORMUON, "oxidion.NorMuon", _dion("NorMuon"), 1.6),
    Bar("1024x4096", DION2, "oxidion.Dion2", _dion("Dion2"), 2.5),
    Bar("1024x4096", NORDION2, "oxidion.NorDion2", _dion("NorDion2"), 2.5),
    Bar("flat-100m", ADAMW, "oxidion.AdamW", (FUSED,), 1),
    Bar("4000x768", ADAMW, "oxidion.AdamW", (FUSED,), 5),
    Bar("gpt2-74", LION, "oxidion.Lion", ("dion lion group eager",), 6),
    Bar("gpt2-74", LION, "oxidion.Lion", ("lion_pytorch.Lion",), 2),
    *(
        Bar(list_, family, ours, peers, least)
        for list_ in ("memory-1024x4096", "memory-100m")
        for family, ours, peers, least in (
            (LAMB, "oxidion.Lamb", ("pytorch_optimizer.Lamb",), 2),
            (
                ADAFACTOR,
                "oxidion.Adafactor",
                ("torch.optim.Adafactor default", "torch.optim.Adafactor foreach"),
                4,
            ),
            (CAME, "oxidion.CAME", ("came_pytorch.CAME",), 4),
            (ADAMW8, "oxidion.AdamW 8-bit", ("torchao AdamW8bit eager", "torchao AdamW8bit compiled"), 10),
        )
    ),
    *(
        Bar(list_, GALORE_REFRESH, ours, ("galore_torch.GaLoreAdamW",), 10)
        for list_ in ("memory-1024x4096", "memory-100m")
        for ours in ("oxidion.GaLoreAdamW gram", "oxidion.GaLoreAdamW random")
    ),
)


def against_compiled(workload: str, family: str) -> bool:
    """Whether this race is compared with a peer under its own ``torch.compile``, by a bar or first steps."""
    peers = {peer for bar in BARS if (bar.workload, bar.family) == (workload, family) for peer in bar.peers}
    return (workload, family) == FIRST_STEP_OF or any(peer.endswith(" compiled") for peer in peers)


def first_step_counts(workload: str, family: str, peer: str) -> bool:
    """Whether a peer's first step or extra memory on this list is compared with ours."""
    return (workload, family) == FIRST_STEP_OF or peer in MEMORY


def held(result: dict[str, Any]) -> Iterator[tuple[str, str, float, float]]:
    """What was demanded, against whom, how much, and what was measured, of the races that were run."""
    for bar in BARS:
        for race in result["races"]:
            if (race.get("workload"), race.get("family")) != (bar.workload, bar.family):
                continue
            rows = {name: row for name, row in race.get("contenders", {}).items() if row["status"] == "ok"}
            peers = [name for name in bar.peers if name in rows]
            if bar.ours not in rows or not peers:
                continue
            clock = "cpu" if race["threads"] == 1 else "wall"
            base = series_of(rows[bar.ours])
            ratios = {name: ratio(series_of(rows[name]), base, clock)["median"] for name in peers}
            closest = min(ratios, key=lambda name: ratios[name])
            what = f"{bar.ours}, {bar.workload}, {race['threads']} thread{'s' if race['threads'] > 1 else ''}"
            yield what, closest, bar.least, ratios[closest]


def first_steps(result: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    """First step over warm step of our classes in CPU time, and with what the system did for it before."""
    for row in result["first_steps"]:
        good = [sample for sample in row["samples"] if "first_cpu" in sample]
        if row["contender"].startswith("oxidion.") and good:
            share = statistics.median(sample["first_cpu"] / sample["warm_cpu"] for sample in good)
            whole = statistics.median(
                (sample["first_cpu"] + sample.get("before_first", 0.0)) / sample["warm_cpu"]
                for sample in good
            )
            yield f"{row['contender']}, {row['workload']}, {row['family']}", share, whole


def extra_memory(result: dict[str, Any]) -> Iterator[tuple[str, str, float, float]]:
    """Peak memory of a step beyond parameters, gradients and state, as a share of a peer's."""
    extra: dict[tuple[str, str], dict[str, float]] = {}
    for row in result["first_steps"]:
        good = [sample["extra_bytes"] for sample in row["samples"] if "extra_bytes" in sample]
        if good:
            extra.setdefault((row["workload"], row["family"]), {})[row["contender"]] = statistics.median(good)
    for (workload, family), rows in extra.items():
        ours = next((name for name in rows if name in ("oxidion.Muon", "oxidion.Dion")), None)
        for peer, most in MEMORY.items():
            if ours is not None and rows.get(peer):
                yield f"{ours}, {workload}, {family}", peer, most, rows[ours] / rows[peer]


def quality(result: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, tuple[float, float]]]]:
    """How far updates are from orthonormal ones, ours and the baseline's, by measure."""
    for entry in result["qualities"]:
        rows = {name: row for name, row in entry.get("rows", {}).items() if "cosine" in row}
        theirs = rows.get(BASELINE.get(entry.get("family"), ""))
        for name, row in rows.items():
            if theirs is not None and name.startswith("oxidion.") and name != HALF:
                both = zip(_defects(row).items(), _defects(theirs).values(), strict=True)
                found = {measure: (own, other) for (measure, own), other in both}
                yield f"{name}, {entry['workload']}, {entry['family']}", BASELINE[entry["family"]], found


def _defects(row: dict[str, float]) -> dict[str, float]:
    return {
        "sigma max - 1": abs(row["sigma_max"] - 1),
        "ortho error": row["orthogonality"],
        "1 - cosine": 1 - row["cosine"],
    }
