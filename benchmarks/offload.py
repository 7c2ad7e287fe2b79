"""What a step on the CPU costs, as of offloaded shards: times on one matrix, operations and bytes.

Steps are interleaved in rounds, once in each order, and the least time of each counts: other work on the
machine only adds to a time. Operations are those of ``explain()``; for AdamW, Muon and Dion they stand next
to the formulas of ``docs/offload.md``. A table is printed, and its figures go to ``<out>/offload.json``.

    python benchmarks/offload.py
    python benchmarks/offload.py --side 1024 --rounds 2 --only AdamW Muon --out /tmp/offload
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from typing import Any

import torch
from tqdm import tqdm

import oxidion
from harness import command, in_turns, load_average, machine, state_bytes, table, write

SINGLE: dict[str, Any] = {"orth_dtype": "float32"}
#: Class and settings by what a reader calls them.
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Lion": ("Lion", {}),
    "AdamW": ("AdamW", {}),
    "AdamW, 8 bits": ("AdamW", {"state_bits": 8}),
    "Dion 1/16": ("Dion", {"rank_fraction": 1 / 16, **SINGLE}),
    "Dion 1/4": ("Dion", {"rank_fraction": 1 / 4, **SINGLE}),
    "Dion2 1/4": ("Dion2", {"fraction": 1 / 4, **SINGLE}),
    "Muon": ("Muon", SINGLE),
    "Muon, bfloat16": ("Muon", {"orth_dtype": "bfloat16"}),
}
BASE = "AdamW"


def formulas(m: int, n: int) -> dict[str, float]:
    """Operations by formula, a product of a x b and b x c counted as 2abc.

    Muon's five iterations each multiply X by its transpose, square that, and multiply the polynomial by X;
    each such product of a symmetric result is counted whole. Dion multiplies the momentum by a thin matrix
    for P and for R, and takes P R^T from it and from the weight.
    """
    k, long = min(m, n), max(m, n)
    r = k / 16
    return {"Muon": 20 * k * k * long + 10 * k**3, "Dion 1/16": 8 * m * n * r}


def contender(name: str, side: int) -> Any:
    """An optimizer of one matrix with a gradient."""
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(side, side))
    param.grad = torch.randn(side, side)
    kind, settings = CONTENDERS[name]
    return getattr(oxidion, kind)([param], lr=1e-4, **settings)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The least seconds of a step, and the facts about each optimizer."""
    jobs = {name: contender(name, options.side) for name in options.only}
    for optimizer in jobs.values():
        optimizer.step()
    least = dict.fromkeys(jobs, math.inf)
    turns = in_turns(jobs, options.rounds)
    for name in tqdm(turns, total=2 * options.rounds * len(jobs), leave=False, file=sys.stderr):
        start = time.perf_counter()
        jobs[name].step()
        least[name] = min(least[name], time.perf_counter() - start)
    by_hand = formulas(options.side, options.side)
    return {
        name: {
            "least": least[name],
            "flops": optimizer.explain()[0]["flops"],
            "formula": by_hand.get(name),
            "state_bytes": state_bytes([optimizer]),
            "workspace_bytes": optimizer.plan().arena_bytes,
        }
        for name, optimizer in jobs.items()
    }


def markdown(result: dict[str, Any]) -> str:
    """The table; bytes are relative to those of the matrix."""
    rows, size = result["rows"], 4 * result["side"] ** 2
    base = rows.get(BASE, next(iter(rows.values())))["least"]
    cells = [
        [name, f"{row['least']:.3g}", f"{row['least'] / base:.3g}", f"{row['flops'] / 1e9:.3g}"]
        + ["" if row["formula"] is None else f"{row['formula'] / 1e9:.4g}"]
        + [f"{row[key] / size:.2f}" for key in ("state_bytes", "workspace_bytes")]
        for name, row in sorted(rows.items(), key=lambda item: float(item[1]["least"]))
    ]
    head = ["optimizer", "seconds", "times AdamW", "GFLOP", "by formula", "states", "workspace"]
    return table(head, cells)


def main() -> None:
    """Measures and writes the results."""
    parser = command(__doc__)
    parser.add_argument("--side", type=int, default=4096, help="rows and columns of the matrix")
    parser.add_argument("--rounds", type=int, default=4, help="interleaved rounds, of two samples each")
    parser.add_argument("--threads", type=int, default=0, help="of torch; its own choice by default")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    facts = {"side": options.side, "rounds": options.rounds, "threads": torch.get_num_threads()}
    result: dict[str, Any] = {"machine": machine(), **facts, "load_at_start": load_average()}
    result["rows"] = measure(options)
    write(result, options.out, "offload")
    print(markdown(result))


if __name__ == "__main__":
    main()
