"""Measurements of one part of `device.py`, the most valuable first, written to a file after each of them.

``device.py`` starts ``python3 benchmarks/device_parts.py PART --device cuda --seconds S --into FILE``. All is
measured in child processes; this one uses no device. FILE has ``figures`` (those with a bar first), ``bar``,
``reason``, ``traceback``, ``races`` and ``products`` as in the results of `cuda.py`, and ``status`` at the
end. On "cpu" and "emulated" sizes are tiny and nothing is too slow: that tries the script.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import cuda_child
import cuda_products
import oxidion
from contenders import OURS, PEER, Contender, contenders, flat, of_class, relative
from cuda_child import Item, Refused, Row
from cuda_race import EMULATED, Place, Timing, copy_rate, items, launch_us, tflops
from oxidion._gpu_check.runner import age, write_json
from workloads import ADAMW, LION, MUON, Workload, device_lists

TRACEBACK = 4096
LIBTORCH = {"OXIDION_CUDA": "libtorch"}
RULE = {"OXIDION_TUNE": "0"}
"""A fixed rule chooses between kernel and cuBLAS, so that each contender uses the kernel of its name."""
WGMMA = {**RULE, "OXIDION_CUDA": "auto", "OXIDION_SYMMETRIC": "wgmma"}
MOST_OFF = 0.3
"""Largest difference from the updates of the CPU."""
MOST_SINGULAR = 1.3
COPY = {"H100": 2700.0, "H200": 3900.0}
"""GB/s that a copy has to reach."""
PUBLISHED = {"NorMuon": 85.5, "Dion2": 36.5, "NorDion2": 47.6}
"""Milliseconds on an H100 at fraction 1/2, from https://github.com/microsoft/dion/pull/85."""
MATRICES = ("gpt2-48", "4096x4096", "4096x11008", "8x1024x4096", "32x1024x4096", "llama-8b-rank")
SIDES = (2048, 4096, 8192, 16384)
SWEPT = (1 / 64, 1 / 16, 1 / 4, 1)
PRECISIONS = {"float32": "highest", "TF32": "high"}


@dataclass(frozen=True)
class Bar:
    """A bound on a figure: ``status`` where it is missed. NaN misses it."""

    name: str
    value: float
    least: float = -math.inf
    most: float = math.inf
    status: str = "SLOW"

    @property
    def missed(self) -> str:
        """What is wrong; empty where nothing is."""
        if self.least <= self.value <= self.most:
            return ""
        bound = f"at least {self.least:g}" if self.least > -math.inf else f"at most {self.most:g}"
        return f"{self.name} is {self.value:.3g}, {bound} is wanted"


@dataclass
class Results:
    """What a part has measured so far."""

    races: list[dict[str, Any]] = field(default_factory=list)
    products: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, Row] = field(default_factory=dict)

    def value(self, name: str) -> float:
        """A single measurement; NaN where there is none."""
        return float(self.values.get(name, {}).get("value", math.nan))

    def row(self, workload: str, family: str, contender: str) -> Row:
        """The row of a contender, empty where it has no times."""
        for race in self.races:
            if (race["workload"], race["family"]) == (workload, family):
                row: Row = race["contenders"].get(contender, {})
                return row if row.get("status") == "ok" else {}
        return {}

    def seconds(self, workload: str, family: str, contender: str, which: str = "device") -> float:
        """Median seconds of a step; NaN where there are none."""
        return statistics.median(self.row(workload, family, contender).get(which) or [math.nan])

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Everything that was measured, by a name that says what it is."""
        yield from self.values.items()
        for race in self.races:
            for name, row in race["contenders"].items():
                yield f"{race['workload']} {race['family']} {name}", row
        for race in self.products:
            for name, row in race["contenders"].items():
                yield f"{shape_of(race)} {name}", row


def shape_of(race: dict[str, Any]) -> str:
    """Sizes of a product as text."""
    return "x".join(map(str, race["shape"]))


@dataclass(frozen=True)
class Given:
    """What the command line says."""

    place: Place
    results: Results
    peers: bool
    packed: Path | None

    @property
    def is_device(self) -> bool:
        """Whether sizes and bars are those for a device."""
        return self.place.word not in ("cpu", EMULATED)

    @property
    def samples(self) -> int:
        """Samples of a contender."""
        return 8 if self.is_device else 2

    def some(self, names: Sequence[Any]) -> Sequence[Any]:
        """All of them on a device, else the first two."""
        return names if self.is_device else names[:2]

    def workload(self, name: str) -> Workload:
        """One of the lists, a tiny one of its name where there is no device."""
        found = next(work for work in device_lists() if work.name == name)
        if self.is_device:
            return found
        return replace(
            found, matrices=((64, 48),) * len(found.matrices[:2]), others=((1000,),) * len(found.others[:2])
        )

    def race(
        self, name: str, entries: list[Contender], timing: Timing | None = None, **keys: Any
    ) -> list[Item]:
        """Measurements of contenders on a list, microsoft/dion's only where there is a folder with it."""
        chosen = [entry for entry in entries if self.peers or entry.source != PEER]
        timing = timing or Timing(self.samples)
        return items(self.results.races, self.workload(name), chosen, self.place, timing, **keys)

    def single(self, name: str, work: Callable[[], Any]) -> Item:
        """A measurement that is one number, or facts."""
        return Item("values", name, lambda: {"value": work()}, partial(self.results.values.__setitem__, name))


def ours(name: str, cls: str, family: str, **settings: Any) -> Contender:
    """A contender of ours."""
    return Contender(f"oxidion.{name}", OURS, family, of_class("oxidion", cls, **settings))


# --- env -----------------------------------------------------------------------------------------


def env(given: Given) -> list[Item]:
    """What the device is, and the rates that bound a step there."""
    clock = given.place.clock
    sides, elements = ((8192, 4096), 1 << 28) if given.is_device else ((64,), 1 << 12)
    rates = {"bfloat16": (torch.bfloat16, "highest"), "tf32": (torch.float32, "high")}
    rates["float32"] = (torch.float32, "highest")
    found = [given.single("device", partial(facts, given))]
    found.append(given.single("copy_gb_per_s", lambda: copy_rate(clock, elements)))
    for side in sides:
        for name, (dtype, precision) in rates.items():
            label = f"{name}_tflops" if side == sides[0] else f"{name}_tflops_{side}"
            found.append(given.single(label, partial(tflops, clock, side, dtype, precision)))
    return [*found, given.single("launch_us", lambda: launch_us(clock))]


def facts(given: Given) -> dict[str, Any]:
    """Facts of the device and of what is installed."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "oxidion": oxidion.__version__,
    }
    if not given.is_device:
        nothing = {"capability": "", "sms": 0, "memory": 0, "driver": "", "clocks": {}}
        return {**found, "name": given.place.word, **nothing}
    properties = torch.cuda.get_device_properties(0)
    asked = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit")
    command = ["nvidia-smi", f"--query-gpu={','.join(asked)}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        answer = ""
    values = dict(zip(asked, map(str.strip, answer.split(",")), strict=False))
    return {
        **found,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "memory": properties.total_memory,
        "driver": values.pop(asked[0], ""),
        "clocks": values,
    }


def bars_of_env(results: Results) -> list[Bar]:
    """The copy's rate, where the device is one that is known."""
    device = results.values.get("device", {}).get("value", {}).get("name", "")
    least = next((rate for name, rate in COPY.items() if name in device), -math.inf)
    return [Bar("copy_gb_per_s", results.value("copy_gb_per_s"), least)]


# --- baseline ------------------------------------------------------------------------------------

CHECKED = ("AdamW", "Lion", "Muon", "Dion")


def baseline(given: Given) -> list[Item]:
    """Steps by libtorch on the device against those of the CPU, and their times against torch's."""
    if os.environ.get("OXIDION_CUDA") != "libtorch":
        raise ValueError(f"OXIDION_CUDA must be libtorch, got {os.environ.get('OXIDION_CUDA')!r}")
    found = [
        given.single(off_name(cls, dtype), partial(off, given, cls, dtype))
        for cls in CHECKED
        for dtype in ("float32", "bfloat16")
    ]
    adamw, muon = contenders(ADAMW, compiled=False), contenders(MUON, compiled=False)
    found += given.race("100m", adamw[:2]) + given.race("4000x768", adamw[:2])
    return found + given.race("gpt2-48", [muon[0], muon[2]]) + given.race("4096x4096", [muon[0], muon[2]])


def off_name(cls: str, dtype: str) -> str:
    """Figure of the difference of a class from the CPU."""
    return f"{cls} {dtype} off the CPU"


def off(given: Given, cls: str, dtype: str) -> float:
    """How far updates on the device are from those of the CPU."""
    from oxidion._gpu_check import parts

    setting, count = parts.CLASSES[cls][dtype], parts.STEPS
    if not given.is_device:
        setting, count = replace(setting, shapes=((64, 48), (48, 64))), 3
    device, cpu = (
        parts.steps(setting, place, count) for place in (given.place.clock.device, torch.device("cpu"))
    )
    return float(parts.difference(device, cpu))


def bars_of_baseline(results: Results) -> list[Bar]:
    """Every class in either type."""
    names = [off_name(cls, dtype) for cls in CHECKED for dtype in ("float32", "bfloat16")]
    return [
        Bar(name, results.value(name), most=MOST_OFF, status="FAIL")
        for name in names
        if "value" in results.values.get(name, {})
    ]


# --- elementwise ---------------------------------------------------------------------------------

LARGE = (("100m", "float32", 0.85), ("250m", "float32", 0.85), ("100m", "bfloat16", 0.75))
SMALL = ("4000x768", "4000x3")
FUSED = "torch.optim.AdamW fused"


def elementwise(given: Given) -> list[Item]:
    """Passes over all elements against a copy and torch's AdamW; the host's time for many tensors."""
    elements = 1 << 28 if given.is_device else 1 << 12
    found = [given.single("copy_gb_per_s", partial(copy_rate, given.place.clock, elements))]
    adamw, lion = contenders(ADAMW, compiled=False), contenders(LION, compiled=False)
    for name in SMALL:
        found += given.race(name, adamw[:2], group="small") + given.race(name, lion[:1], group="small")
    for name, dtype, _ in LARGE:
        timing = Timing(given.samples, dtype=getattr(torch, dtype))
        for entries in (adamw[:2], lion[:1]):
            family = f"{entries[0].family} {dtype}"
            found += given.race(name, entries, timing, family=family, group="large")
    for cls in ("AdamW", "Lion"):
        entry = Contender(f"oxidion.{cls}", OURS, f"{cls.lower()} 8-bit", flat("oxidion", cls, state_bits=8))
        found += given.race("100m", [entry], group="large")
    return found


def of_copy(results: Results, name: str, family: str, contender: str, size: int) -> float:
    """Rate of a step over the copy's: parameters and states are read and written, gradients read."""
    row = results.row(name, family, contender)
    numel = next((race["numel"] for race in results.races if race["workload"] == name), 0)
    moved = 3 * size * numel + 2 * row.get("state_bytes", 0)
    return moved / results.seconds(name, family, contender) / (results.value("copy_gb_per_s") * 1e9)


def bars_of_elementwise(results: Results) -> list[Bar]:
    """Rates against the copy, and times of the host against torch's."""
    found = []
    for name, dtype, least in LARGE:
        for cls in ("AdamW", "Lion"):
            size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
            rate = of_copy(results, name, f"{cls.lower()} {dtype}", f"oxidion.{cls}", size)
            found.append(Bar(f"{name} {dtype} {cls} of copy", rate, least))
    for name in SMALL:
        torch_, own = (results.seconds(name, ADAMW, which, "host") for which in (FUSED, "oxidion.AdamW"))
        found.append(Bar(f"{name} host torch over ours", torch_ / own, 3.0))
    for cls in ("AdamW", "Lion"):
        rate = of_copy(results, "100m", f"{cls.lower()} 8-bit", f"oxidion.{cls}", 4)
        found.append(Bar(f"100m 8-bit {cls} of copy", rate))
    return found


# --- products ------------------------------------------------------------------------------------

DECIDING = cuda_products.SHAPES[:2]


def products(given: Given) -> list[Item]:
    """Symmetric products of all sizes by cuBLAS and by every kernel that there is machine code for."""
    shapes = cuda_products.SHAPES if given.is_device else cuda_products.SMALL
    found, place = given.results.products, given.place
    # The peer's kernel would be tuned for half a minute at each size.
    return cuda_products.items(found, shapes, given.samples, place, peers=False, folder=given.packed)


def bars_of_products(results: Results) -> list[Bar]:
    """The best kernel by warpgroups against cuBLAS at the deciding sizes, then every kernel, then rates."""
    deciding, ratios, rates = [], [], []
    for race in results.products:
        rows, shape = race["contenders"].items(), shape_of(race)
        medians = {name: statistics.median(row["seconds"]) for name, row in rows if row["status"] == "ok"}
        rates += [Bar(f"{shape} {name} TFLOP/s", race["flops"] / s / 1e12) for name, s in medians.items()]
        base = medians.pop(cuda_products.CUBLAS, math.nan)
        groups = [seconds for name, seconds in medians.items() if "wgmma" in name]
        if tuple(race["shape"]) in DECIDING and groups:
            deciding.append(Bar(f"{shape} cuBLAS over wgmma", base / min(groups), 1.25))
        ratios += [Bar(f"{shape} cuBLAS over {name}", base / seconds) for name, seconds in medians.items()]
    return deciding + ratios + rates


# --- muon ----------------------------------------------------------------------------------------

TORCH_MUON = "torch.optim.Muon"
BY_LIBTORCH, OTHERS = (
    "oxidion.Muon libtorch",
    ("oxidion.Muon libtorch bfloat16", "oxidion.Muon mma", "oxidion.Muon bfloat16", "oxidion.Muon wgmma"),
)
"""Contenders: in float16, by the Gram form where matrices are long, or in bfloat16 by the standard form."""


def muon(given: Given) -> list[Item]:
    """Ours by libtorch and by each kernel, every one in a process of its own, against torch's."""
    muon_of_torch = contenders(MUON, compiled=False)[2]
    timing = Timing(given.samples, is_singular=True)
    bfloat16 = {"orth_dtype": "bfloat16"}
    groups: list[tuple[list[Contender], dict[str, str]]] = [
        ([ours("Muon libtorch", "Muon", MUON, nesterov=True), muon_of_torch], LIBTORCH),
        ([ours("Muon libtorch bfloat16", "Muon", MUON, nesterov=True, **bfloat16)], LIBTORCH),
        ([ours("Muon mma", "Muon", MUON, nesterov=True)], RULE),
        ([ours("Muon bfloat16", "Muon", MUON, nesterov=True, **bfloat16)], RULE),
        ([ours("Muon wgmma", "Muon", MUON, nesterov=True)], WGMMA),
    ]
    if os.environ.get("OXIDION_CUDA") == "libtorch":  # kernels have failed
        del groups[2:]
    found = []
    for entries, variables in groups:
        own: dict[str, Any] = {"group": entries[0].name, "variables": variables}
        if variables is WGMMA and given.place.word != "cpu":
            own["judge"] = refuse_without_groups
        for name in given.some(MATRICES):
            found += given.race(name, entries, timing, **own)
    return found


def refuse_without_groups(_entry: Contender) -> Row:
    """Nothing more of a row, whose products were those by warpgroups.

    Raises:
        Refused: where other kernels multiplied.
    """
    from oxidion._oxidion import source_states

    states = {name: (state, reason) for name, state, *_, reason in source_states(0)}
    state, reason = states.get("symmetric_wgmma.cu", ("not there", ""))
    if state != "loaded":
        raise Refused(f"left out: symmetric_wgmma.cu is {state} {reason or ''}".strip())
    return {}


def bars_of_muon(results: Results) -> list[Bar]:
    """Torch's time over ours, by libtorch and by the best way; no singular value is large."""
    found = []
    for name in MATRICES:
        base = results.seconds(name, MUON, TORCH_MUON)
        own = {entry: results.seconds(name, MUON, entry) for entry in (BY_LIBTORCH, *OTHERS)}
        known = {entry: seconds for entry, seconds in own.items() if seconds == seconds}
        if base == base and BY_LIBTORCH in known:
            found.append(Bar(f"{name} torch over libtorch", base / known[BY_LIBTORCH], 1.0))
        if base == base and len(known) > 1:
            found.append(Bar(f"{name} torch over best", base / min(known.values()), 1.2))
    for name in MATRICES:
        for entry in (TORCH_MUON, BY_LIBTORCH, *OTHERS):
            if quality := results.row(name, MUON, entry).get("quality"):
                most = math.inf if entry == TORCH_MUON else MOST_SINGULAR
                sigma = quality["sigma_max"]
                found.append(Bar(f"{name} {entry} largest singular value", sigma, most=most, status="FAIL"))
    return found


# --- dion ----------------------------------------------------------------------------------------


def dion_family(fraction: float, precision: str) -> str:
    """Label of a race of Dion."""
    return f"dion r={'1' if fraction == 1 else f'1/{round(1 / fraction)}'} {precision}"


def dion(given: Given) -> list[Item]:
    """Ours against the eager one of microsoft/dion, and ours and Muon on one matrix of growing size."""
    races, sweep = [], []
    for fraction in (1 / 4, 1 / 16):
        for name in given.some(MATRICES):
            for precision in PRECISIONS:
                races += _dion(given, name, fraction, precision, is_race=True)
    for side in given.some(SIDES):
        name = f"1x{side}x{side}"
        sweep += given.race(name, contenders(MUON, compiled=False)[:1], group="sweep")
        for fraction in SWEPT:
            for precision in ("TF32", "float32"):
                sweep += _dion(given, name, fraction, precision, is_race=False)
    # The races of the first two lists decide; there may be no time for all the others.
    most = len(races) // 6
    return [*races[:most], *sweep, *races[most:]]


def _dion(given: Given, name: str, fraction: float, precision: str, *, is_race: bool) -> list[Item]:
    timing = Timing(given.samples if is_race else 2, precision=PRECISIONS[precision])
    family = dion_family(fraction, precision)
    theirs = Contender("dion.Dion eager", PEER, family, of_class("dion", "Dion", rank_fraction=fraction))
    own = {"rank_fraction": fraction, "orth_dtype": precision.lower()}
    entries = [ours("Dion", "Dion", family, **own), *([theirs] if is_race else [])]
    return given.race(name, entries, timing, family=family, group="races" if is_race else "sweep")


def bars_of_dion(results: Results) -> list[Bar]:
    """The eager peer's time over ours; then Muon's over that of each rank."""
    found = []
    families = [(f, p) for f in SWEPT for p in PRECISIONS]
    for name in (*MATRICES, *(f"1x{side}x{side}" for side in SIDES)):
        for fraction, precision in families:
            family = dion_family(fraction, precision)
            own = results.seconds(name, family, "oxidion.Dion")
            peer, whole = (
                results.seconds(name, family, "dion.Dion eager"),
                results.seconds(name, MUON, "oxidion.Muon"),
            )
            if peer == peer and own == own:
                found.append(Bar(f"{name} {family} eager over ours", peer / own, 1.5))
            if whole == whole and own == own:
                found.append(Bar(f"{name} {family} Muon over Dion", whole / own))
    return sorted(found, key=lambda bar: bar.least == -math.inf)


# --- published, peers ----------------------------------------------------------------------------


def published(given: Given) -> list[Item]:
    """The classes whose times were published, and the same in bfloat16."""
    found: list[Item] = []
    for narrow in ({}, {"orth_dtype": "bfloat16"}):
        for cls in PUBLISHED:
            own = {} if cls == "NorMuon" else {"fraction": 1 / 2}
            entry = ours(f"{cls}{' bfloat16' if narrow else ''}", cls, cls.lower(), **own, **narrow)
            found += given.race("published-1b", [entry], group="published")
    return found


def bars_of_published(results: Results) -> list[Bar]:
    """Published milliseconds over ours."""
    own = {cls: results.seconds("published-1b", cls.lower(), f"oxidion.{cls}") * 1e3 for cls in PUBLISHED}
    return [
        Bar(f"{cls} published over ours", PUBLISHED[cls] / ms, 1.0) for cls, ms in own.items() if ms == ms
    ]


def peers(given: Given) -> list[Item]:
    """Ours and the compiled optimizers of microsoft/dion."""
    if not given.peers:
        raise Refused("no --peer-path: microsoft/dion is not there")
    found = []
    for name in ("4096x4096", "gpt2-48"):
        for cls, settings in (("Muon", {"nesterov": True}), ("Dion", {"rank_fraction": 1 / 4})):
            family = MUON if cls == "Muon" else dion_family(1 / 4, "float32")
            entries = relative(family, cls, **settings)
            # On a CPU a compiler takes a minute.
            theirs = entries[2] if given.is_device else entries[1]
            found += given.race(name, [entries[0], theirs], group="peers", limit=80.0)
    return found


def bars_of_peers(results: Results) -> list[Bar]:
    """Their times over ours; there is no bar."""
    found = []
    for race in results.races:
        where = race["workload"], race["family"]
        name = next((name for name in race["contenders"] if name.endswith("compiled")), "")
        own = results.seconds(*where, next(iter(race["contenders"])))
        found.append(Bar(f"{' '.join(where)} compiled over ours", results.seconds(*where, name) / own))
    return found


# --- the program ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Measurements, and what is asked of them."""

    bar: str
    items: Callable[[Given], list[Item]]
    bars: Callable[[Results], list[Bar]]


PARTS = {
    "env": Part("copy at least 2.7 TB/s on an H100, 3.9 on an H200", env, bars_of_env),
    "baseline": Part("updates at most 0.3 off the CPU's", baseline, bars_of_baseline),
    "elementwise": Part(
        "at least 0.85 of a copy in float32, 0.75 in bfloat16; host at most a third of torch's",
        elementwise,
        bars_of_elementwise,
    ),
    "products": Part(
        "wgmma at least 1.25 times as fast as cuBLAS at the first two sizes", products, bars_of_products
    ),
    "muon": Part("at least as fast as torch by libtorch, 1.2 times by the best way", muon, bars_of_muon),
    "dion": Part("at least 1.5 times as fast as eager microsoft/dion", dion, bars_of_dion),
    "published": Part(
        "faster than 85.5 (NorMuon), 36.5 (Dion2), 47.6 ms (NorDion2)", published, bars_of_published
    ),
    "peers": Part("none: times are recorded", peers, bars_of_peers),
}


def outcome(part: Part, results: Results, *, is_device: bool, left_out: int | None = None) -> dict[str, Any]:
    """What the file holds; with a status once it is known how many measurements were left out."""
    bars = [bar for bar in part.bars(results) if bar.value == bar.value or bar.status == "FAIL"]
    faults = [(name, row) for name, row in results.rows() if cuda_child.is_fault(row["status"])]
    own = [(name, row) for name, row in faults if row.get("source", OURS) == OURS]
    missed = [bar for bar in bars if bar.missed and (is_device or bar.status == "FAIL")]
    reasons = [bar.missed for bar in missed] + [f"{name}: {row['status']}" for name, row in own]
    found: dict[str, Any] = {"figures": {bar.name: _number(bar.value) for bar in bars}, "bar": part.bar}
    for name, row in results.rows():
        if row["status"] == "ok" and "device" in row and isinstance(row["device"], list):
            found["figures"][f"{name} ms"] = _number(statistics.median(row["device"]) * 1e3)
            if name.startswith(SMALL):
                found["figures"][f"{name} host ms"] = _number(statistics.median(row["host"]) * 1e3)
        elif row["status"] == "ok" and isinstance(row.get("value"), float):
            found["figures"].setdefault(name, _number(row["value"]))
        elif row["status"] != "ok":
            found["figures"][name] = row["status"][:100]
    found["races"], found["products"] = results.races, results.products
    values = {name: row["value"] for name, row in results.values.items() if "value" in row}
    if "device" in values:
        found |= {"device": values.pop("device"), "ceilings": values}
    found["traceback"] = "\n".join(
        f"{name}\n{row['traceback']}" for name, row in faults if "traceback" in row
    )[:TRACEBACK]
    if left_out is not None:
        found["figures"]["left_out"] = left_out
        is_wrong = own or any(bar.status == "FAIL" for bar in missed)
        bounded = any(bar.least > -math.inf or bar.most < math.inf for bar in bars)
        unknown = is_device and left_out > 0 and not bounded and not part.bar.startswith("none")
        found["status"] = "FAIL" if is_wrong else "SLOW" if missed else "LEFT_OUT" if unknown else "PASS"
        reasons += [f"{left_out} measurements were left out: no time"] if left_out else []
        if not any(row["status"] == "ok" for _, row in results.rows()) and found["status"] == "PASS":
            found["status"] = "SKIP"
    return {**found, "reason": "; ".join(reasons)[:1000]}


def _number(value: float) -> float | str:
    """Four digits; a word for NaN and infinity, which JSON does not have."""
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


def measure(part: Part, given: Given, seconds: float, file: Path) -> None:
    """Takes the measurements of a part and writes the file after each."""
    results, is_device = given.results, given.is_device
    try:
        made = part.items(given)

        def done() -> None:
            write_json(file, outcome(part, results, is_device=is_device))

        left_out = cuda_child.run(made, seconds, done, given.place.prepare, given.place.recover)
        write_json(file, outcome(part, results, is_device=is_device, left_out=left_out))
    except Refused as error:
        write_json(
            file, {"status": "SKIP", "figures": {}, "bar": part.bar, "reason": str(error), "traceback": ""}
        )
    except Exception as error:
        found = outcome(part, results, is_device=is_device)
        reason = f"{type(error).__name__}: {error}"
        write_json(
            file,
            {**found, "status": "FAIL", "reason": reason, "traceback": traceback.format_exc()[-TRACEBACK:]},
        )


def main() -> None:
    """Measure one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda", help=f"cuda, {EMULATED} or cpu")
    parser.add_argument("--seconds", type=float, default=60.0, help="from the start of this process")
    parser.add_argument("--into", type=Path, required=True, metavar="FILE")
    parser.add_argument("--peer-path", type=Path, metavar="DIR", help="folder with the package dion")
    parser.add_argument("--packed", type=Path, metavar="DIR", help="folder with machine code of products")
    options = parser.parse_args()
    if options.peer_path:
        sys.path.insert(0, str(options.peer_path.expanduser().resolve()))
    packed = options.packed if options.packed and options.packed.is_dir() else None
    given = Given(Place(options.device), Results(), options.peer_path is not None, packed)
    measure(PARTS[options.part], given, options.seconds - age(), options.into)


if __name__ == "__main__":
    main()
    # The modules of torch would be taken down for a second or two.
    os._exit(0)
