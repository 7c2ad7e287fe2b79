"""What a step on the CPU costs, as of offloaded shards: times on one matrix beside operations and bytes.

Steps are interleaved in rounds, once in each order, and the least time of each counts: other work on the
machine only adds to a time. Operations are those of ``explain()``; for AdamW, Muon and Dion they stand beside
the formulas of ``docs/offload.md``. ``<out>/offload.json`` keeps all samples, ``<out>/offload.md`` the table.

    python benchmarks/offload.py
    python benchmarks/offload.py --side 1024 --rounds 2 --only AdamW Muon --out /tmp/offload
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import oxidion
from harness import in_turns, load_average, machine, state_bytes

HERE = Path(__file__).resolve().parent
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


def contender(name: str, side: int) -> Callable[[], float]:
    """Samples of the seconds of a step; the optimizer is ``.of`` the function."""
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(side, side))
    param.grad = torch.randn(side, side)
    kind, settings = CONTENDERS[name]
    optimizer = getattr(oxidion, kind)([param], lr=1e-4, **settings)

    def sample() -> float:
        start = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - start

    sample.of = optimizer  # type: ignore[attr-defined]
    return sample


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All samples, and the facts about each optimizer."""
    jobs = {name: contender(name, options.side) for name in options.only}
    for job in jobs.values():
        job()
    samples: dict[str, list[float]] = {name: [] for name in jobs}
    turns = in_turns(jobs, options.rounds)
    for name in tqdm(turns, total=2 * options.rounds * len(jobs), leave=False, file=sys.stderr):
        samples[name].append(jobs[name]())
    by_hand = formulas(options.side, options.side)
    rows = {}
    for name, job in jobs.items():
        optimizer: Any = job.of  # type: ignore[attr-defined]
        rows[name] = {
            "least": min(samples[name]),
            "flops": optimizer.explain()[0]["flops"],
            "formula": by_hand.get(name),
            "state_bytes": state_bytes([optimizer]),
            "workspace_bytes": optimizer.plan().arena_bytes,
            "samples": samples[name],
        }
    return rows


def markdown(result: dict[str, Any]) -> str:
    """The table."""
    about, rows, side = result["machine"], result["rows"], result["side"]
    base = rows.get(BASE, next(iter(rows.values())))
    lines = [
        "# Steps on the CPU\n",
        f"One {side} x {side} matrix in float32 on {result['threads']} threads: {about['cpu']}, "
        f"{about['cores']} cores, {about['date']}. The least of {2 * result['rounds']} interleaved samples; "
        f"load {result['load_at_start']:.1f} before. Bytes are relative to those of the matrix.\n",
        "| optimizer | seconds | times AdamW | GFLOP | by formula | states | workspace |",
        "|---|---|---|---|---|---|---|",
    ]
    size = 4 * side * side
    for name, row in sorted(rows.items(), key=lambda item: float(item[1]["least"])):
        formula = "" if row["formula"] is None else f"{row['formula'] / 1e9:.4g}"
        states, workspace = row["state_bytes"] / size, row["workspace_bytes"] / size
        lines.append(
            f"| {name} | {row['least']:.3g} | {row['least'] / base['least']:.3g} | "
            f"{row['flops'] / 1e9:.3g} | {formula} | {states:.2f} | {workspace:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--side", type=int, default=4096, help="rows and columns of the matrix")
    parser.add_argument("--rounds", type=int, default=4, help="interleaved rounds, of two samples each")
    parser.add_argument("--threads", type=int, default=0, help="of torch; its own choice by default")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    result: dict[str, Any] = {
        "machine": machine(),
        "side": options.side,
        "rounds": options.rounds,
        "threads": torch.get_num_threads(),
        "load_at_start": load_average(),
    }
    result["rows"] = measure(options)
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / "offload.json"
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = markdown(result)
    target.with_suffix(".md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
