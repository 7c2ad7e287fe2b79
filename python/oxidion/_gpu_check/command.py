"""The command: each part in a process of its own with a time limit, a line for each, and a report."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from oxidion._cuda import child, self_check
from oxidion._cuda.device import tier
from oxidion._gpu_check import parts, products, ranks, sources
from oxidion._gpu_check.parts import CLASSES, KERNELS, SPEED, Found
from oxidion._gpu_check.place import EMULATED, place

SCHEMA = 2
ROWS = {1: "env", 2: "load", 3: "kernels", 4: "steps", 5: "sanitizer", 6: "speed", 7: "devices"}
LIMITS = {1: 60, 2: 180, 3: 120, 4: 120, 5: 240, 6: 60, 7: ranks.SECONDS}
"""Seconds of a part."""
QUICK = (1, 2, 3)
DECIDES = (1, 2, 3, 4)
"""Rows in which a failure is one of the whole check."""
BY_KERNELS = (2, 3)
"""Rows in which kernels alone compute."""
NO_DEVICE = 2


def add(commands: Any) -> argparse.ArgumentParser:
    """Adds the command's arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "gpu-check",
        help="check every kernel and class on a GPU",
        description="Checks every kernel and every class on a GPU, in about five minutes. Each part runs in "
        "a process of its own: one that fails or hangs does not stop the others. Attach what --json writes "
        "to an issue.",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report there")
    parser.add_argument("--rows", default="", help="numbers of rows, as 1,3; all if not given")
    parser.add_argument("--device", default="0", help="number of the GPU")
    parser.add_argument("--quick", action="store_true", help="rows 1 to 3")
    parser.add_argument(
        "--recheck",
        action="store_true",
        help="only check anew what was checked before kernels were first used",
    )
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--self", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--products", help=argparse.SUPPRESS)
    return parser


def run(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    """Runs the check, or in a child one part of it; returns the exit status."""
    if given.part:
        row, name = given.part
        found = parts.run(int(row), name, given.device)
        sys.stdout.write("\n" + json.dumps(vars(found)) + "\n")
        return 0
    if asked := given.self:
        sources.run(given.device, *(names.split(",") if names else [] for names in asked))
        return 0
    if given.rank:
        rank, count, part, store = given.rank
        found_here = ranks.work(given.device, int(rank), int(count), part, store)
        sys.stdout.write("\n" + json.dumps(found_here) + "\n")
        return 0
    if given.products:
        sys.stdout.write(json.dumps(products.run(given.device, given.products.split(","))) + "\n")
        return 0
    rows = _rows(parser, given)
    if given.device != EMULATED and not torch.cuda.is_available():
        line("SKIP", 1, "env", {"torch": torch.__version__, "cuda": torch.version.cuda}, "torch finds no GPU")
        return NO_DEVICE
    if given.device != EMULATED and not (
        given.device.isdigit() and int(given.device) < torch.cuda.device_count()
    ):
        parser.error(f"--device must be one of 0 to {torch.cuda.device_count() - 1}, got {given.device}")
    if given.recheck:
        return recheck(given.device)
    report = check(given.device, rows)
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    _table(report)
    status: int = report["exit"]
    return status


def recheck(number: str) -> int:
    """Forgets what is kept of checks on a device and checks every source; returns the exit status."""
    where = place(number)
    verdicts = self_check.anew(where)
    for name, verdict in verdicts.items():
        used = verdict.result == "pass"
        figures = f"off={verdict.error:.2g} seconds={verdict.seconds:.2g}"
        told = f"kernels  {figures}" if used else f"libtorch ({verdict.result}: {verdict.reason})"
        sys.stdout.write(f"{name:20} {told}\n")
    return int(any(verdict.result != "pass" for verdict in verdicts.values()))


def _rows(parser: argparse.ArgumentParser, given: argparse.Namespace) -> list[int]:
    if given.quick:
        return list(QUICK)
    words = [word.strip() for word in given.rows.split(",") if word.strip()]
    if any(not word.isdigit() or int(word) not in ROWS for word in words):
        parser.error(f"--rows must be numbers of 1 to {len(ROWS)}, got {given.rows}")
    return [int(word) for word in words] or list(ROWS)


def line(status: str, row: int, name: str, figures: Mapping[str, Any], reason: str) -> None:
    """Prints what a part found."""
    told = " ".join(f"{key}={_short(value)}" for key, value in figures.items() if key != "report")
    sys.stdout.write(f"{status:4}  {row} {ROWS[row]:9} {name:36} {told}{f'  ({reason})' if reason else ''}\n")
    sys.stdout.flush()


def _short(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def check(number: str, rows: Iterable[int]) -> dict[str, Any]:
    """The report of these rows on a device."""
    found: list[dict[str, Any]] = []
    for row in rows:
        for name in _names(row):
            started = time.monotonic()
            result = _part(row, name, number)
            seconds = round(time.monotonic() - started, 2)
            line(result.status, row, name, result.figures, result.reason)
            found.append({"row": row, "part": name, "seconds": seconds, "limit": LIMITS[row], **vars(result)})
    failed = any(part["status"] == "FAIL" and part["row"] in DECIDES for part in found)
    told = {"tier": tier(), "tiers": tiers(found)}
    return {"schema": SCHEMA, **parts.facts(number), **told, "rows": found, "exit": int(failed)}


def tiers(found: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """By source what is to compute, from what row 3 has found: "kernels", or "libtorch: reason"."""
    told: dict[str, str] = {}
    for part in found:
        for source in part["part"].split() if part["row"] == 3 else ():
            if source in self_check.SOURCES:
                is_right = part["status"] == "PASS"
                word = "kernels" if is_right else f"libtorch: {part['reason']}"
                if told.get(source, "kernels") == "kernels":
                    told[source] = word
    return told


def _names(row: int) -> list[str]:
    names: dict[int, Iterable[str]] = {3: KERNELS, 4: CLASSES, 6: SPEED, 7: ranks.PARTS}
    return list(names.get(row, [ROWS[row]]))


def _part(row: int, name: str, number: str) -> Found:
    emulated = number == EMULATED
    if row == 5:
        return _sanitized(number)
    if row == 6 and emulated:
        return Found("SKIP", {}, "there is no device whose speed could be measured")
    if row == 7:
        count = 0 if emulated else torch.cuda.device_count()
        if count == 1:
            return Found("SKIP", {"gpus": count}, "there is one GPU")
        if emulated and name != ranks.PARTS[0]:
            return Found("SKIP", {}, "one device is emulated, for gloo")
        return ranks.run(name, [EMULATED] * 2 if emulated else [str(n) for n in range(min(count, 8))])
    if row in BY_KERNELS and tier() == "libtorch":
        return Found("SKIP", {}, "OXIDION_CUDA=libtorch: kernels are not asked for")
    return _child(row, name, number)


def _sanitized(number: str) -> Found:
    """Kernels under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or number == EMULATED:
        return Found("SKIP", {}, "compute-sanitizer is not installed" if tool is None else "no device")
    for kind in ("memcheck", "racecheck", "synccheck"):
        command = [tool, "--tool", kind, "--error-exitcode", "9"]
        found = _child(3, "coded.cu AdamW", number, command)
        if found.status != "PASS":
            return Found("FAIL", {"tool": kind}, found.reason)
    return Found("PASS", {"tools": 3})


def _child(row: int, name: str, number: str, before: Iterable[str] = ()) -> Found:
    """One part in a process of its own; past the limit it is ended."""
    kernels = {"OXIDION_CUDA": "kernels"} if row in BY_KERNELS else {}
    command = [*before, sys.executable, "-m", "oxidion", "gpu-check", "--device", number]
    try:
        done = subprocess.run(
            [*command, "--part", str(row), name],
            # Kernels are tried as they are.
            env={**os.environ, child.VARIABLE: "0", **kernels},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMITS[row],
        )
    except subprocess.TimeoutExpired:
        return Found("FAIL", {}, f"no answer within {LIMITS[row]} s")
    said = done.stdout.strip().splitlines()
    try:
        told = Found(**json.loads(said[-1])) if said else None
    except (ValueError, TypeError):
        told = None
    if done.returncode or told is None:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return Found("FAIL", {}, f"the process ended with {done.returncode}: {last[:300]}")
    return told


def _table(report: Mapping[str, Any]) -> None:
    counts = {row: dict[str, int]() for row in ROWS}
    for part in report["rows"]:
        found = counts[part["row"]]
        found[part["status"]] = found.get(part["status"], 0) + 1
    sys.stdout.write(f"\n{report['gpu']}, driver {report['driver'] or 'none'}, torch {report['torch']}\n")
    for row, name in ROWS.items():
        if counts[row]:
            told = ", ".join(f"{count} {status}" for status, count in counts[row].items())
            sys.stdout.write(f"{row} {name:9} {told}\n")
