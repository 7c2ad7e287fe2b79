"""What a step on the CPU costs, as of offloaded shards: times on one matrix, operations and bytes.

Steps are interleaved in rounds, and the least time of each counts: other work on the machine only adds to a
time. Operations are those of ``explain()``. A table is printed, and its figures go to ``<out>/offload.json``.

    python benchmarks/offload.py
    python benchmarks/offload.py --side 1024 --rounds 2 --only AdamW Muon --out /tmp/offload
"""

from __future__ import annotations

from typing import Any

import torch

import oxidion
from harness import command, facts, interleave, state_bytes, table, write

SINGLE: dict[str, Any] = {"orth_dtype": "float32"}
BASE = "AdamW"
#: Class and settings by what a reader calls them.
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Lion": ("Lion", {}),
    BASE: ("AdamW", {}),
    "AdamW, 8 bits": ("AdamW", {"state_bits": 8}),
    "Dion 1/16": ("Dion", {"rank_fraction": 1 / 16, **SINGLE}),
    "Dion 1/4": ("Dion", {"rank_fraction": 1 / 4, **SINGLE}),
    "Dion2 1/4": ("Dion2", {"fraction": 1 / 4, **SINGLE}),
    "Muon": ("Muon", SINGLE),
    "Muon, bfloat16": ("Muon", {"orth_dtype": "bfloat16"}),
}


def contender(name: str, side: int) -> Any:
    """An optimizer of one matrix with a gradient."""
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(side, side))
    param.grad = torch.randn(side, side)
    kind, settings = CONTENDERS[name]
    return getattr(oxidion, kind)([param], lr=1e-4, **settings)


def markdown(result: dict[str, Any]) -> str:
    """The table; bytes are relative to those of the matrix."""
    rows, size = result["rows"], 4 * result["side"] ** 2
    base = rows.get(BASE, next(iter(rows.values())))["least"]
    cells = [
        [name, f"{row['least']:.3g}", f"{row['least'] / base:.3g}", f"{row['flops'] / 1e9:.3g}"]
        + [f"{row[key] / size:.2f}" for key in ("state_bytes", "workspace_bytes")]
        for name, row in sorted(rows.items(), key=lambda item: float(item[1]["least"]))
    ]
    return table(["optimizer", "seconds", "times AdamW", "GFLOP", "states", "workspace"], cells)


def main() -> None:
    """Measures and writes the results."""
    parser = command(__doc__)
    parser.add_argument("--side", type=int, default=4096, help="rows and columns of the matrix")
    parser.add_argument("--rounds", type=int, default=4, help="interleaved rounds, of two samples each")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    options = parser.parse_args()
    optimizers = {name: contender(name, options.side) for name in options.only}
    for optimizer in optimizers.values():
        optimizer.step()
    series = interleave({name: optimizer.step for name, optimizer in optimizers.items()}, options.rounds)
    rows = {
        name: {
            "least": min(series[name].wall),
            "flops": optimizer.explain()[0]["flops"],
            "state_bytes": state_bytes([optimizer]),
            "workspace_bytes": optimizer.plan().arena_bytes,
        }
        for name, optimizer in optimizers.items()
    }
    result = {**facts(), "side": options.side, "rounds": options.rounds, "rows": rows}
    write(result, options.out, "offload")
    print(markdown(result))


if __name__ == "__main__":
    main()
