"""Scripts of other packages with the import changed: each is killed on a layout and goes on on the next one.

One process, FSDP2 on two ranks, FSDP2 with tensor parallelism on four, DDP on two, one process again. All
are in float64, the orthonormalization too: the losses are those of one process that was never stopped, but
for the order of sums. A resumed run without its optimizer's states has losses that differ by 7e-3 and more.
"""

from __future__ import annotations

import math
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import forks

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "coming_from"
BOUND = 1e-12
"""Largest difference of two losses, which are about 4; 2e-15 is the largest that was found."""
SAVE_EVERY, STEPS = 2, 30
CYCLE = ("one", "fs=2", "fs=2,tp=2", "dp=2", "one")

KILLED = """
import contextlib, functools, os, runpy, signal, sys, threading
import torch
import torch.distributed.checkpoint as dcp
import oxidion.checkpoint
import oxidion.compat.dion as dion, oxidion.compat.torch as of_torch

script, delay = sys.argv[1], float(sys.argv[2])
sys.argv[:3] = [script]
dion.Muon = functools.partial(dion.Muon, orth_dtype=torch.float64)
of_torch.Muon = functools.partial(of_torch.Muon, orth_dtype=torch.float64)
whole_folder = oxidion.checkpoint.whole_folder

@contextlib.contextmanager
def whole_folder_and_a_kill(root, step, **options):
    with whole_folder(root, step, **options) as folder:
        yield folder
    if delay >= 0.0:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()

oxidion.checkpoint.whole_folder = whole_folder_and_a_kill
sys.path.insert(0, os.path.dirname(script))
runpy.run_path(script, run_name="__main__")
"""
"""Runs a script with products in float64; kills its process ``delay`` seconds after its first checkpoint."""


MODULES = (
    "oxidion.compat.colossalai",
    "oxidion.compat.dion",
    "oxidion.compat.torch",
    "torch._dynamo",  # torch imports it in the first step of an optimizer, which takes a second
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)

Layout = tuple[str, int, list[str]]
"""Name, number of processes (0 for one without torchrun's variables), and options of the script."""


@pytest.fixture(scope="module")
def processes() -> Iterator[forks.Forks]:
    """A process that has imported what the scripts need."""
    made = forks.Forks(*MODULES, environment=forks.ENVIRONMENT)
    yield made
    made.stop()


def run(
    processes: forks.Forks, script: Path, ranks: int, options: list[str], kill_after: float = -1.0
) -> dict[int, float]:
    """Losses that a run prints, by step, until it ends or is killed."""
    is_killed = kill_after >= 0.0
    sizes = [f"--steps={STEPS}", f"--save-every={SAVE_EVERY if is_killed else STEPS}", "--dtype=float64"]
    ended = processes.run(KILLED, str(script), str(kill_after), *options, *sizes, ranks=ranks)
    statuses, errors = [rank.returncode for rank in ended], "".join(rank.stderr for rank in ended)
    # A rank that notices first that another one is gone ends with an error of gloo.
    assert (-signal.SIGKILL in statuses and 0 not in statuses) if is_killed else not any(statuses), errors
    found = re.findall(r"^step (\d+) loss (\S+)$", ended[0].stdout, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def newest_checkpoint(folder: Path) -> int:
    """Steps of the newest complete checkpoint; 0 where there is none."""
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*")), default=0)


def check_cycle(processes: forks.Forks, script: Path, folder: Path, layouts: list[Layout]) -> None:
    """Compares a run that is killed on every layout but the last with a run that is never stopped.

    Args:
        processes: where they run.
        script: what is run.
        folder: for its checkpoints.
        layouts: in their order; the first is one process, on which the other run is too.
    """
    whole = run(processes, script, *layouts[0][1:])
    assert list(whole) == list(range(STEPS))
    moments = random.Random(1)
    for number, (name, ranks, options) in enumerate(layouts):
        begun, is_last = newest_checkpoint(folder), number == len(layouts) - 1
        kill_after = -1.0 if is_last else moments.uniform(0.0, 0.05)
        losses = run(processes, script, ranks, [f"--folder={folder}", *options], kill_after)
        assert list(losses) == list(range(begun, begun + len(losses))), name
        assert len(losses) >= SAVE_EVERY, name
        gap = max(abs(loss - whole[step]) for step, loss in losses.items())
        assert gap < BOUND, f"{name}: losses differ by {gap:.1e}"
    assert begun + len(losses) == STEPS


def layout(name: str, *options: str) -> Layout:
    """A layout of the scripts in ``examples/coming_from``."""
    sizes = [] if name == "one" else name.split(",")
    ranks = math.prod(int(size.partition("=")[2]) for size in sizes) if sizes else 0
    return name, ranks, [*options, *(f"--{size}" for size in sizes)]


@pytest.mark.parametrize(
    ("command", "cycle"),
    [
        ("microsoft_dion.py --scalars lion", CYCLE),
        ("microsoft_dion.py --scalars adamw --compressed", ("one", "fs=2", "dp=2,fs=2", "dp=2", "one")),
        ("microsoft_dion.py --optimizer muon", CYCLE),
        ("torch_muon.py", CYCLE),
        *((f"colossalai.py --optimizer {name}", CYCLE) for name in ("adafactor", "came", "galore", "lamb")),
    ],
)
def test_script_is_killed_and_goes_on_on_other_layouts(
    processes: forks.Forks, command: str, cycle: tuple[str, ...], tmp_path: Path
) -> None:
    name, *options = command.split()
    check_cycle(processes, SCRIPTS / name, tmp_path, [layout(each, *options) for each in cycle])
