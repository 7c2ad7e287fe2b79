"""Step time on one CUDA device against torch and microsoft/dion, with the ceilings of the same run.

Contenders of a family step over equal parameters with equal gradients, one after the other in a child
process for each race; ours is timed before and after the others. Each sample has two clocks: the time between
two events on the stream, and the time until the call of the step came back, which is what the host spends. A
ratio is the peer's time over ours, median of pairs of samples with a 95 % bootstrap interval. A peer that is
missing is listed as missing, one that fails with its error. Next to the times stands what the update is worth
(`cuda_quality.py`). Symmetric products race against cuBLAS.

Writes ``<out>/<name>.json`` (device, versions, ceilings, raw samples), ``.md`` and ``.png``; the name begins
with that of the device, as ``h200-steps``, unless ``--name`` gives another one.

    python benchmarks/cuda.py --peer-path ~/src/dion --compiled --only gpt160m --name h200-gpt160m
    python benchmarks/cuda.py --parts products
    python benchmarks/cuda.py --device cpu --only tiny --rounds 7
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

import cuda_child
import cuda_products
from contender import Contender
from contenders import availability
from cuda_child import Item, Row
from cuda_clock import ceilings
from cuda_contenders import contenders
from cuda_lists import lists
from cuda_quality import quality
from cuda_race import Place, Timing, items
from cuda_report import TRIAL, stem_of, table, write
from harness import machine
from workloads import Workload

PARTS = ("steps", "quality", "products")


#: Seconds after which a measurement is given up: kernels of a peer may be compiled in it.
LIMIT = 600.0
FOREVER = 1e9


def facts(place: Place) -> Row:
    """What the numbers were taken on, found in a child."""
    on_device = place.word != "cpu"
    return {
        "device": torch.cuda.get_device_name(place.clock.device) if on_device else "the CPU",
        "versions": availability(),
        "ceilings": ceilings(place.clock, small=not on_device),
    }


def judged(workload: Workload, place: Place, entry: Contender) -> Row:
    """Quality of a contender, or why there is none."""
    try:
        return {"quality": quality(entry, workload, place.clock.device)}
    except Exception as error:
        said = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
        return {"quality": {"status": said}}


def main() -> None:
    """Run what is asked for."""
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument(
        "--only", default="", help="run pairs whose 'list/family' contains one of these, by comma"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="what to run of these, by comma")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compiled", action="store_true", help="also peers under their own torch.compile")
    parser.add_argument("--peer-path", action="append", default=[], metavar="DIR")
    parser.add_argument("--out", type=Path, default=here / "results")
    parser.add_argument("--name", default="", help="of the files, without what ends them")
    options = parser.parse_args()
    sys.path[:0] = [str(Path(path).expanduser().resolve()) for path in options.peer_path]
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    wanted = [part for part in options.only.split(",") if part]
    pairs = [(work, family) for work in lists() for family in work.families]
    chosen = [p for p in pairs if any(part in f"{p[0].name}/{p[1]}" for part in wanted)] if wanted else pairs
    result: dict[str, Any] = {"machine": machine(), "races": [], "products": []}
    place = Place(options.device)
    take([Item("facts", "facts", partial(facts, place), result.update, limit=LIMIT)], place)
    if (status := result.pop("status")) != "ok":
        parser.error(f"--device {options.device}: {status}")
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
        write(result, options.out, stem)
    print("\n".join(table(result)))


def take(made: list[Item], place: Place) -> None:
    """Takes measurements, however long that takes."""
    cuda_child.run(made, FOREVER, lambda: None, place.prepare, place.recover)


if __name__ == "__main__":
    main()
