"""The ratios that the package sets itself, and whether a result holds them.

A ratio is peer time / oxidion time; where several peers are named the fastest that ran counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from contenders import FAST, HALF

TORCH_MUON, FUSED = "torch.optim.Muon", "torch.optim.AdamW fused"
FIRST_STEP = 1.5
#: The race whose first steps are compared with those of peers that compile.
FIRST_STEP_OF = ("1024x4096", "muon")
#: Extra memory of a step as a share of the peer's.
MEMORY = {TORCH_MUON: 1.0, "dion.Muon eager": 0.5, "dion.Dion eager": 0.5}

#: Peers as whose updates ours must be as near to orthonormal ones.
BASELINE = {
    "muon": TORCH_MUON,
    "dion r=1/4": "dion.Dion eager",
    "dion r=1/16": "dion.Dion eager",
    "normuon": "dion.NorMuon eager",
    "dion2 1/4": "dion.Dion2 eager",
    "nordion2 1/4": "dion.NorDion2 eager",
}
#: Distances that are rounding in float32.
ROUNDING = 1e-5


#: A demand: what it is of, what must be, what was found, and whether it is held.
Row = tuple[str, str, str, bool]


@dataclass(frozen=True)
class Bar:
    """One row: on this workload `ours` must be `least` times as fast as each of `peers`."""

    workload: str
    family: str
    ours: str
    peers: tuple[str, ...]
    least: float


def _bars(lists: str, family: str, ours: str, peers: tuple[str, ...], *least: float) -> Iterator[Bar]:
    """A bar for each list; the last number is that of all further lists."""
    for place, workload in enumerate(lists.split()):
        yield Bar(workload, family, f"oxidion.{ours}", peers, least[min(place, len(least) - 1)])


def _dion(name: str) -> tuple[str, ...]:
    return (f"dion.{name} eager", f"dion.{name} compiled")


_SHAPES, _SMALL, _DIONS = "1024x4096 1024x2752 1024x1024 2048x2048", "600x64x64 200x256x256", _dion("Dion")
_LARGE, _MEMORY = "1024x4096 gpt160m-l12", "memory-1024x4096 memory-100m"
_FAST, _HALF = FAST.removeprefix("oxidion."), HALF.removeprefix("oxidion.")
_TORCHAO = ("torchao AdamW8bit eager", "torchao AdamW8bit compiled")
_ADAFACTORS = ("torch.optim.Adafactor default", "torch.optim.Adafactor foreach")
BARS = (
    *_bars(_SHAPES, "muon", "Muon", (TORCH_MUON,), 1.8, 1.65, 1.4),
    *_bars(_SHAPES, "muon", _FAST, (TORCH_MUON,), 2.0, 1.9, 1.8),
    *_bars("gpt160m-l12", "muon", "Muon", (TORCH_MUON, *_dion("Muon")), 1.6),
    *_bars("gpt160m-l12", "muon", _FAST, (TORCH_MUON, *_dion("Muon")), 1.85),
    *_bars(_SMALL, "muon", "Muon", (TORCH_MUON,), 3, 2),
    *_bars(_LARGE, "dion r=1/4", "Dion", _DIONS, 2.2),
    *_bars(_LARGE, "dion r=1/4", _HALF, _DIONS, 3),
    *_bars(_LARGE, "dion r=1/16", "Dion", _DIONS, 3.5),
    *_bars("1024x4096", "normuon", "NorMuon", _dion("NorMuon"), 1.6),
    *_bars("1024x4096", "dion2 1/4", "Dion2", _dion("Dion2"), 2.5),
    *_bars("1024x4096", "nordion2 1/4", "NorDion2", _dion("NorDion2"), 2.5),
    *_bars("flat-100m 4000x768", "adamw", "AdamW", (FUSED,), 1, 5),
    *_bars("gpt2-74", "lion", "Lion", ("dion lion group eager",), 6),
    *_bars("gpt2-74", "lion", "Lion", ("lion_pytorch.Lion",), 2),
    *_bars(_MEMORY, "lamb", "Lamb", ("pytorch_optimizer.Lamb",), 2),
    *_bars(_MEMORY, "adafactor", "Adafactor", _ADAFACTORS, 4),
    *_bars(_MEMORY, "came", "CAME", ("came_pytorch.CAME",), 4),
    *_bars(_MEMORY, "adamw 8-bit", "AdamW 8-bit", _TORCHAO, 10),
    *_bars(_MEMORY, "galore r=128 refresh", "GaLoreAdamW gram", ("galore_torch.GaLoreAdamW",), 10),
    *_bars(_MEMORY, "galore r=128 refresh", "GaLoreAdamW random", ("galore_torch.GaLoreAdamW",), 10),
)


def against_compiled(workload: str, family: str) -> bool:
    """Whether this race is compared with a peer under its own ``torch.compile``, by a bar or first steps."""
    peers = {peer for bar in BARS if (bar.workload, bar.family) == (workload, family) for peer in bar.peers}
    return (workload, family) == FIRST_STEP_OF or any(peer.endswith(" compiled") for peer in peers)


def first_step_counts(workload: str, family: str, peer: str) -> bool:
    """Whether a peer's first step or extra memory on this list is compared with ours."""
    return (workload, family) == FIRST_STEP_OF or peer in MEMORY


def held(result: dict[str, Any]) -> Iterator[tuple[str, str, float, float]]:
    """Yields the demand, the peer, the bar and the measured ratio, of the races that were run."""
    for bar in BARS:
        for race in result["races"]:
            if (race.get("workload"), race.get("family")) != (bar.workload, bar.family):
                continue
            rows = race.get("contenders", {})
            ratios = {name: rows.get(name, {}).get("ratio", {}).get(bar.ours, [0.0])[0] for name in bar.peers}
            known = {name: found for name, found in ratios.items() if found}
            if known:
                closest, threads = min(known, key=lambda name: known[name]), race["threads"]
                what = f"{bar.ours}, {bar.workload}, {threads} thread{'s' if threads > 1 else ''}"
                yield what, closest, bar.least, known[closest]


def first_steps(result: dict[str, Any]) -> Iterator[Row]:
    """First step over warm step of our classes in CPU time, and with what the system did for it before."""
    for row in result["first_steps"]:
        if row["contender"].startswith("oxidion.") and "by_cpu" in row:
            what = f"first step, {row['contender']}, {row['workload']}, {row['family']}"
            text = f"{row['by_cpu']:.2f}; with what came before {row['by_cpu_with_before']:.2f}"
            yield what, f"at most {FIRST_STEP} warm steps of CPU time", text, row["by_cpu"] <= FIRST_STEP


def extra_memory(result: dict[str, Any]) -> Iterator[Row]:
    """Peak memory of a step beyond parameters, gradients and state, as a share of a peer's."""
    extra: dict[tuple[str, str], dict[str, float]] = {}
    for row in result["first_steps"]:
        if "extra_bytes" in row:
            extra.setdefault((row["workload"], row["family"]), {})[row["contender"]] = row["extra_bytes"]
    for (workload, family), rows in extra.items():
        ours = next((name for name in rows if name in ("oxidion.Muon", "oxidion.Dion")), None)
        for peer, most in MEMORY.items():
            if ours is not None and rows.get(peer):
                share = rows[ours] / rows[peer]
                what = f"extra memory, {ours}, {workload}, {family}"
                yield what, f"at most {most:g} of {peer}", f"{share:.2f}", share <= most


def quality(result: dict[str, Any]) -> Iterator[Row]:
    """How far updates are from orthonormal ones, ours and the baseline's, by measure."""
    for entry in result["qualities"]:
        peer = BASELINE.get(entry.get("family"), "")
        rows = {name: _defects(row) for name, row in entry.get("rows", {}).items() if "cosine" in row}
        for name, own in rows.items() if peer in rows else ():
            if name.startswith("oxidion.") and name != HALF:
                theirs = rows[peer]
                text = "; ".join(f"{key} {own[key]:.3g}, there {theirs[key]:.3g}" for key in own)
                good = all(own[key] <= max(theirs[key], ROUNDING) for key in own)
                what = f"quality, {name}, {entry['workload']}, {entry['family']}"
                yield what, f"as near to orthonormal as {peer}", text, good


def _defects(row: dict[str, float]) -> dict[str, float]:
    return {
        "sigma max - 1": abs(row["sigma_max"] - 1),
        "ortho error": row["orthogonality"],
        "1 - cosine": 1 - row["cosine"],
    }


def rows(result: dict[str, Any]) -> Iterator[Row]:
    """Every bar of a result."""
    for what, peer, least, found in held(result):
        yield what, f"{peer}, {least:g} times as fast", f"{found:.2f}", found >= least
    yield from (*first_steps(result), *extra_memory(result), *quality(result))
