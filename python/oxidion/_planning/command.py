"""Arguments of ``python -m oxidion plan``."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

from oxidion._oxidion import algorithms

DTYPES = ("float16", "bfloat16", "float32", "float64")


def add(commands: Any) -> argparse.ArgumentParser:
    """Adds the subcommand; returns its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="print memory, communication and work of a step on a mesh",
        description="Memory, communication and work of one rank in one step of an optimizer, on a mesh that "
        "need not exist. Every model is combined with every mesh.",
    )
    _arguments(parser)
    return parser


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        nargs="+",
        action="extend",
        required=True,
        help="gpt-160m, llama-{1b,8b,70b,405b} or a JSON file",
    )
    add(
        "--mesh",
        nargs="+",
        action="extend",
        help="as in dp=8,fs=64,tp=8; any axis may be missing (default: dp=1)",
    )
    add("--algorithm", choices=algorithms(), default="dion", help="of the matrices")
    add("--rank-fraction", type=float, default=1.0, help="of dion, in (0, 1] (default: 1)")
    add("--fraction", type=float, default=0.25, help="of dion2 and nordion2, in (0, 1] (default: 0.25)")
    add("--selection-scope", choices=("local", "global"), default="local", help="of those two")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of parameters and gradients (default: bfloat16)")
    add("--state-dtype", choices=DTYPES, help="of optimizer states (default: the parameters')")
    add(
        "--compressed",
        action="store_true",
        help="the optimizer averages over dp: small matrices, not gradients",
    )
    add("--rank", type=int, default=0, help="whose plan it is (default: 0)")
    add("--schedule", action="store_true", help="print the instructions too")
    add("--json", type=Path, metavar="FILE", help="write the figures to a file")
    add(
        "--plot", type=Path, metavar="FILE", help="draw the figures into a PNG or SVG file (needs matplotlib)"
    )


def run(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    """Prints what was asked for; a usage error ends the process with status 2."""
    from oxidion._planning import models, simulate

    settings = simulate.Settings(
        given.algorithm,
        given.rank_fraction,
        given.dtype,
        given.state_dtype,
        given.compressed,
        given.rank,
        given.fraction,
        given.selection_scope,
    )
    simulations: list[simulate.Simulation] = []
    try:
        if given.plot:
            importlib.import_module("matplotlib.figure")
        meshes = [models.parse_mesh(text) for text in given.mesh or ["dp=1"]]
        for model, mesh in product(given.model, meshes):
            simulation, plan = simulate.simulate(model, mesh, settings)
            sys.stdout.write("\n" * bool(simulations) + str(simulation))
            if given.schedule:
                sys.stdout.write(f"\n{plan}")
            simulations.append(simulation)
        if given.json:
            given.json.write_text(json.dumps([s.to_dict() for s in simulations], indent=2) + "\n", "utf-8")
        if given.plot:
            simulate.plot(simulations, given.plot)
    except ImportError as error:
        parser.error(f"--plot needs matplotlib, which is not installed: pip install matplotlib ({error})")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0
