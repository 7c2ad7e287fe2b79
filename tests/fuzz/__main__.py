"""Runs random cases in child processes: ``make fuzz``, or ``PYTHONPATH=tests python -m fuzz``.

A failed case, a crash and a hang are findings. Each is printed with the command that makes it again. A child
runs many cases; where it dies, another goes on with the next case.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import resource
import selectors
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.draw import Draw

TARGETS = {
    "steps": 4,
    "hostile": 2,
    "layouts": 2,
    "state_dicts": 4,
    "imports": 4,
    "plans": 4,
    "command_line": 4,
    "checkpoints": 2,
}
"""Modules with a ``case``, and their shares of the cases."""
PATIENCE = 120.0
"""Seconds after which a case is taken to hang."""
START = 600.0
"""Seconds that a child may take to import what it needs, on a machine with much else to do."""
MOST_MEMORY = 12 << 30
"""Bytes of addresses of a child: a case that asks for more is a finding, and no trouble for the machine."""
PIECE = 500
"""Cases of one child."""
TESTS = Path(__file__).resolve().parents[1]


@dataclass
class Found:
    """What the cases of a target have shown.

    Attributes:
        cases: how many ran.
        findings: number of the case and what was wrong.
        seconds: time of all of its children.
    """

    cases: int = 0
    findings: list[tuple[int, str]] = field(default_factory=list)
    seconds: float = 0.0


def run_one(target: str, seed: int, number: int) -> None:
    """Runs one case in this process."""
    importlib.import_module(f"fuzz.{target}").case(Draw(seed, target, number))


def serve(target: str, seed: int, first: int, count: int) -> None:
    """Runs cases as a child: a line before each, and one for each that fails."""
    import torch

    torch.set_num_threads(1)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY if hard < 0 else min(MOST_MEMORY, hard), hard))
    faulthandler.enable()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what cases print is not an answer
    importlib.import_module(f"fuzz.{target}")
    for number in range(first, first + count):
        answers.write(f"case {number}\n")
        try:
            run_one(target, seed, number)
        except BaseException:  # a panic of the core is no Exception
            text = traceback.format_exc(limit=-6)
            answers.write(f"wrong {number} {text.encode('utf-8', 'replace').hex()}\n")
    answers.write("done\n")


def one_child(target: str, seed: int, first: int, count: int, found: Found) -> int:
    """Has a child run cases; returns the first that is left, after one that killed it."""
    command = [sys.executable, "-m", "fuzz", "--child", target, str(seed), str(first), str(count)]
    at, done, patience = first, False, START
    with (
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
        ) as child,
        selectors.DefaultSelector() as ready,
    ):
        assert child.stdout is not None
        assert child.stderr is not None
        for stream in (child.stdout, child.stderr):
            os.set_blocking(stream.fileno(), False)
            ready.register(stream, selectors.EVENT_READ)
        text, said, last = b"", b"", time.monotonic()
        while ready.get_map():
            for key, _ in ready.select(1.0):
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    ready.unregister(key.fileobj)
                elif key.fileobj is child.stderr:
                    said = (said + piece)[-4000:]
                else:
                    *lines, text = (text + piece).split(b"\n")
                    last, patience = time.monotonic(), PATIENCE
                    for line in lines:
                        kind, *rest = line.decode().split(" ")
                        done |= kind == "done"
                        at = int(rest[0]) if kind == "case" else at
                        if kind == "wrong":
                            found.findings.append((int(rest[0]), bytes.fromhex(rest[1]).decode()))
            if time.monotonic() - last > patience:
                child.kill()
                said += b"\n(hangs)"
                last = time.monotonic()
    if done:
        found.cases += count
        return first + count
    found.cases += at + 1 - first
    found.findings.append((at, f"the process ended with {child.returncode}: {said.decode(errors='replace')}"))
    return at + 1


def run_target(target: str, seed: int, cases: int, piece: int) -> Found:
    """Runs cases 0 to ``cases`` of a target, one child after the other."""
    found, began, at = Found(), time.perf_counter(), 0
    while at < cases:
        at = one_child(target, seed, at, min(piece, cases - at), found)
        numbers = ", ".join(str(number) for number, _ in found.findings) or "none"
        print(f"{target}: {at} of {cases} cases, findings: {numbers}", file=sys.stderr, flush=True)
    found.seconds = time.perf_counter() - began
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns 1 if there is a finding."""
    if sys.argv[1:2] == ["--child"] and arguments is None:
        target, *numbers = sys.argv[2:]
        serve(target, *map(int, numbers))
        return 0
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Random cases in child processes.")
    parser.add_argument("--seed", type=int, default=0, help="of all cases (default: 0)")
    parser.add_argument("--cases", type=int, default=2000, help="over all targets (default: 2000)")
    parser.add_argument(
        "--target", nargs="+", choices=[*TARGETS], default=list(TARGETS), help="(default: all)"
    )
    parser.add_argument("--only", type=int, metavar="N", help="one case of the target, in this process")
    parser.add_argument("--jobs", type=int, default=2, help="children side by side (default: 2)")
    parser.add_argument("--shown", type=int, default=20, help="findings printed in full (default: 20)")
    given = parser.parse_args(arguments)
    if given.only is not None:
        for target in given.target:
            run_one(target, given.seed, given.only)
        return 0
    parts = {target: TARGETS.get(target, 1) for target in given.target}
    shares = {target: -(-given.cases * part // sum(parts.values())) for target, part in parts.items()}
    with ThreadPoolExecutor(given.jobs) as pool:
        runs = {t: pool.submit(run_target, t, given.seed, shares[t], PIECE) for t in given.target}
        results = {target: run.result() for target, run in runs.items()}
    shown = 0
    for target, found in results.items():
        for number, text in sorted(found.findings):
            shown += 1
            if shown <= given.shown:
                print(f"\n{text.rstrip()}")
            again = f"--target {target} --seed {given.seed} --only {number}"
            print(f"again: PYTHONPATH=tests python -m fuzz {again}")
    for target, found in results.items():
        print(f"{target:14} {found.cases:7} cases {found.seconds:8.0f} s {len(found.findings):5} findings")
    return 1 if shown else 0


if __name__ == "__main__":
    sys.exit(main())
