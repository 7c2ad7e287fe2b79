"""Arguments of ``python -m oxidion plan``."""

from __future__ import annotations

import argparse
import importlib
import sys
from argparse import ArgumentTypeError
from dataclasses import fields
from itertools import product
from typing import Any

from oxidion._core.arguments import checked, integer, output_file, picture, share, shown, write_json, writing
from oxidion._oxidion import algorithms
from oxidion._planning import hardware, models

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


def _route(text: str) -> str | tuple[str, ...]:
    """A word, or the names of axes."""
    if text in ("auto", "keep", "gather"):
        return text
    names = tuple(name.strip() for name in text.split(","))
    if len({*names}) != len(names) or not models.AXES.keys() >= {*names}:
        raise ArgumentTypeError(
            f"must be auto, keep, gather, or axes among {', '.join(models.AXES)}, each once, as in fs,tp; "
            f"got {shown(text)}"
        )
    return names


def _model(text: str) -> str:
    models.load(text)
    return text


def _hardware(text: str) -> str:
    hardware.load(text)
    return text


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        nargs="+",
        action="extend",
        required=True,
        type=checked(_model),
        help="gpt-160m, llama-{1b,8b,70b,405b}, mixtral-8x7b, deepseek-v3, or a JSON file: of this package, "
        "or the config.json of a model of transformers",
    )
    add(
        "--mesh",
        nargs="+",
        type=checked(models.parse_mesh),
        action="extend",
        help="as in dp=8,fs=64,ep=8,tp=8; any axis may be missing (default: dp=1)",
    )
    add("--algorithm", choices=algorithms(), default="dion", help="of the matrices")
    add("--rank-fraction", type=share, default=1.0, help="of dion, in (0, 1], as 1/16 (default: 1)")
    add("--fraction", type=share, default=0.25, help="of dion2 and nordion2, in (0, 1] (default: 0.25)")
    add("--selection-scope", choices=("local", "global"), default="local", help="of those two")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of parameters and gradients (default: bfloat16)")
    add("--state-dtype", choices=DTYPES, help="of moments (default: float32)")
    add(
        "--compressed",
        action="store_true",
        help="the optimizer averages over dp: small matrices, not gradients",
    )
    add("--state-bits", type=int, choices=(8, 32), default=32, help="8: moments in one byte (default: 32)")
    add("--master-weights", action="store_true", help="float32 weights of bfloat16 parameters")
    add(
        "--block-size",
        type=int,
        choices=(8, 16, 32, 64, 128, 256, 512),
        help="elements of a row that share a scale in 8 bits (default: 256)",
    )
    add(
        "--projection-rank",
        type=integer(1),
        default=128,
        help="of galore_adamw and apollo_adamw (default: 128)",
    )
    add(
        "--owned-states",
        action="store_true",
        help="of muon, normuon, soap, galore_adamw and their kin: owner-sharded states also for copies",
    )
    add(
        "--sides",
        choices=("both", "short", "unsharded"),
        default="both",
        help="of soap and soap_muon: the sides with a basis (default: both)",
    )
    add("--device", choices=("cpu", "cuda"), help="that runs it (default: cuda with more than one rank)")
    add(
        "--max-batch-bytes",
        type=integer(0),
        help="bound on the workspace of matrices that are handled together",
    )
    add("--workspace-limit", type=integer(0), help="bytes of workspace that the plan keeps to")
    add(
        "--route",
        type=_route,
        default="auto",
        help="of dion: auto, keep, gather, or axes to gather, as in fs,tp (default: auto)",
    )
    add(
        "--hardware",
        type=checked(_hardware),
        help=f"estimate times for {', '.join(hardware.DEVICES)}, or a JSON file",
    )
    add(
        "--links",
        choices=list(hardware.LINKS),
        default="nvlink+ib400",
        help="of built-in hardware (default: nvlink+ib400)",
    )
    add(
        "--tokens-per-step",
        type=integer(0),
        default=0,
        dest="tokens",
        help="for the share of a training step",
    )
    add("--compare", action="store_true", help="all algorithms, a line each")
    add("--sweep", metavar="AXIS=A..B", help="an axis at all powers of two, as in fs=8..1024, a line each")
    add("--rank", type=integer(0), default=0, help="whose plan it is (default: 0)")
    add("--schedule", action="store_true", help="print the instructions too")
    add("--json", type=output_file, metavar="FILE", help="write the figures to a file")
    add(
        "--plot",
        type=picture,
        metavar="FILE",
        help="draw the figures into a PNG or SVG file (needs matplotlib)",
    )


def _compared(given: argparse.Namespace, settings: Any, meshes: list[Any]) -> int:
    """Prints, writes and draws one table of several plans."""
    from oxidion._planning import compare

    found = compare.simulations(given.model, meshes, settings, every=given.compare)
    sys.stdout.write(f"{compare.table(found)}\n")
    if given.json:
        write_json("--json", given.json, [one.to_dict() for one in found])
    if given.plot:
        with writing("--plot"):
            compare.plot(found, given.plot)
    return 0


def _with_option(reason: str, given: argparse.Namespace) -> str:
    """The reason of an error after the option that it is about: that of its key, else model and mesh."""
    if reason.startswith("--"):
        return reason
    key = reason.partition(" ")[0]
    option = f"--{key.replace('_', '-')}"
    return f"{option if hasattr(given, key) else '--model on --mesh'}: {reason}"


def run(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    """Prints what was asked for; a usage error ends the process with status 2."""
    from oxidion._planning import compare, simulate

    settings = simulate.Settings(
        **{field.name: getattr(given, field.name) for field in fields(simulate.Settings)}
    )
    simulations: list[simulate.Simulation] = []
    try:
        if given.plot:
            importlib.import_module("matplotlib.figure")
        meshes = given.mesh or [{"dp": 1}]
        if given.sweep is not None:
            meshes = [mesh for base in meshes for mesh in compare.swept(base, given.sweep)]
        if given.compare or given.sweep is not None:
            return _compared(given, settings, meshes)
        for model, mesh in product(given.model, meshes):
            simulation, plan = simulate.simulate(model, mesh, settings)
            sys.stdout.write("\n" * bool(simulations) + str(simulation))
            if given.schedule:
                sys.stdout.write(f"\n{plan}")
            simulations.append(simulation)
        if given.json:
            write_json("--json", given.json, [each.to_dict() for each in simulations])
        if given.plot:
            with writing("--plot"):
                simulate.plot(simulations, given.plot)
    except ImportError as error:
        parser.error(f"--plot needs matplotlib, which is not installed: pip install matplotlib ({error})")
    except (ValueError, OSError) as error:
        parser.error(_with_option(str(error), given))
    return 0
