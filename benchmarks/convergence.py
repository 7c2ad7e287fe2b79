"""Trains the GPT of `examples/train_gpt.py` with every optimizer of the family and compares held-out losses.

Each optimizer is trained at a few learning rates (half, once and twice that of `examples/recipes.py`; twice
as large for AdamW and Lion) with a few seeds, which set initial weights and the order of the batches: with
one seed all start from the same weights and see the same batches, for as many steps. An optimizer's
figures are those of the learning rate with the smallest mean held-out loss at the end. Options that are not
named here, as --layers or --dim, go to the example.

The runs with their curves are written to ``<runs>/<name>.json`` after each of them, and one that is there is
not done again: what was cut goes on where it stopped. More seeds, learning rates or optimizers join what is
there. Runs of other settings, of other versions or from another machine are not touched without --fresh. The
default is 63 runs of about 25 s on two cores that have nothing else to do.

Writes `<out>/<name>.json` (machine, versions, final losses, mean curves, table) and `.png`; prints the table.

    python benchmarks/convergence.py --quick
    python benchmarks/convergence.py --page benchmarks/results/convergence.md
    python benchmarks/convergence.py --optimizers adamw,muon --lrs "muon=0.01,0.02,0.04,0.08" --seeds 0,1
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

# ruff: noqa: E402 (the folder of the examples has to be on the path first; its `report` is meant)
import torch
from tqdm import tqdm

import harness
from convergence_report import markdown, plot, summary
from corpus import load_corpus
from options import build_parser, planned_settings
from recipes import RECIPES, Recipe, Settings
from report import COLORS, figures
from training import Training

FACTORS = (0.5, 1.0, 2.0)
LARGER = {"adamw": 2.0, "lion": 2.0}
"""Learning rates that are tried unless ``--lrs`` names them, as multiples of the recipe's.

At the sizes below, which are smaller than those of the recipes' sweep, the smallest losses of AdamW and Lion
with seed 0 were at twice the recipe's rate (half and twice of that were worse), so that is in the middle.
"""


def recipe(name: str, lr: float, scalar_lr: float | None = 0.002, **arguments: Any) -> Recipe:
    """A class; arguments that are functions are called with the settings."""
    return Recipe(
        name,
        lr,
        scalar_lr=scalar_lr,
        arguments=lambda settings: {k: v(settings) if callable(v) else v for k, v in arguments.items()},
    )


def ema(settings: Settings) -> dict[str, Any]:
    """Keys of a mean over about the last twentieth of a run."""
    return {"average": "ema", "average_decay": 1 - 1 / max(1.0, settings.steps / 20)}


def quarter(settings: Settings) -> int:
    """Rank of a projection to a quarter of the width."""
    return settings.dim // 4


dion = partial(recipe, "Dion", 0.02, seed=attrgetter("seed"))
soap = partial(recipe, "SOAP", 0.008, None, betas=(0.95, 0.95), precondition_frequency=10)
soap_muon = partial(recipe, "SOAPMuon", 0.02, precondition_frequency=10)
PLAIN = {"relative_step": False, "scale_parameter": False}
FURTHER = {
    "soap": soap(),
    "soap_short_side": soap(sides="short"),
    "soap_muon": soap_muon(),
    "soap_muon_without_basis": soap_muon(denom_power=0.0),
    "muon_without_momentum": recipe("Muon", 0.02, mu=0.0),
    "muon_nesterov": recipe("Muon", 0.02, nesterov=True),
    "muon_per_head": recipe("Muon", 0.02, per_head=True),
    "muon_h": Recipe("MuonH", 0.018, scalar_lr=0.002, decays=False),
    "dion_orthonormal": dion(rank_fraction=0.25, right_factor="orthonormal"),
    "dion_full_rank": dion(rank_fraction=1.0),
    "dion_half_rank": dion(rank_fraction=0.5),
    "dion_sixteenth_rank": dion(rank_fraction=1 / 16),
    "came": recipe("CAME", 0.001, 0.004),
    "adafactor": recipe("Adafactor", 0.002, 0.004, **PLAIN),
    "came_short_memory": recipe("CAME", 0.002, 0.004, betas=(0.9, 0.95, 0.99)),
    "adafactor_momentum": recipe("Adafactor", 0.004, 0.004, **PLAIN, beta1=0.9),
    "lamb": recipe("Lamb", 0.01, 0.004),
    "apollo_adamw": recipe("APOLLOAdamW", 0.01, 0.004, rank=quarter),
    "galore_adamw": recipe("GaLoreAdamW", 0.01, 0.004, rank=quarter),
    "muon_ema": replace(recipe("Muon", 0.02), average=ema),
    "adamw_ema": replace(recipe("AdamW", 0.004, None, betas=(0.9, 0.95)), average=ema),
    "adamw_schedule_free": replace(
        recipe("AdamW", 0.004, None, betas=(0.0, 0.999)), average=lambda _: {"average": "schedule_free"}
    ),
}
"""Classes in addition to those that the example trains; they are named by ``--optimizers``."""

FAMILY = [*RECIPES]
RECIPES.update(FURTHER)

COMMON = "--batch-size 8 --rank-fraction 0.25"
SIZES = f"--layers 3 --dim 128 --heads 4 --seq-len 128 --eval-every 20 {COMMON}"
QUICK_SIZES = (
    f"--layers 2 --dim 64 --heads 2 --seq-len 64 --eval-every 10 {COMMON} --eval-windows 16 --corpus-mb 1"
)
OWN = ("optimizer", "lr", "scalar_lr", "seed")
"""Settings in which the runs of one result differ."""

TAKEN = {
    *("--optimizer", "--compare", "--sweep", "--lr", "--seed", "--checkpoint", "--save-every", "--resume"),
    *("--stop-at", "--quiet", "--device"),
}
"""Options of ``train_gpt.py`` that this script sets itself or has no use for."""


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[Settings]]:
    """Command-line options, and the settings of every run in the order in which they are done."""
    parser = harness.command(__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a smaller model, 100 steps and 2 seeds")
    names_help = f"names by comma (default: {','.join(FAMILY)}; also {','.join(FURTHER)})"
    parser.add_argument("--optimizers", default=",".join(FAMILY), help=names_help)
    parser.add_argument("--seeds", help="whole numbers by comma (default: 0,1,2; quick 0,1)")
    parser.add_argument("--lrs", default="", metavar="A=LR,LR;B=LR", help="learning rates to try instead")
    parser.add_argument("--steps", help="length of a run (default: 400; quick 100)")
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs", help="folder for the runs")
    parser.add_argument("--name", help="file name, without suffix (default: convergence; quick -quick)")
    parser.add_argument("--page", type=Path, help="page to put the table in, between its marks")
    parser.add_argument("--fresh", action="store_true", help="start over, whatever runs are there")
    options, rest = parser.parse_known_args(arguments)
    options.name = options.name or ("convergence-quick" if options.quick else "convergence")
    if clash := TAKEN & {argument.partition("=")[0] for argument in rest}:
        parser.error(f"{', '.join(sorted(clash))}: set by this script")
    names = list(dict.fromkeys(name.strip() for name in options.optimizers.split(",")))
    for name in names:
        if name not in RECIPES:
            parser.error(f"--optimizers: unknown optimizer {name!r}; known: {', '.join(RECIPES)}")
    training = build_parser(None)
    options.rates = {
        name: [float(f"{RECIPES[name].lr * LARGER.get(name, 1.0) * factor:.6g}") for factor in FACTORS]
        for name in names
    }
    given = training.parse_args(["--sweep", options.lrs]).sweep if options.lrs else {}
    if strangers := given.keys() - options.rates.keys():
        parser.error(f"--lrs names {', '.join(sorted(strangers))}, not among the optimizers of this run")
    options.rates |= {name: sorted(set(values)) for name, values in given.items()}
    sizes, steps, seeds = (QUICK_SIZES, "100", "0,1") if options.quick else (SIZES, "400", "0,1,2")
    shared = [*shlex.split(sizes), *rest, "--steps", options.steps or steps]
    sweep = ";".join(f"{name}={','.join(f'{lr:g}' for lr in lrs)}" for name, lrs in options.rates.items())
    jobs: list[Settings] = []
    for seed in dict.fromkeys((options.seeds or seeds).split(",")):
        chosen = training.parse_args([*shared, "--sweep", sweep, "--seed", seed.strip()])
        jobs += planned_settings(training, chosen)
    options.threads = chosen.threads
    return options, jobs


def started(options: argparse.Namespace, job: Settings) -> dict[str, Any]:
    """The result with the runs that are there; its settings are those that all runs have in common.

    Raises:
        SystemExit: where there is a summary of runs that are not there, or runs of other settings, versions
            or of another machine.
    """
    name = f"{options.name}.json"
    settings = {key: value for key, value in asdict(job).items() if key not in OWN}
    result = {**harness.facts(), "settings": settings, "runs": []}
    file, advice = options.runs / name, "Give another --name, or --fresh to start over"
    if options.fresh:
        return result
    if not file.exists():
        if (options.out / name).exists():
            why = f"{options.out / name} is the summary of runs that are not in {options.runs}"
            raise SystemExit(f"{why}. {advice}")
        return result
    there: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for key in ("settings", "versions", "threads", "machine"):
        old, new = there[key], result[key]
        if key == "machine":
            old, new = ({part: side[part] for part in ("cpu", "cores", "python")} for side in (old, new))
        if old != new:
            raise SystemExit(f"{file} was written with other {key}: {old}, now {new}. {advice}")
    return {**result, "runs": there["runs"]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is not there yet and writes the results."""
    options, jobs = parse(arguments)
    if options.page is not None:  # before the first run: a page without marks says so now
        harness.between(options.page.read_text(encoding="utf-8"), "convergence", "")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    result = started(options, jobs[0])
    done = {tuple(run[key] for key in OWN) for run in result["runs"]}
    todo = [job for job in jobs if tuple(getattr(job, key) for key in OWN) not in done]
    print(f"{len(jobs)} runs, {len(jobs) - len(todo)} of them done before", file=sys.stderr)
    corpus = load_corpus(round(jobs[0].corpus_mb * 1e6))
    bar = tqdm(todo, unit="run", file=sys.stderr)
    for job in bar:
        bar.set_description(f"{job.optimizer} lr {job.lr:g} seed {job.seed}")
        run = Training(job, corpus, torch.device("cpu"))
        run.run(job.steps, None, 0, quiet=True)
        result["runs"].append({"seed": job.seed, "load": harness.load_average(), **figures(run)})
        harness.write(result, options.runs, options.name, is_whole=True)
    kept = harness.rounded(summary(result, list(RECIPES)))
    harness.write(kept, options.out, options.name)
    plot(kept, options.out / f"{options.name}.png", COLORS)
    harness.rewrite(options.page, "convergence", markdown(kept))
    sys.stdout.write(markdown(kept))


if __name__ == "__main__":
    main()
