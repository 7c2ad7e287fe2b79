"""Trains the GPT of `examples/train_gpt.py` with bfloat16 weights, kept in the ways that there are.

With float32 weights, and with bfloat16 weights: rounded to nearest, rounded stochastically, and with their
float32 remainders (``master_weights=True``), the last two also with smaller moments. All runs of a seed begin
with the same weights, rounded to bfloat16, and see the same batches. The model computes in the dtype of its
weights; the float32 run does so under ``torch.autocast`` in bfloat16.

Bars: the mean held-out loss over the seeds with masters lies within the spread of the seeds from that of
float32 weights, and with rounding to the nearest above it by more than that.

Prints a table and writes `<out>/bf16_weights.json`; ends with 1 where a bar is missed.

    python benchmarks/bf16_weights.py [--steps 600] [--seeds 0 1 2] [--lr 3e-4]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import torch

import harness
import oxidion
from corpus import Corpus, load_corpus
from options import build_parser, planned_settings
from recipes import build_scheduler
from training import Training

WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "nearest": {},
    "stochastic": {"stochastic_rounding": True},
    "masters": {"master_weights": True},
    "masters, moments in bfloat16": {"master_weights": True, "state_dtype": torch.bfloat16},
    "masters, moments in 8 bits": {"master_weights": True, "state_bits": 8},
    "stochastic, moments in 8 bits": {"stochastic_rounding": True, "state_bits": 8},
}


def trained(way: str, seed: int, options: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    """One run: its last held-out loss, and the share of the norms' weights that still are what they were."""
    parser = build_parser(__doc__)
    words = f"--optimizer adamw --lr {options.lr} --steps {options.steps} --seed {seed} --eval-every 100"
    arguments = parser.parse_args([*words.split(), *options.model])
    (settings,) = planned_settings(parser, arguments)
    run = Training(settings, corpus, torch.device("cpu"))
    run.model.to(torch.bfloat16)
    if way == "float32":
        run.model.to(torch.float32)
    run.optimizer = oxidion.AdamW(
        run.model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0, **WAYS[way]
    )
    run.scheduler = build_scheduler(run.optimizer, settings)
    # Casts are kept as long as the context is entered: weights change in it.
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "float32", cache_enabled=False):
        run.run(settings.steps, None, 0, quiet=True)
    vectors = torch.cat([p.detach().float().flatten() for p in run.model.parameters() if p.ndim == 1])
    return {"loss": run.record.held_out_loss[-1], "norms_at_one": (vectors == 1).float().mean().item()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains all ways with all seeds; 1 where a bar is missed."""
    parser = harness.command(__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options, options.model = parser.parse_known_args(arguments)
    corpus = load_corpus(int(4e6))
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
    for seed in options.seeds:
        for way, found in runs.items():
            found.append(trained(way, seed, options, corpus))
            print(way, seed, found[-1], file=sys.stderr)
    losses = {way: [run["loss"] for run in found] for way, found in runs.items()}
    means = {way: statistics.fmean(values) for way, values in losses.items()}
    spread = max(losses["float32"]) - min(losses["float32"])
    met = {
        "masters": abs(means["masters"] - means["float32"]) <= spread,
        "nearest": means["nearest"] - means["float32"] > spread,
    }
    norms = {way: statistics.fmean(run["norms_at_one"] for run in found) for way, found in runs.items()}
    settings = {"steps": options.steps, "lr": options.lr, "model": options.model, "seeds": options.seeds}
    result = {"machine": harness.machine(), **settings, "losses": losses, "norms_at_one": norms}
    harness.write({**result, "means": means, "spread": spread, "met": met}, options.out, "bf16_weights")
    rows = [[way, *(f"{value:.4f}" for value in [*losses[way], means[way]])] for way in losses]
    print(harness.table(["weights", *(f"seed {seed}" for seed in options.seeds), "mean"], rows))
    return int(not all(met.values()))


if __name__ == "__main__":
    sys.exit(main())
