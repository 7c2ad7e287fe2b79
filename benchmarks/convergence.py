"""Trains the GPT of `examples/train_gpt.py` with every optimizer of the family and compares held-out losses.

Each optimizer is trained at a few learning rates (half, once and twice that of `examples/recipes.py`; twice
as large for AdamW and Lion) with a few seeds, which set initial weights and the order of the batches: with
one seed all start from the same weights and see the same batches, for as many steps. An optimizer's
figures are those of the learning rate with the smallest mean held-out loss at the end. Optimizers that the
installed package does not have are listed as missing. Options that are not named here, as --layers or --dim,
go to the example.

The result is written after each run, and a run that it holds is not done again: what was cut goes on where it
stopped. More seeds, learning rates or optimizers join what is there. A result of other settings, of other
versions or from another machine is not touched without --fresh. The default is 63 runs of about 25 s on two
cores that have nothing else to do.

Writes `<out>/<name>.json` (machine, versions, curves, table), `.md` and `.png`.

    python benchmarks/convergence.py --quick
    python benchmarks/convergence.py --page docs/convergence.md
    python benchmarks/convergence.py --optimizers adamw,muon --lrs "muon=0.01,0.02,0.04,0.08" --seeds 0,1
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

# ruff: noqa: E402 (the folder of the examples has to be on the path first; its `report` is meant, not ours)
import torch
from tqdm import tqdm

import oxidion
from convergence_report import BEGIN, END, dumped, has_marks, markdown, plot, rows, table, update_page
from corpus import Corpus, load_corpus
from harness import load_average, machine
from options import build_parser, planned_settings
from recipes import ALL_RECIPES, RECIPES, Recipe, Settings
from report import COLORS, figures
from training import Training

FACTORS = (0.5, 1.0, 2.0)
LARGER = {"adamw": 2.0, "lion": 2.0}
"""Learning rates that are tried unless ``--lrs`` names them, as multiples of the recipe's.

At the sizes below, which are smaller than those of the recipes' sweep, the smallest losses of AdamW and Lion
with seed 0 were at twice the recipe's rate (half and twice of that were worse), so that is in the middle.
"""


def dion(rank_fraction: float, **arguments: Any) -> Recipe:
    """Dion at a rank of its own."""
    return Recipe(
        "Dion",
        0.02,
        scalar_lr=0.002,
        arguments=lambda s: {"rank_fraction": rank_fraction, "seed": s.seed, **arguments},
    )


def soap(lr: float, **arguments: Any) -> Recipe:
    """SOAP whose bases are computed anew every ten steps."""
    return Recipe(
        "SOAP",
        lr,
        arguments=lambda s: {"betas": (0.95, 0.95), "precondition_frequency": 10, **arguments},
    )


def soap_muon(**arguments: Any) -> Recipe:
    """SOAPMuon whose bases are computed anew every ten steps."""
    return Recipe(
        "SOAPMuon",
        0.02,
        scalar_lr=0.002,
        arguments=lambda s: {"precondition_frequency": 10, **arguments},
    )


def ema(settings: Settings) -> dict[str, Any]:
    """Keys of a mean over about the last twentieth of a run."""
    return {"average": "ema", "average_decay": 1 - 1 / max(1.0, settings.steps / 20)}


FURTHER = {
    "soap": soap(0.008),
    "soap_short_side": soap(0.008, sides="short"),
    "soap_muon": soap_muon(),
    "soap_muon_without_basis": soap_muon(denom_power=0.0),
    "muon_without_momentum": Recipe("Muon", 0.02, scalar_lr=0.002, arguments=lambda s: {"mu": 0.0}),
    "muon_nesterov": Recipe("Muon", 0.02, scalar_lr=0.002, arguments=lambda s: {"nesterov": True}),
    "muon_h": Recipe("MuonH", 0.018, scalar_lr=0.002, decays=False),
    "dion_orthonormal": dion(0.25, right_factor="orthonormal"),
    "dion_full_rank": dion(1.0),
    "dion_half_rank": dion(0.5),
    "dion_sixteenth_rank": dion(1 / 16),
    "came": Recipe("CAME", 0.001, scalar_lr=0.004, arguments=lambda s: {"lr": s.lr}),
    "adafactor": Recipe(
        "Adafactor",
        0.002,
        scalar_lr=0.004,
        arguments=lambda s: {"lr": s.lr, "relative_step": False, "scale_parameter": False},
    ),
    "came_short_memory": Recipe(
        "CAME",
        0.002,
        scalar_lr=0.004,
        arguments=lambda s: {"lr": s.lr, "betas": (0.9, 0.95, 0.99)},
    ),
    "adafactor_momentum": Recipe(
        "Adafactor",
        0.004,
        scalar_lr=0.004,
        arguments=lambda s: {
            "lr": s.lr,
            "relative_step": False,
            "scale_parameter": False,
            "beta1": 0.9,
        },
    ),
    "lamb": Recipe("Lamb", 0.01, scalar_lr=0.004),
    "apollo_adamw": Recipe("APOLLOAdamW", 0.01, scalar_lr=0.004, arguments=lambda s: {"rank": s.dim // 4}),
    "muon_ema": Recipe("Muon", 0.02, scalar_lr=0.002, average=ema),
    "adamw_ema": Recipe("AdamW", 0.004, arguments=lambda s: {"betas": (0.9, 0.95)}, average=ema),
    "adamw_schedule_free": Recipe(
        "AdamW",
        0.004,
        arguments=lambda s: {"betas": (0.0, 0.999)},
        average=lambda s: {"average": "schedule_free"},
    ),
    "galore_adamw": Recipe("GaLoreAdamW", 0.01, scalar_lr=0.004, arguments=lambda s: {"rank": s.dim // 4}),
}
"""Classes beside those that the example trains; they are named by ``--optimizers``."""

RECIPES.update(FURTHER)

SIZES = "--layers 3 --dim 128 --heads 4 --seq-len 128 --batch-size 8 --eval-every 20 --rank-fraction 0.25"
QUICK_SIZES = (
    "--layers 2 --dim 64 --heads 2 --seq-len 64 --batch-size 8 --eval-every 10 --rank-fraction 0.25 "
    "--eval-windows 16 --corpus-mb 1"
)
STEPS, QUICK_STEPS = 400, 100
SEEDS, QUICK_SEEDS = "0,1,2", "0,1"
OWN = ("optimizer", "lr", "scalar_lr", "seed")
"""Settings in which the runs of one result differ."""

SETTINGS_ADDED = {part.name: part.default for part in fields(Settings) if part.default is not MISSING}
"""Settings that results may lack, which were written before there was a choice, with what held then."""

TRAIN_POINTS = 100
"""Points that are kept of the curve of training losses; each is the mean of the steps around it."""

TAKEN = {
    *("--optimizer", "--compare", "--sweep", "--lr", "--seed", "--checkpoint", "--save-every", "--resume"),
    *("--stop-at", "--quiet", "--device"),
}
"""Options of ``train_gpt.py`` that this script sets itself or has no use for."""


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[Settings]]:
    """Command-line options, and the settings of every run in the order in which they are done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="a smaller model, 100 steps and 2 seeds")
    parser.add_argument(
        "--optimizers",
        default=",".join(ALL_RECIPES),
        help=f"names by comma (default: {','.join(ALL_RECIPES)}; also {','.join(FURTHER)})",
    )
    parser.add_argument("--seeds", help="whole numbers by comma (default: 0,1,2; quick 0,1)")
    parser.add_argument("--lrs", default="", metavar="A=LR,LR;B=LR", help="learning rates to try instead")
    parser.add_argument("--steps", help=f"length of a run (default: {STEPS}; quick {QUICK_STEPS})")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    parser.add_argument("--name", help="file name, without suffix (default: convergence; quick -quick)")
    parser.add_argument("--page", type=Path, help="page to put the table in, between its marks")
    parser.add_argument("--fresh", action="store_true", help="start over, whatever the result holds")
    options, rest = parser.parse_known_args(arguments)
    options.name = options.name or ("convergence-quick" if options.quick else "convergence")
    if clash := TAKEN & {argument.partition("=")[0] for argument in rest}:
        parser.error(f"{', '.join(sorted(clash))}: set by this script")
    if options.page is not None and not has_marks(options.page):
        parser.error(f"--page: {options.page} must hold the lines {BEGIN} and {END}")
    names = list(dict.fromkeys(name.strip() for name in options.optimizers.split(",")))
    for name in names:
        if name not in {*ALL_RECIPES, *FURTHER}:
            known = ", ".join([*ALL_RECIPES, *FURTHER])
            parser.error(f"--optimizers: unknown optimizer {name!r}; known: {known}")
    options.missing = [name for name in names if name not in RECIPES]
    training = build_parser(None)
    there = [name for name in names if name in RECIPES]
    rates = {
        name: [float(f"{RECIPES[name].lr * LARGER.get(name, 1.0) * factor:.6g}") for factor in FACTORS]
        for name in there
    }
    given = training.parse_args(["--sweep", options.lrs]).sweep if options.lrs else {}
    if strangers := given.keys() - rates.keys():
        parser.error(f"--lrs names {', '.join(sorted(strangers))}, not among the optimizers of this run")
    options.rates = {**rates, **{name: sorted(set(values)) for name, values in given.items()}}
    if not options.rates:
        parser.error("--optimizers: the installed package has none of them")
    sweep = ";".join(f"{name}={','.join(f'{lr:g}' for lr in lrs)}" for name, lrs in options.rates.items())
    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    shared = [*shlex.split(QUICK_SIZES if options.quick else SIZES), *rest, "--steps", str(steps)]
    jobs: list[Settings] = []
    options.seeds = list(
        dict.fromkeys((options.seeds or (QUICK_SEEDS if options.quick else SEEDS)).split(","))
    )
    for seed in options.seeds:
        chosen = training.parse_args([*shared, "--sweep", sweep, "--seed", seed.strip()])
        jobs += planned_settings(training, chosen)
    options.threads = chosen.threads
    options.seeds = list(dict.fromkeys(job.seed for job in jobs))
    return options, jobs


def shared_settings(settings: Settings) -> dict[str, Any]:
    """What all runs of a result have in common."""
    return {key: value for key, value in asdict(settings).items() if key not in OWN}


def empty_result(options: argparse.Namespace, jobs: Sequence[Settings]) -> dict[str, Any]:
    """A result without runs."""
    return {
        "machine": machine(),
        "versions": {"oxidion": oxidion.__version__, "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "settings": shared_settings(jobs[0]),
        "plan": {"learning_rates": options.rates, "seeds": options.seeds, "missing": options.missing},
        "table": [],
        "runs": [],
    }


def earlier(target: Path, result: dict[str, Any]) -> dict[str, Any]:
    """The result with the runs that its file holds, and with their optimizers and learning rates.

    Raises:
        SystemExit: for a file of other settings, versions or another machine.
    """
    there: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    compared = {"settings": None, "versions": None, "threads": None, "machine": ("cpu", "cores", "python")}
    there["settings"] = SETTINGS_ADDED | there["settings"]
    for key, parts in compared.items():
        old, new = there[key], result[key]
        if parts is not None:
            old, new = ({part: side[part] for part in parts} for side in (old, new))
        if old != new:
            raise SystemExit(
                f"{target} was written with other {key}: {old}, now {new}. Give another --name, or --fresh "
                "to start over"
            )
    result["runs"] = there["runs"]
    rates: dict[str, list[float]] = {
        name: list(lrs) for name, lrs in result["plan"]["learning_rates"].items()
    }
    for run in there["runs"]:
        of_run = rates.setdefault(run["optimizer"], [])
        if run["lr"] not in of_run:
            of_run.append(run["lr"])
    seeds = {*result["plan"]["seeds"], *(run["seed"] for run in there["runs"])}
    result["plan"]["seeds"] = sorted(seeds)
    order = [name for name in (*ALL_RECIPES, *FURTHER) if name in rates]
    result["plan"]["learning_rates"] = {name: sorted(rates[name]) for name in order}
    return result


def measured(settings: Settings, corpus: Corpus) -> dict[str, Any]:
    """Trains once; the figures of ``train_gpt.py`` with the curve of training losses thinned out."""
    run = Training(settings, corpus, torch.device("cpu"))
    run.run(settings.steps, None, 0, quiet=True)
    result = {"seed": settings.seed, "load": load_average(), **figures(run)}
    losses = result["curve"]["train_loss"]
    width = -(-settings.steps // TRAIN_POINTS)
    pieces = [losses[start : start + width] for start in range(0, len(losses), width)]
    result["curve"]["train_step"] = [
        start + len(piece) for start, piece in zip(range(0, len(losses), width), pieces, strict=True)
    ]
    result["curve"]["train_loss"] = [None if None in piece else statistics.fmean(piece) for piece in pieces]
    return result


def identity(run: dict[str, Any]) -> tuple[Any, ...]:
    """What tells one run of a result from the others."""
    return tuple(run[key] for key in OWN)


def write(result: dict[str, Any], target: Path) -> None:
    """Writes the JSON; an interrupted write leaves the file that was there before."""
    part = target.with_name(target.name + ".part")
    part.write_text(dumped({**result, "table": rows(result)}), encoding="utf-8")
    os.replace(part, target)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is not there yet and writes the results."""
    options, jobs = parse(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    target: Path = options.out / f"{options.name}.json"
    result = empty_result(options, jobs)
    if target.exists() and not options.fresh:
        result = earlier(target, result)
    done = {identity(run) for run in result["runs"]}
    todo = [job for job in jobs if identity(asdict(job)) not in done]
    print(f"{len(jobs)} runs, {len(jobs) - len(todo)} of them done before", file=sys.stderr)
    corpus = load_corpus(round(jobs[0].corpus_mb * 1e6))
    bar = tqdm(todo, unit="run", file=sys.stderr)
    for job in bar:
        bar.set_description(f"{job.optimizer} lr {job.lr:g} seed {job.seed}")
        result["runs"].append(measured(job, corpus))
        write(result, target)
    write(result, target)
    target.with_suffix(".md").write_text("# Convergence\n\n" + markdown(result), encoding="utf-8")
    plot(result, target.with_suffix(".png"), COLORS)
    if options.page is not None:
        update_page(options.page, result)
    sys.stdout.write(table(result))


if __name__ == "__main__":
    main()
