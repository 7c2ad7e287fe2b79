"""Arguments of ``python -m oxidion rank``."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from oxidion._core.arguments import (
    existing,
    fraction,
    output_file,
    pattern,
    picture,
    share,
    write_json,
    writing,
)

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
        type=existing,
        nargs="+",
        help="a file of torch.save or a folder of torch.distributed.checkpoint; a second one is subtracted",
    )
    argument(
        "--key",
        help="of the states, or 'weights' (default: momentum, momentum_buffer, exp_avg, else weights)",
    )
    argument(
        "--names", type=existing, metavar="CHECKPOINT", help="of the model, if the optimizer's has no names"
    )
    argument(
        "--match", type=pattern, default="", metavar="REGEX", help="look at parameters with such names only"
    )
    argument(
        "--fractions",
        type=fraction,
        nargs="+",
        default=[fraction(text) for text in FRACTIONS],
        help="rank fractions (default: 1/16 1/8 1/4 1/2)",
    )
    argument("--energy", type=share, default=0.9, help="share to be kept, in (0, 1] (default: 0.9)")
    argument("--json", type=output_file, metavar="FILE", help="write the figures to a file")
    argument(
        "--plot", type=picture, metavar="FILE", help="draw them into a PNG or SVG file (needs matplotlib)"
    )
    return parser


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
            write_json("--json", given.json, made.to_dict())
        if given.plot:
            with writing("--plot"):
                report.plot(made, given.plot)
    except ImportError as error:
        parser.error(f"--plot needs matplotlib, which is not installed: pip install matplotlib ({error})")
    except (ValueError, OSError) as error:
        reason = str(error)
        is_names = given.names is not None and str(given.names) in reason
        option = "argument --names: " if is_names else "argument checkpoint: "
        parser.error(reason if reason.startswith("--") else option + reason)
    return 0
