"""Scripts in forks of one process that has imported what they need, which takes seconds.

``Forks`` is what tests call. This file is also the program of the process that is forked: it reads a line
of JSON for each job, forks a process for each rank, and answers with their exit statuses. A fork ends as a
process of its own does, with all that an interpreter does then.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

LIMIT = 240.0
"""Seconds that a script may take."""
GRACE = 5.0
"""Seconds that the other ranks have once one has failed: they may wait for it for ever."""


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, or minus the signal that ended it, and what it said."""

    returncode: int
    stdout: str
    stderr: str


class Forks:
    """A process to fork, started when it is first needed, and what runs in its forks."""

    def __init__(self, *modules: str, environment: Mapping[str, str] | None = None) -> None:
        self.modules = modules
        self.environment = dict(os.environ if environment is None else environment)
        self._server: subprocess.Popen[str] | None = None

    def run(
        self,
        script: str | Path,
        *arguments: str,
        ranks: int = 0,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        limit: float = LIMIT,
    ) -> list[Ended]:
        """Runs a script, by its path or its text, as the only program of a process.

        Args:
            script: a path, or code.
            arguments: of the script.
            ranks: how many processes, with the variables that torchrun sets; 0 is one process without these.
            folder: where it runs.
            environment: variables in addition to those of the process that is forked.
            limit: seconds after which what still runs is killed.
        """
        with tempfile.TemporaryDirectory() as own:
            path = script if isinstance(script, Path) else Path(own, "script.py")
            if isinstance(script, str):
                path.write_text(script)
            job = {
                "script": str(path),
                "arguments": arguments,
                "ranks": ranks,
                "folder": str(folder or Path.cwd()),
                "environment": dict(environment or {}),
                "limit": limit,
                "logs": own,
            }
            statuses = self._ask(job)
            said = [
                [Path(own, f"{rank}.{stream}").read_text(errors="replace") for stream in ("out", "err")]
                for rank in range(len(statuses))
            ]
        return [Ended(code, out, err) for code, (out, err) in zip(statuses, said, strict=True)]

    def _ask(self, job: Mapping[str, Any]) -> list[int]:
        if self._server is None:
            pipe = subprocess.PIPE
            self._server = subprocess.Popen(
                [sys.executable, __file__, *self.modules],
                env=self.environment,
                stdin=pipe,
                stdout=pipe,
                text=True,
                start_new_session=True,
            )
        assert self._server.stdin
        assert self._server.stdout
        try:
            self._server.stdin.write(json.dumps(job) + "\n")
            self._server.stdin.flush()
            answer = self._server.stdout.readline()
        except BaseException:
            self.stop()  # a fork hangs
            raise
        try:
            statuses: list[int] = json.loads(answer)
        except ValueError:
            self.stop()
            raise RuntimeError(f"the process that is forked has ended, or answers {answer!r}") from None
        return statuses

    def stop(self) -> None:
        """Ends the process and its forks."""
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.communicate()
            self._server = None


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
"""Variables as they were before any test."""


@cache
def common() -> Forks:
    """The process that most tests of a run share: it has imported what scripts on several ranks need."""
    parts = ("checkpoint.state_dict", "device_mesh", "fsdp", "tensor.parallel")
    modules = [*(f"torch.distributed.{part}" for part in parts), "oxidion"]
    made = Forks(*modules, environment=ENVIRONMENT)
    atexit.register(made.stop)
    return made


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _begin(job: Mapping[str, Any], rank: int, port: int) -> None:
    """Makes this fork the process of one rank."""
    streams = [(0, os.devnull), (1, f"{job['logs']}/{rank}.out"), (2, f"{job['logs']}/{rank}.err")]
    for descriptor, name in streams:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if descriptor else os.O_RDONLY
        opened = os.open(name, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.update(job["environment"])
    if ranks := job["ranks"]:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({key: str(value) for key, value in numbers.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="forks")
    # Where tests run in the background of a shell, SIGINT is ignored; programs in the foreground have this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(job["folder"])
    sys.argv = [job["script"], *job["arguments"]]


def _wait(children: Sequence[int], limit: float) -> list[int]:
    """Exit statuses of the forks, in their order; those that do not end are killed."""
    statuses: dict[int, int] = {}
    end = time.monotonic() + limit
    while len(statuses) < len(children):
        for pid in children:
            if pid not in statuses and (found := os.waitpid(pid, os.WNOHANG))[0]:
                statuses[pid] = os.waitstatus_to_exitcode(found[1])
                if statuses[pid]:
                    end = min(end, time.monotonic() + GRACE)
        if time.monotonic() > end:
            for pid in set(children) - statuses.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return [statuses[pid] for pid in children]


def _serve(answers: int) -> str:
    """The script that this fork is to run; none in the process that is forked, once there is no more."""
    for line in sys.stdin:
        job = json.loads(line)
        port, children = _free_port(), []
        for rank in range(max(job["ranks"], 1)):
            child = os.fork()
            if not child:
                _begin(job, rank, port)
                return str(job["script"])
            children.append(child)
        os.write(answers, json.dumps(_wait(children, job["limit"])).encode() + b"\n")
    return ""


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, which no script of its own would have
    own_output = os.dup(1)
    os.dup2(2, 1)  # what imports print is no answer
    for module in sys.argv[1:]:
        importlib.import_module(module)
    if chosen := _serve(own_output):
        sys.path.insert(0, str(Path(chosen).parent))
        runpy.run_path(chosen, run_name="__main__")
