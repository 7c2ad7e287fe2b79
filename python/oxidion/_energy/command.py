"""Arguments of ``python -m oxidion rank``."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

FRACTIONS = ("1/16", "1/8", "1/4", "1/2")


def add(commands: Any) -> argparse.ArgumentParser:
    """Adds the subcommand; returns its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "rank",
        help="print what low ranks capture of the momenta in a checkpoint",
        description="Share of the energy, the sum of all squares, that the largest singular values of each "
        "matrix hold: of the momenta in an optimizer's checkpoint, or of a model's weights. With two "
        "checkpoints, of their difference. Nothing in a checkpoint is run.",
    )
    argument = parser.add_argument
    argument(
        "checkpoint",
        type=Path,
        nargs="+",
        help="a file of torch.save or a folder of torch.distributed.checkpoint; a second one is subtracted",
    )
    argument(
        "--key",
        help="of the states, or 'weights' (default: momentum, momentum_buffer, exp_avg, else weights)",
    )
    argument("--names", type=Path, metavar="CHECKPOINT", help="of the model, if the optimizer's has no names")
    argument("--match", default="", metavar="REGEX", help="look at parameters with such names only")
    argument(
        "--fractions",
        type=_fraction,
        nargs="+",
        default=[_fraction(text) for text in FRACTIONS],
        help="rank fractions (default: 1/16 1/8 1/4 1/2)",
    )
    argument("--energy", type=_share, default=0.9, help="share to be kept, in (0, 1] (default: 0.9)")
    argument("--json", type=Path, metavar="FILE", help="write the figures to a file")
    argument("--plot", type=Path, metavar="FILE", help="draw them into a PNG or SVG file (needs matplotlib)")
    return parser


def _fraction(text: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise argparse.ArgumentTypeError(f"expected a fraction as 1/8 or 0.125, got {text!r}") from error
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {text}")
    return value


def _share(text: str) -> float:
    return float(_fraction(text))


def run(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    """Prints what was asked for; a usage error ends the process with status 2."""
    from oxidion._energy import report

    if len(given.checkpoint) > 2:
        parser.error(f"takes one checkpoint, or two to subtract the second, got {len(given.checkpoint)}")
    try:
        if given.plot:
            importlib.import_module("matplotlib.figure")
        made = report.report(
            given.checkpoint,
            key=given.key,
            names=given.names,
            match=given.match,
            fractions=given.fractions,
            energy=given.energy,
        )
        sys.stdout.write(str(made))
        if given.json:
            given.json.write_text(json.dumps(made.to_dict(), indent=2) + "\n", "utf-8")
        if given.plot:
            report.plot(made, given.plot)
    except ImportError as error:
        parser.error(f"--plot needs matplotlib, which is not installed: pip install matplotlib ({error})")
    except re.error as error:
        parser.error(f"--match: {error}")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0
