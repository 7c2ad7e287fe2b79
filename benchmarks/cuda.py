"""Step time on one CUDA device against torch and microsoft/dion, with the ceilings of the same run.

Contenders of a family step over equal parameters with equal gradients, interleaved in rounds of A B ... B A.
Each sample has two clocks: the time between two events on the stream, and the time until the call of the step
came back, which is what the host spends. A ratio is the peer's time over ours, median of the rounds with a
95 % bootstrap interval. A peer that is missing is listed as missing, one that fails with its error. Beside
the times stands what the update is worth (`cuda_quality.py`). Symmetric products race against cuBLAS.

Writes ``<out>/<name>.json`` (device, versions, ceilings, raw samples), ``.md`` and ``.png``; the name begins
with that of the device, as ``h200-steps``, unless ``--name`` puts another in its place.

    python benchmarks/cuda.py --peer-path ~/src/dion --compiled --only gpt160m --name h200-gpt160m
    python benchmarks/cuda.py --parts products
    python benchmarks/cuda.py --device cpu --only tiny --rounds 7
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

import cuda_products
from contenders import availability
from cuda_clock import Clock, ceilings
from cuda_contenders import contenders
from cuda_lists import lists
from cuda_quality import quality
from cuda_report import TRIAL, stem_of, table, write
from eligible import absent
from harness import Step, in_turns, machine
from race import start
from workloads import Workload, gradients, make_tensors

PARTS = ("steps", "quality", "products")


def race(
    workload: Workload, family: str, rounds: int, clock: Clock, *, compiled: bool, judged: bool
) -> dict[str, Any]:
    """One list, one family: rows of contenders with their samples and, where `judged`, their quality."""
    versions = availability()
    matrices, others = gradients(workload)
    grads = [g.to(clock.device) for g in matrices], [g.to(clock.device) for g in others]
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    entries = contenders(family, compiled=compiled, device=clock.device.type)
    for entry in entries:
        rows[entry.name] = {"source": entry.source, "note": entry.note}
        refused = absent(entry, versions[entry.source], workload)
        start(entry, refused, lambda: make_tensors(grads), rows[entry.name], steps)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for name in in_turns(steps, rounds):
        samples[name].append(clock.sample(steps[name]))
    for name, pairs in samples.items():
        rows[name]["device"], rows[name]["host"] = (list(column) for column in zip(*pairs, strict=True))
    steps.clear()
    for entry in entries if judged else []:
        if rows[entry.name]["status"] == "ok":
            try:
                rows[entry.name]["quality"] = quality(entry, workload, clock.device)
            except Exception as error:
                said = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
                rows[entry.name]["quality"] = {"status": said}
    return {"workload": workload.name, "family": family, "numel": workload.numel, "contenders": rows}


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
    device, parts = torch.device(options.device), options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    on_device = device.type == "cuda"
    clock, wanted = Clock(device), [part for part in options.only.split(",") if part]
    pairs = [(work, family) for work in lists() for family in work.families]
    chosen = [p for p in pairs if any(part in f"{p[0].name}/{p[1]}" for part in wanted)] if wanted else pairs
    name = torch.cuda.get_device_name(device) if on_device else "the CPU"
    stem = options.name or (f"{stem_of(name)}-{parts[0]}" if on_device else TRIAL)
    result: dict[str, Any] = {
        "device": name,
        "machine": machine(),
        "versions": availability(),
        "ceilings": ceilings(clock, small=not on_device),
        "races": [],
        "products": [],
    }
    if "products" in parts:
        for product in cuda_products.races(options.rounds, clock):
            result["products"].append(product)
            write(result, options.out, stem)
    for workload, family in chosen if "steps" in parts else []:
        keys = {"compiled": options.compiled, "judged": "quality" in parts}
        result["races"].append(race(workload, family, options.rounds, clock, **keys))
        write(result, options.out, stem)
        if on_device:
            torch.cuda.empty_cache()
    print("\n".join(table(result)))


if __name__ == "__main__":
    main()
