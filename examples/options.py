"""The command line of ``train_gpt.py``: its options, their checks, and the runs that they ask for."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from recipes import RECIPES, SCHEDULES, Settings
from training import DTYPES

AUTO = Path("auto")
"""What ``--resume`` is given to go on from the newest checkpoint at ``--checkpoint``, where there is one."""

DEFAULT_COMPARISON = "dion,muon,adamw"
"""What is compared when neither an optimizer nor a comparison nor a sweep is asked for."""


def planned_settings(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Settings]:
    """The runs that the options ask for, in order; leaves through ``parser.error`` where they contradict."""
    rates: list[tuple[str, float]]
    if options.sweep:
        rates = [(name, lr) for name, values in options.sweep.items() for lr in values]
        if options.lr:
            parser.error("--sweep names the learning rates itself; leave --lr out")
    else:
        names = [options.optimizer] if options.optimizer else options.compare or DEFAULT_COMPARISON.split(",")
        given = options.lr if isinstance(options.lr, dict) else dict.fromkeys(names, options.lr)
        for name in given:
            if name not in names:
                parser.error(
                    f"--lr names {name}, which is not among the optimizers of this run: {', '.join(names)}"
                )
        rates = [(name, RECIPES[name].lr if given.get(name) is None else given[name]) for name in names]
    if len(rates) > 1 and (options.checkpoint or options.resume):
        parser.error("--checkpoint and --resume serve one run: give --optimizer NAME")
    if options.save_every and not options.checkpoint:
        parser.error("--save-every needs --checkpoint PATH")
    if options.checkpoint is not None and options.checkpoint.is_dir():
        parser.error(
            f"--checkpoint must be a file here, got the folder {options.checkpoint}: name a file in it, as "
            f"{options.checkpoint / 'run.pt'}"
        )
    jobs = []
    for name, lr in rates:
        table_rate = RECIPES[name].scalar_lr
        scalar_lr = (
            lr if table_rate is None else table_rate if options.scalar_lr is None else options.scalar_lr
        )
        shared = {key: value for key, value in vars(options).items() if key in Settings.__dataclass_fields__}
        jobs.append(Settings(**shared | {"optimizer": name, "lr": lr, "scalar_lr": scalar_lr}))
    return jobs


def resumed_from(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Path | None:
    """The checkpoint that the run goes on from; None for a run that starts."""
    if options.resume == AUTO:
        refuse_auto_without_checkpoint(parser, options)
        checkpoint: Path = options.checkpoint
        return checkpoint if checkpoint.is_file() else None
    asked: Path | None = options.resume
    if asked is not None and not asked.is_file():
        parser.error(f"--resume: no such file: {asked}")
    return asked


def refuse_auto_without_checkpoint(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Leaves through ``parser.error`` where ``--resume auto`` has no place to look at."""
    if options.resume == AUTO and options.checkpoint is None:
        parser.error(
            "--resume auto needs --checkpoint: it goes on from the newest checkpoint there, and starts where "
            "there is none"
        )


def chosen_device(parser: argparse.ArgumentParser, name: str) -> torch.device:
    """The device of that name, if this machine has it."""
    if name == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    return torch.device(name)


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """The options, under the description that ``--help`` shows."""
    parser = argparse.ArgumentParser(
        prog="train_gpt.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join(RECIPES)
    what = parser.add_argument_group("what to train").add_mutually_exclusive_group()
    what.add_argument("--optimizer", choices=tuple(RECIPES), help="train one model with this optimizer")
    what.add_argument(
        "--compare",
        type=_names,
        metavar="A,B,...",
        help=f"train one model with each (default: {DEFAULT_COMPARISON}); known: {known}",
    )
    what.add_argument(
        "--sweep",
        type=_sweep,
        metavar="A=LR,LR;B=LR",
        help="train once per learning rate and name the best of each",
    )

    tuning = parser.add_argument_group("optimizer")
    tuning.add_argument(
        "--lr", type=_rates, help="learning rate of the block matrices: 0.02, or dion=0.02,adamw=0.004"
    )
    tuning.add_argument(
        "--scalar-lr",
        type=_positive,
        help="learning rate of embedding, head and norms, where a matrix algorithm steps the others",
    )
    tuning.add_argument(
        "--rank-fraction",
        type=_share,
        default=1.0,
        help="rank of Dion over the smaller side (default: %(default)s)",
    )
    tuning.add_argument(
        "--fraction",
        type=_share,
        default=0.25,
        help="share of rows or columns that Dion2 and NorDion2 orthonormalize (default: %(default)s)",
    )
    tuning.add_argument(
        "--weight-decay", type=not_negative, default=0.01, help="decoupled (default: %(default)s)"
    )
    tuning.add_argument(
        "--clip-norm",
        type=not_negative,
        default=1.0,
        help="largest norm of all gradients; 0: any (default: %(default)s)",
    )
    tuning.add_argument(
        "--schedule", choices=SCHEDULES, default="cosine", help="after the warm-up (default: %(default)s)"
    )
    tuning.add_argument(
        "--warmup", type=_share, default=0.1, help="share of the steps (default: %(default)s)"
    )

    sizes = parser.add_argument_group("sizes")
    for option, default, text in (
        ("--steps", 280, "length of the run; the schedule ends there"),
        ("--batch-size", 8, "sequences in a batch"),
        ("--seq-len", 128, "tokens in a sequence"),
        ("--layers", 4, "blocks"),
        ("--dim", 224, "width of the model"),
        ("--heads", 4, "attention heads"),
        ("--eval-every", 40, "steps between held-out evaluations"),
        ("--eval-windows", 48, "sequences in the held-out evaluation"),
    ):
        sizes.add_argument(option, type=_count, default=default, help=f"{text} (default: %(default)s)")
    sizes.add_argument(
        "--corpus-mb", type=_positive, default=8.0, help="size cap on the text (default: %(default)s)"
    )
    sizes.add_argument(
        "--initial-scale",
        type=_positive,
        default=1.0,
        help="factor on the initial matrices of the blocks (default: %(default)s)",
    )
    sizes.add_argument("--tied", action="store_true", help="the head shares the embedding's weight")

    machine = parser.add_argument_group("machine and files")
    machine.add_argument(
        "--seed", type=_seed, default=0, help="weights, order of batches, sketches (default: %(default)s)"
    )
    machine.add_argument("--threads", type=_count, help="threads of torch (default: torch's own choice)")
    machine.add_argument(
        "--dtype", choices=tuple(DTYPES), default="float32", help="parameters (default: %(default)s)"
    )
    machine.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    machine.add_argument(
        "--checkpoint", type=Path, metavar="PATH", help="write a checkpoint to this file at the end"
    )
    machine.add_argument("--save-every", type=_count, default=0, metavar="N", help="and every N steps")
    machine.add_argument(
        "--resume",
        type=Path,
        metavar="PATH",
        help="continue from a checkpoint of the same settings; auto: from --checkpoint if it is there",
    )
    machine.add_argument(
        "--stop-at", type=_count, metavar="STEP", help="stop after this step and leave the rest to --resume"
    )
    machine.add_argument(
        "--out",
        type=Path,
        default=Path("runs/train_gpt"),
        metavar="DIR",
        help="for loss.png and figures.json (default: %(default)s)",
    )
    machine.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _number(text: str, accept: str, low: float, high: float, low_included: bool) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (low <= value <= high) or math.isinf(value) or (value == low and not low_included):
        raise argparse.ArgumentTypeError(f"must be {accept}, got {text!r}")
    return value


def _positive(text: str) -> float:
    return _number(text, "a finite number > 0", 0.0, math.inf, low_included=False)


def not_negative(text: str) -> float:
    """A finite number from zero on, as an option is given it."""
    return _number(text, "a finite number >= 0", 0.0, math.inf, low_included=True)


def _share(text: str) -> float:
    return _number(text, "a number > 0 and <= 1", 0.0, 1.0, low_included=False)


def _integer(text: str, low: int) -> int:
    if not text.strip().lstrip("+").isdecimal() or int(text) < low:
        raise argparse.ArgumentTypeError(f"must be a whole number >= {low}, got {text!r}")
    return int(text)


def _count(text: str) -> int:
    return _integer(text, 1)


def _seed(text: str) -> int:
    return _integer(text, 0)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in RECIPES:
            raise argparse.ArgumentTypeError(f"unknown optimizer {name!r}; known: {', '.join(RECIPES)}")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"names an optimizer twice: {text!r}")
    return names


def _rates(text: str) -> float | dict[str, float]:
    if "=" not in text:
        return _positive(text)
    pairs = [part.partition("=") for part in text.split(",")]
    _names(",".join(name for name, _, _ in pairs))
    return {name.strip(): _positive(value) for name, _, value in pairs}


def _sweep(text: str) -> dict[str, list[float]]:
    parts = [part.partition("=") for part in text.split(";")]
    names = _names(",".join(name for name, _, _ in parts))
    return {
        name: [_positive(lr) for lr in values.split(",")]
        for name, (_, _, values) in zip(names, parts, strict=True)
    }
