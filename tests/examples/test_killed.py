"""The example scripts, killed at any moment and resumed: the losses of an unbroken run, bit for bit.

A run is killed with all of its processes, and the same command is started again: it goes on from what its
folder then has, or restarts where there is no checkpoint yet. Where one process alone is killed, torchrun
does so by itself.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support import forks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 40
SIZES = f"--layers 2 --dim 32 --heads 2 --seq-len 32 --steps {STEPS} --corpus-mb 0.4 --save-every 1"
PATIENCE = 240.0
"""Seconds after which a run is taken to hang."""
KILLS = 50
"""Moments of the slow test, over all runs of a script."""

LOSES_A_RANK = f"""
import os, signal, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import train_fsdp2

save = train_fsdp2.Training.save

def save_and_lose_a_rank(training, root, keep):
    save(training, root, keep)
    is_first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if is_first_start and os.environ["RANK"] == "1" and len(training.losses) == 6:
        os.kill(os.getpid(), signal.SIGKILL)

train_fsdp2.Training.save = save_and_lose_a_rank
status = train_fsdp2.main()
sys.stdout.flush()
os._exit(status)
"""
"""The script with one process that kills itself once, after the checkpoint of step 6."""


@dataclass
class Script:
    """A command line and the folder that it works in."""

    name: str
    processes: int
    folder: Path

    def command(self) -> list[str]:
        """What starts the run, goes on with it where there is a checkpoint, and ends where it is finished."""
        own = [str(EXAMPLES / f"{self.name}.py"), *shlex.split(SIZES), "--resume", "auto"]
        own += ["--checkpoint", str(self.folder / "checkpoint")]
        if self.name == "train_gpt":
            own += shlex.split("--batch-size 8 --eval-windows 8 --optimizer dion --threads 1 --quiet --out")
            own.append(str(self.folder))
        else:
            own += ["--batch", "8", "--json", str(self.folder / "report.json")]
            own += ["--mesh", "fs=2,tp=2"] if self.processes == 4 else []
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.processes}"]
        return [sys.executable, *(launcher if self.processes > 1 else []), *own]

    def has_checkpoint(self) -> bool:
        """Whether the next start has something to go on from."""
        checkpoint = self.folder / "checkpoint"
        return checkpoint.is_file() or any(checkpoint.glob("step-*"))

    def steps(self) -> str:
        """What a kill finds: the names of its files, for the message of a failure."""
        return " ".join(sorted(path.name for path in self.folder.rglob("*") if path.name != "report.json"))

    def run(self, kill_after: float | None = None) -> bool:
        """Runs it for at most ``kill_after`` seconds; returns whether it ended by itself.

        Raises:
            AssertionError: if it ends with an error, or hangs.
        """
        log, token = self.folder / "log.txt", f"OXIDION_RUN={uuid.uuid4()}"
        with (
            log.open("a") as out,
            subprocess.Popen(
                self.command(),
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | dict([token.split("=")]),
            ) as process,
        ):
            try:
                status = process.wait(kill_after or PATIENCE)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                kill_all(token)
        assert not alive(token)
        if status is None:
            assert kill_after, f"it hangs: {log.read_text()[-4000:]}"
            return False
        assert status == 0, f"{self.steps()}\n{log.read_text()[-4000:]}"
        return True

    def losses(self) -> list[float]:
        """The losses of all steps that the run has reported."""
        if self.name == "train_gpt":
            (run,) = json.loads((self.folder / "figures.json").read_text())["runs"]
            losses: list[float] = run["curve"]["train_loss"]
        else:
            losses = json.loads((self.folder / "report.json").read_text())["losses"]
        return losses


def alive(token: str) -> list[int]:
    """Processes with this word in their environment: torchrun puts each rank into a session of its own."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended meanwhile, or is not ours
            if token.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def kill_all(token: str) -> None:
    """SIGKILL to every process of a run, ranks that torchrun has started too, until none is left."""
    while left := alive(token):
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def broken_run_equals_a_whole_one(folder: Path, name: str, processes: int, kills: int, seed: int) -> int:
    """Kills runs at random moments until all kills are done; returns how many left a checkpoint to resume.

    The moments are drawn over the seconds from a start to the end of an unbroken run, so that they fall into
    start-up, steps, checkpoints and the end alike.
    """
    whole = Script(name, processes, folder / "whole")
    whole.folder.mkdir()
    began = time.perf_counter()
    assert whole.run()
    seconds = time.perf_counter() - began
    expected = whole.losses()
    assert len(expected) == STEPS
    moments, resumed, number = random.Random(seed), 0, 0
    while kills > 0:
        broken = Script(name, processes, folder / f"broken{number}")
        broken.folder.mkdir()
        number += 1
        ended = False
        while kills > 0 and not ended:
            ended = broken.run(moments.uniform(0.3, 1.0) * seconds)
            kills -= not ended
            resumed += not ended and broken.has_checkpoint()
        assert ended or broken.run()
        assert broken.losses() == expected, f"seed {seed}, run {number - 1}: {broken.steps()}"
    return resumed


SCRIPTS: list[Any] = [("train_gpt", 1), ("train_fsdp2", 1), ("train_fsdp2", 4)]


@pytest.mark.parametrize(("name", "processes"), SCRIPTS[:2])
def test_example_killed_twice_and_resumed_has_the_same_losses(
    tmp_path: Path, name: str, processes: int
) -> None:
    broken_run_equals_a_whole_one(tmp_path, name, processes, kills=2, seed=1)


def test_killed_process_restarts_under_torchrun_with_same_losses(
    tmp_path: Path,
) -> None:
    options = shlex.split("--layers 2 --dim 32 --heads 2 --seq-len 32 --batch 8 --steps 10 --corpus-mb 0.4")
    expected = tmp_path / "expected.json"
    ranks = forks.common().run(EXAMPLES / "train_fsdp2.py", *options, "--json", str(expected), ranks=2)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr[-4000:]
    script, path = tmp_path / "loses_a_rank.py", tmp_path / "report.json"
    script.write_text(LOSES_A_RANK)
    command = shlex.split("-m torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=1")
    command += [str(script), *options, "--json", str(path), "--checkpoint", str(tmp_path / "checkpoint")]
    done = subprocess.run(
        [sys.executable, *command, "--save-every", "3", "--resume", "auto"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"fs=2: goes on from {tmp_path / 'checkpoint' / 'step-00000006'}\n" in done.stdout
    report = json.loads(path.read_text())
    assert report["first_step"] == 6
    assert report["losses"] == json.loads(expected.read_text())["losses"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "processes"), SCRIPTS)
def test_example_killed_at_many_moments_resumes_with_same_losses(
    tmp_path: Path, name: str, processes: int
) -> None:
    assert broken_run_equals_a_whole_one(tmp_path, name, processes, KILLS, seed=2) > KILLS // 3
