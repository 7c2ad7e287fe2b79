"""Step time on one CUDA device against torch and microsoft/dion, with the ceilings of the same run.

Contenders of a family step over equal parameters with equal gradients, one after the other in a child
process for each race; ours is timed before and after the others. Each sample has two clocks: the time between
two events on the stream, and the time until the call of the step came back, which is what the host spends. A
ratio is the peer's time over ours, median of pairs of samples with a 95 % bootstrap interval. A peer that is
missing is listed as missing, one that fails with its error. Next to the times stands what the update is worth
(`quality.py`). Symmetric products race against cuBLAS.

Prints tables and writes ``<out>/<name>.json`` (device, versions, ceilings, medians, ratios); the name begins
with that of the device, as ``h200-steps``, unless ``--name`` gives another one.

    python benchmarks/cuda.py --peer-path ~/src/dion --compiled --only gpt160m --name h200-gpt160m
    python benchmarks/cuda.py --parts products
    python benchmarks/cuda.py --device cpu --only tiny --rounds 7
    python benchmarks/cuda.py --show docs/gpu-reports/REPORT.json
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cuda_child
import cuda_products
import harness
from contenders import Contender, availability, contenders
from cuda_child import Item, Row
from cuda_race import Place, Timing, items, rates_of
from device_parts import Given, Results, env
from device_report import stem_of
from floors import floor_seconds
from harness import Series, ratio, said
from quality import quality
from workloads import Workload, device_lists, lists

PARTS = ("steps", "quality", "products")
#: Seconds after which a measurement is given up: kernels of a peer may be compiled in it.
LIMIT = 600.0
FOREVER = 1e9
#: Shapes of a list for which the quality of an update is measured.
SHAPES = 2
KEPT = ("source", "status", "state_bytes", "kernels", "quality")
TRIAL = "cuda"
"""The name of results without a device."""


def facts(place: Place) -> Row:
    """Device, versions and ceilings, each found in a child; says why where there is no device."""
    given = Given(place, Results(), False, None)
    # Importing all peers takes long.
    take([*env(given), replace(given.single("versions", availability), limit=LIMIT)], place)
    missing = {row["status"] for row in given.results.values.values() if row["status"] != "ok"}
    if missing:
        raise SystemExit(f"--device {place.word}: {missing.pop()}")
    values = {name: row["value"] for name, row in given.results.values.items()}
    found = {"device": values.pop("device")["name"], "versions": values.pop("versions")}
    return {**found, "ceilings": values}


def judged(workload: Workload, place: Place, entry: Contender) -> Row:
    """Quality of a contender, or why there is none."""
    try:
        return {"quality": quality(entry, workload, place.clock.device, SHAPES)}
    except Exception as error:
        return {"quality": {"status": f"failed: {said(error)}"}}


def take(made: list[Item], place: Place) -> None:
    """Takes measurements, however long that takes."""
    cuda_child.run(made, FOREVER, lambda: None, place.prepare, place.recover)


# --- what is kept --------------------------------------------------------------------------------


def summed_up(result: dict[str, Any]) -> dict[str, Any]:
    """A result with medians and ratios instead of samples."""
    races = [{**race, "contenders": _times(race["contenders"])} for race in result["races"]]
    products = [
        {**race, "contenders": _seconds(race["contenders"], race["flops"])} for race in result["products"]
    ]
    return {**result, "races": races, "products": products}


def _times(rows: dict[str, Row]) -> dict[str, Row]:
    """Rows of a race with milliseconds, and ratios over our first contender that ran."""
    ours = next((row for row in rows.values() if row["source"] == "oxidion" and row["status"] == "ok"), None)
    found = {}
    for name, row in rows.items():
        kept = {key: row[key] for key in KEPT if key in row}
        if row["status"] == "ok":
            for which in ("device", "host"):
                kept[f"{which}_ms"] = 1e3 * statistics.median(row[which])
                if ours is not None:
                    kept[which] = compared(row[which], ours[which])
        found[name] = kept
    return found


def _seconds(rows: dict[str, Row], flops: float) -> dict[str, Row]:
    """Rows of a product with microseconds, rates, and ratios of rates over that of cuBLAS."""
    base = next((row for row in rows.values() if row["source"] == "torch" and row["status"] == "ok"), None)
    found = {}
    for name, row in rows.items():
        kept = {key: row[key] for key in ("source", "status")}
        if row["status"] == "ok":
            seconds = statistics.median(row["seconds"])
            kept |= {"us": 1e6 * seconds, "tflops": flops / seconds / 1e12}
            if base is not None:
                kept["of_cublas"] = compared(base["seconds"], row["seconds"])
        found[name] = kept
    return found


def compared(samples: list[float], base: list[float]) -> list[float]:
    """Samples over those of another contender: median of pairs and its interval."""
    count = min(len(samples), len(base)) // 2 * 2
    return ratio(Series(1, wall=samples[:count]), Series(1, wall=base[:count]), "wall")


def tables(result: dict[str, Any]) -> Iterator[str]:
    """Tables of what is kept of a result."""
    head = "list,family,contender,device ms,host ms,device of ours,host of ours,of floor,sigma max,error"
    yield harness.table([*head.split(","), "cosine"], _race_rows(result))
    if result["products"]:
        head = "batch x rows x columns,contender,us,TFLOP/s,rate of cuBLAS"
        yield harness.table(head.split(","), _product_rows(result["products"]))


def _race_rows(result: dict[str, Any]) -> Iterator[list[str]]:
    by_name = {workload.name: workload for workload in (*lists(), *device_lists())}
    rates = rates_of(result["ceilings"])
    for race in result["races"]:
        workload = by_name.get(race["workload"])
        floor = floor_seconds(workload, race["family"], rates) if workload else None
        for name, row in race["contenders"].items():
            cells = [race["workload"], race["family"], name]
            if "device_ms" not in row:
                yield [*cells, row["status"], *[""] * 7]
                continue
            cells += [f"{row['device_ms']:.3f}", f"{row['host_ms']:.3f}"]
            cells += [_spread(row.get("device")), _spread(row.get("host"))]
            known = floor is not None and floor == floor
            cells.append(f"{100 * 1e3 * floor / row['device_ms']:.0f} %" if known and floor else "")
            figures = row.get("quality", {})
            three = [f"{figures[key]:.4f}" if key in figures else "" for key in harness.QUALITY]
            yield [*cells, *([figures["status"], "", ""] if "status" in figures else three)]


def _product_rows(products: list[dict[str, Any]]) -> Iterator[list[str]]:
    for race in products:
        for name, row in race["contenders"].items():
            cells = [" x ".join(map(str, race["shape"])), name]
            if "us" in row:
                yield [*cells, f"{row['us']:.1f}", f"{row['tflops']:.1f}", _spread(row.get("of_cublas"))]
            else:
                yield [*cells, row["status"], "", ""]


def _spread(found: list[float] | None) -> str:
    return "{:.2f} [{:.2f}, {:.2f}]".format(*found) if found else ""


def main() -> None:
    """Run what is asked for."""
    parser = harness.command(__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--only", default="", help="pairs whose 'list/family' contains one of these")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to run of these, by comma")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compiled", action="store_true", help="also peers under their own torch.compile")
    parser.add_argument("--peer-path", action="append", default=[], metavar="DIR")
    parser.add_argument("--name", default="", help="of the file, without what ends it")
    parser.add_argument("--show", type=Path, help="print the tables of a report of `device.py`, nothing else")
    options = parser.parse_args()
    if options.show:
        print("\n\n".join(tables(summed_up(json.loads(options.show.read_text(encoding="utf-8"))))))
        return
    sys.path[:0] = [str(Path(path).expanduser().resolve()) for path in options.peer_path]
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    wanted = options.only.split(",")  # an empty word is in all
    pairs = [(work, family) for work in lists() for family in work.families]
    chosen = [p for p in pairs if any(part in f"{p[0].name}/{p[1]}" for part in wanted)]
    result: dict[str, Any] = {"machine": harness.machine(), "races": [], "products": []}
    result |= facts(Place(options.device))
    on_device, place = options.device != "cpu", Place(options.device, result["versions"])
    stem = options.name or (f"{stem_of(result['device'])}-{parts[0]}" if on_device else TRIAL)
    samples, races = 2 * options.rounds, []
    if "products" in parts:
        shapes = cuda_products.SHAPES if on_device else cuda_products.SMALL
        races.append(cuda_products.items(result["products"], shapes, samples, place, peers=True))
    for workload, family in chosen if "steps" in parts else []:
        entries = contenders(family, compiled=options.compiled, device="cuda" if on_device else "cpu")
        judge = partial(judged, workload, place) if "quality" in parts else None
        timing = Timing(samples, FOREVER)
        races.append(items(result["races"], workload, entries, place, timing, judge=judge, limit=LIMIT))
    for made in races:
        take(made, place)
        harness.write(summed_up(result), options.out, stem)
    print("\n\n".join(tables(summed_up(result))))


if __name__ == "__main__":
    main()
