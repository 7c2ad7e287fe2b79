"""Trains a small GPT on the text that every CPython carries, with one optimizer of oxidion or with several.

Without arguments it trains one model with Dion, one with Muon and one with AdamW, from the same initial
weights on the same batches, prints a table and writes the loss curves to ``runs/train_gpt/``:

    python examples/train_gpt.py
    python examples/train_gpt.py --optimizer dion --rank-fraction 0.25 --checkpoint runs/dion.pt --stop-at 100
    python examples/train_gpt.py --optimizer dion --rank-fraction 0.25 --resume runs/dion.pt
    python examples/train_gpt.py --optimizer dion --checkpoint runs/dion.pt --save-every 20 --resume auto
    python examples/train_gpt.py --sweep "dion=0.005,0.01,0.02;adamw=0.002,0.004,0.008"

With ``--resume auto`` the same command can be started again and again: it goes on from the checkpoint at
``--checkpoint``, starts where there is none yet, and trains no further once the run is finished.

Tokens are bytes; losses are in nats per byte. The held-out text is made of files that are not trained on.
The learning rates that are used unless ``--lr`` is given were chosen by ``--sweep`` at the default sizes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch

from corpus import load_corpus
from options import build_parser, chosen_device, planned_settings, resumed_from
from report import against_baseline, figures, plot, table, write_json
from training import Training


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status, 1 when a run diverged outside a sweep."""
    parser = build_parser(__doc__)
    options = parser.parse_args(arguments)
    jobs = planned_settings(parser, options)
    found = resumed_from(parser, options)
    device = chosen_device(parser, options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    stop_at = options.steps if options.stop_at is None else min(options.stop_at, options.steps)
    try:
        corpus = load_corpus(round(options.corpus_mb * 1e6))
        first = Training(jobs[0], corpus, device)
        if found is not None:
            first.load(found)
    except ValueError as error:
        parser.error(str(error))
    parameters = sum(parameter.numel() for parameter in first.model.parameters())
    print(corpus)
    print(
        f"model: {parameters / 1e6:.2f} M parameters; {torch.get_num_threads()} threads on {device}",
        flush=True,
    )
    if first.step >= stop_at:
        print(f"nothing to train: {found} has done {first.step} steps, and {stop_at} are asked for")
    elif found is not None:
        print(f"goes on from {found} at step {first.step}")

    runs: list[Training] = []
    for settings in jobs:
        run = Training(settings, corpus, device) if runs else first
        run.run(stop_at, options.checkpoint, options.save_every, options.quiet)
        runs.append(run)

    print(table(runs))
    for line in best_of_sweep(runs) if options.sweep else against_baseline(runs):
        print(line)
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "figures.json", runs)
    plot(options.out / "loss.png", runs)
    print(f"wrote {options.out / 'figures.json'} and {options.out / 'loss.png'}")
    if not options.sweep and any(run.diverged for run in runs):
        print("a training loss is not finite: lower the learning rate", file=sys.stderr)
        return 1
    return 0


def best_of_sweep(runs: Sequence[Training]) -> list[str]:
    """One line for every optimizer of a sweep: its best learning rate, and whether the grid ends there."""
    lines = []
    for name in dict.fromkeys(run.settings.optimizer for run in runs):
        tried = {
            run.settings.lr: figures(run)["final_held_out_loss"] or math.inf
            for run in runs
            if run.settings.optimizer == name
        }
        best = min(tried, key=lambda lr: tried[lr])
        edge = " (at the edge of the grid: widen it)" if best in (min(tried), max(tried)) else ""
        lines.append(f"{name}: best lr {best:g}, held-out loss {tried[best]:.3f}{edge}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
