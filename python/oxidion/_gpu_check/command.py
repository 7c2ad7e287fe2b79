"""The command ``gpu-check``: runs parts in forks, prints a line for each and writes a report."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from oxidion._core.arguments import integer, output_file, seconds, shown
from oxidion._cuda import child, self_check
from oxidion._cuda.device import tier
from oxidion._gpu_check import products, ranks, rows, sources
from oxidion._gpu_check.found import Found
from oxidion._gpu_check.graphs import GRAPHS
from oxidion._gpu_check.parts import CLASSES, KERNELS, Setting
from oxidion._gpu_check.place import EMULATED, place
from oxidion._gpu_check.runner import (
    CUT,
    RUNNING,
    Part,
    Report,
    Runner,
    Start,
    age,
    failure,
    forked,
    read_json,
    started,
    write_json,
)
from oxidion._gpu_check.speed import SPEED

SCHEMA = 3
ROWS = {
    1: "env",
    2: "load",
    3: "kernels",
    4: "steps",
    5: "sanitizer",
    6: "speed",
    7: "devices",
    8: "first",
    9: "graphs",
}
LIMITS = {1: 30, 2: 60, 3: 20, 4: 40, 5: 60, 6: 60, 7: ranks.SECONDS + 10, 8: 95, 9: 30}
"""Seconds of a part."""
EMULATED_LIMIT = 300
"""The same of every part where the device is emulated."""
SPARE, LEAST = 2.0, 8.0
"""Seconds that are left for the report, and those with which a part still begins."""
ORDER = (1, 2, 3, 8, 4, 9, 6, 7)
"""Rows that run unless others are asked for, in their order."""
QUICK = (1, 2, 3)
DECIDES = (1, 2, 3, 4, 8, 9)
"""Rows in which a failure is one of the whole check."""
ALONE = (1, 6, 7, 8, 9)
"""Rows whose parts have the device for themselves."""
BY_KERNELS = (2, 3)
"""Rows that are about kernels alone."""
FAILED = ("FAIL", "TIMEOUT", "CRASH")
WORST = ("SLOW", "PASS", "LEFT_OUT")
"""Statuses of the whole check where nothing has failed, the first that any part has."""
NO_DEVICE = 2
JOBS, MOST_JOBS = 8, 1024
FACTS_SECONDS = 60
SANITIZERS = ("memcheck", "racecheck", "synccheck")


def add(commands: Any) -> argparse.ArgumentParser:
    """Adds the command's arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "gpu-check",
        help="check every kernel and class on a GPU",
        description="Checks every kernel and every class on a GPU, in about three minutes. Each part runs in "
        "a process of its own: one that fails or hangs does not stop the others. Attach what --json writes "
        "to an issue.",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=output_file, help="write the report there, after each part"
    )
    parser.add_argument("--log", metavar="FILE", type=output_file, help="append there what the parts print")
    parser.add_argument("--rows", type=_rows, help="numbers of rows, as 1,3; all but 5 if not given")
    parser.add_argument("--device", type=_device, default="0", help="number of the GPU")
    parser.add_argument("--quick", action="store_true", help="rows 1 to 3")
    parser.add_argument(
        "--jobs", type=integer(1, MOST_JOBS), default=JOBS, help=f"parts at once, but for timings ({JOBS})"
    )
    parser.add_argument(
        "--seconds", type=seconds, default=math.inf, help="begin no part that would end later"
    )
    parser.add_argument(
        "--recheck",
        action="store_true",
        help="only check again what was checked before kernels were first used",
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the parts that the report of --json has already"
    )
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=integer(0), default=rows.REPEATS, help=argparse.SUPPRESS)
    parser.add_argument("--self", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--products", help=argparse.SUPPRESS)
    return parser


def run(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    """Runs the check, or in a child one part of it; returns the exit status."""
    if given.part:
        return _one(given)
    if asked := given.self:
        sources.run(given.device, *(names.split(",") if names else [] for names in asked))
        return 0
    if given.rank:
        rank, count, part, store = given.rank
        if not (rank.isdecimal() and count.isdecimal()):
            parser.error(f"--rank must be a rank and a number of ranks, got {rank!r} and {count!r}")
        found_here = ranks.work(given.device, int(rank), int(count), part, store)
        sys.stdout.write("\n" + json.dumps(found_here) + "\n")
        return 0
    if given.products:
        sys.stdout.write(json.dumps(products.run(given.device, given.products.split(","))) + "\n")
        return 0
    if given.resume and given.json is None:
        parser.error("--resume needs --json, the report with the parts that are kept")
    chosen = list(QUICK) if given.quick else given.rows or list(ORDER)
    facts = facts_of(given.device)
    if not facts["gpus"]:
        why = f"torch finds no GPU ({facts.get('reason') or torch.__version__})"
        line({"status": "SKIP", "row": 1, "name": "env", "figures": {}, "reason": why})
        return NO_DEVICE
    if not facts["gpu"]:
        parser.error(f"--device must be one of 0 to {facts['gpus'] - 1}, got {given.device}")
    if given.recheck:
        return recheck(given.device)
    report = check(
        given.device,
        chosen,
        facts,
        jobs=given.jobs,
        seconds=given.seconds,
        spent=age(),
        file=given.json,
        log=given.log,
        resume=given.resume,
    )
    _table(report)
    status: int = report["exit"]
    return status


def _one(given: argparse.Namespace) -> int:
    """Runs one part in this process and writes what it has found to a file, or prints it."""
    row, name = given.part
    os.environ[child.VARIABLE] = "0"
    try:
        found = asdict(rows.run(int(row), name, given.device, given.repeats))
    except Exception as error:  # whatever it is belongs in the report
        found = failure(error)
    if given.into:
        write_json(given.into, found)
    else:
        sys.stdout.write("\n" + json.dumps(found) + "\n")
    return 0


def recheck(number: str) -> int:
    """Forgets what is kept of checks on a device and checks every source; returns the exit status."""
    where = place(number)
    verdicts = self_check.repeated(where)
    for name, verdict in verdicts.items():
        used = verdict.result == "pass"
        figures = f"off={verdict.error:.2g} seconds={verdict.seconds:.2g}"
        shown = f"kernels  {figures}" if used else f"libtorch ({verdict.result}: {verdict.reason})"
        sys.stdout.write(f"{name:20} {shown}\n")
    return int(any(verdict.result != "pass" for verdict in verdicts.values()))


def _rows(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch("[0-9]", word) and int(word) in ROWS for word in words):
        raise argparse.ArgumentTypeError(f"must be numbers of 1 to {len(ROWS)}, as in 1,3; got {shown(text)}")
    return [int(word) for word in words]


def _device(text: str) -> str:
    if text != EMULATED and not re.fullmatch("[0-9]{1,4}", text):
        raise argparse.ArgumentTypeError(f"must be the number of a GPU, as in 0, got {shown(text)}")
    return text


def line(part: Mapping[str, Any]) -> None:
    """Prints what a part found."""
    figures = part["figures"].items()
    shown = " ".join(
        f"{key}={_short(value)}" for key, value in figures if not isinstance(value, (list, dict))
    )
    reason = f"  ({part['reason']})" if part["reason"] else ""
    row = f"{part['row']} {ROWS[part['row']]:9}"
    sys.stdout.write(f"{part['status']:8}  {row} {part['name']:36} {shown}{reason}\n")
    sys.stdout.flush()


def _short(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def facts_of(number: str) -> dict[str, Any]:
    """Facts of a device, read in a fork: a process that has touched a device cannot be forked any more."""
    asked = Part("facts", FACTS_SECONDS, forked(lambda _: {"status": "PASS", "figures": rows.facts(number)}))
    report = Report(None, {})
    Runner(report).run([asked])
    (found,) = report.records
    return {
        "gpus": 0,
        **found["figures"],
        **({} if found["status"] == "PASS" else {"reason": found["reason"]}),
    }


def check(
    number: str,
    chosen: Iterable[int],
    facts: Mapping[str, Any],
    *,
    jobs: int = JOBS,
    seconds: float = math.inf,
    spent: float = 0.0,
    file: Path | None = None,
    log: Path | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Runs rows on a device and returns the report, which is written after each part.

    Args:
        number: of the device, or "emulated".
        chosen: numbers of rows, in the order in which they run.
        facts: as `facts_of` returns them.
        jobs: parts at once.
        seconds: after which nothing may run any more.
        spent: seconds of these that have passed.
        file: where the report is written.
        log: where is appended what the parts print.
        resume: whether parts that the file already has an outcome of do not run again.
    """
    report = Report(file, {"schema": SCHEMA, **facts, "exit": None})

    def ended(part: dict[str, Any], _outcome: Mapping[str, Any]) -> None:
        line(part)
        report.facts["tiers"] = tiers(report.records)

    kept = _kept(file) if resume and file is not None else {}
    planned = [part for row in chosen for part in _parts(row, number, int(facts["gpus"]), jobs)]
    report.plan(planned)
    for part in planned:
        if (old := kept.get((part.row, part.name))) is not None:
            report.put(old)
    left = [part for part in planned if (part.row, part.name) not in kept]
    probe = Part("answers", 10, _fork(partial(rows.answers, number), jobs))
    until = time.monotonic() + seconds - spent
    runner = Runner(report, until=until, spare=SPARE, least=LEAST, probe=probe, log=log, ended=ended)
    runner.run(left, jobs)
    counts: dict[str, int] = {}
    for found in report.records:
        counts[found["status"]] = counts.get(found["status"], 0) + 1
    failed = [f["name"] for f in report.records if f["status"] in FAILED and f["row"] in DECIDES]
    report.facts |= {
        "tiers": tiers(report.records),
        "exit": int(bool(failed)),
        # As `benchmarks/device.py` reads them from the outcome of any part.
        "status": "FAIL" if failed else next((word for word in WORST if word in counts), "SKIP"),
        "figures": counts,
        "reason": "; ".join(failed[:20]),
    }
    report.write()
    return report.content()


def _kept(file: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """Returns the outcomes that a report has.

    A part that ran alone when the report was cut counts as crashed; of several, it is unknown which one did.
    """
    old = read_json(file).get("parts", [])
    cut = [part for part in old if part["status"] == "LEFT_OUT" and part["reason"] == RUNNING]
    if len(cut) == 1:
        cut[0] |= {"status": "CRASH", "reason": CUT}
    return {(part["row"], part["name"]): part for part in old if part["status"] != "LEFT_OUT"}


def tiers(found: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """By source what is to compute, from what row 3 has found: "kernels", or "libtorch: reason"."""
    shown: dict[str, str] = {}
    for part in found:
        is_known = part["row"] == 3 and part["status"] != "LEFT_OUT"
        for source in part["name"].split() if is_known else ():
            if source in self_check.SOURCES:
                word = "kernels" if part["status"] == "PASS" else f"libtorch: {part['reason']}"
                if shown.get(source, "kernels") == "kernels":
                    shown[source] = word
    return shown


def _names(row: int) -> list[str]:
    names: dict[int, Iterable[str]] = {
        2: self_check.SOURCES,
        3: KERNELS,
        4: CLASSES,
        6: SPEED,
        7: ranks.PARTS,
        9: GRAPHS,
    }
    return list(names.get(row, [ROWS[row]]))


def _limit(row: int, number: str) -> float:
    return EMULATED_LIMIT if number == EMULATED else LIMITS[row]


def _parts(row: int, number: str, gpus: int, jobs: int) -> list[Part]:
    if row == 5:
        return _sanitized(number)
    return [
        Part(
            name, _limit(row, number), _fork(partial(_work, row, name, number, gpus), jobs), row, row in ALONE
        )
        for name in _names(row)
    ]


def _work(row: int, name: str, number: str, gpus: int) -> Found:
    """Runs a part in its own process."""
    if row == 7:
        return _ranks(name, number, gpus)
    if row in BY_KERNELS and tier() == "libtorch":
        return Found("SKIP", {}, "OXIDION_CUDA=libtorch: kernels are not asked for")
    return rows.run(row, name, number)


def _fork(work: Callable[[], Found], jobs: int) -> Start:
    """Starts work in a fork that uses its share of the processors, without the self-check."""

    def found(_: Any) -> dict[str, Any]:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // jobs))
        return asdict(work())

    return forked(found, {child.VARIABLE: "0"})


def _ranks(name: str, number: str, gpus: int) -> Found:
    if number == EMULATED:
        if name != ranks.PARTS[0]:
            return Found("SKIP", {}, "one device is emulated, for gloo")
        return ranks.run(name, [EMULATED] * 2)
    if gpus == 1:
        return Found("SKIP", {"gpus": gpus}, "there is one GPU")
    return ranks.run(name, [str(n) for n in range(min(gpus, 8))])


def _sanitized(number: str) -> list[Part]:
    """Parts of compute-sanitizer: of each source the smallest setting, once and without other streams."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or number == EMULATED:
        why = "no device" if number == EMULATED else "compute-sanitizer is not installed"
        return [Part(ROWS[5], LIMITS[5], forked(lambda _: asdict(Found("SKIP", {}, why))), 5)]
    return [
        Part(f"{kind} {name}", LIMITS[5], sanitized(tool, kind, name, number), 5)
        for name in smallest(KERNELS)
        for kind in SANITIZERS
    ]


def sanitized(tool: str, kind: str, name: str, number: str) -> Start:
    """Starts a setting under a tool of compute-sanitizer."""
    words = [tool, "--tool", kind, "--error-exitcode", "9", sys.executable, "-m", "oxidion", "gpu-check"]
    words += ["--device", number, "--part", "3", name, "--repeats", "0", "--into", "{outcome}"]
    # Torch's pool would hide what is written outside of a tensor.
    return started(words, {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def smallest(settings: Mapping[str, Setting]) -> list[str]:
    """Returns names of settings that use every source, each with as few elements as any that uses it."""

    def elements(name: str) -> int:
        return sum(math.prod(shape) for shape in settings[name].shapes)

    found: dict[str, str] = {}
    for name in sorted(settings, key=elements):
        for source in name.split():
            if source in self_check.SOURCES:
                found.setdefault(source, name)
    return list(dict.fromkeys(found.values()))


def _table(report: Mapping[str, Any]) -> None:
    counts: dict[int, dict[str, int]] = {}
    for part in report["parts"]:
        found = counts.setdefault(part["row"], {})
        found[part["status"]] = found.get(part["status"], 0) + 1
    sys.stdout.write(f"\n{report['gpu']}, driver {report['driver'] or 'none'}, torch {report['torch']}\n")
    for row, statuses in counts.items():
        shown = ", ".join(f"{count} {status}" for status, count in statuses.items())
        sys.stdout.write(f"{row} {ROWS[row]:9} {shown}\n")
