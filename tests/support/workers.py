"""Processes that are kept alive and run functions as the ranks of a process group."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .versions import IS_OLD_TORCH

REFUSALS = (
    "_StridedShard requires even sharding",
    "FSDP+TP sharding does not support uneven sharding",
    "plus negative padding",
    "assert all_reduce_event is not None",
)
"""What torch up to 2.9 says where it cannot work: uneven shards of FSDP2 over tensor parallelism, shards
without elements, and FSDP2 with copies on a CPU."""

TESTS = Path(__file__).resolve().parents[1]
PATIENCE = 150.0
"""Seconds that a job may take before its processes are taken to hang."""
GRACE = 30.0
"""Seconds that the other ranks of a job have once one has failed: they may wait for it in a collective."""
SIZES = (2, 4, 8)
"""Ranks of the groups of a pool."""


def _serve(rank: int, world: int, store: str, pipe: Connection, backend: str) -> None:
    """Runs jobs until it receives a request to stop."""
    torch.set_num_threads(1)
    if os.environ.get("OXIDION_TEST_DEVICE") == "emulated":
        from oxidion._cuda import device

        device.prepare(emulated=True)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    while True:
        job = pipe.recv()
        if job is None:
            break
        module, name, args = job
        try:
            answer = getattr(importlib.import_module(module), name)(*args)
            pipe.send((None, answer))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
    dist.barrier()
    dist.destroy_process_group()


def _context() -> Any:
    """Processes are forked from one that has imported what all of them need, which takes seconds."""
    context: Any = mp.get_context("forkserver")
    jobs = (path.stem for path in sorted((TESTS / "distributed").glob("*.py")))
    context.set_forkserver_preload(
        ["support.workers", *(f"distributed.{name}" for name in jobs if not name.startswith("test_"))]
    )
    # Python 3.11 does not tell that process where modules are.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


class Workers:
    """A process group of its own processes."""

    def __init__(self, world: int, store: str, backend: str = "gloo") -> None:
        context = _context()
        self.patience = PATIENCE
        self.grace = GRACE
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank in range(world):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, store, theirs, backend), daemon=True)
            process.start()
            theirs.close()  # the end of the process is the end of the pipe
            self.pipes.append(mine)
            self.processes.append(process)

    @property
    def alive(self) -> bool:
        """Whether all ranks can take a job."""
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def run(self, job: Any, *args: object) -> list[Any]:
        """Calls a module-level function on every rank; returns the answers in the order of the ranks.

        Raises:
            AssertionError: with the traceback of every rank that failed, or when a rank ends or hangs.
        """
        what = f"{job.__module__}.{job.__name__}{args}"
        for pipe in self.pipes:
            pipe.send((job.__module__, job.__name__, args))
        failures: dict[int, str] = {}
        answers: dict[int, Any] = {}
        end = time.monotonic() + self.patience
        while len(answers) + len(failures) < len(self.pipes):
            waiting = {r: p for r, p in enumerate(self.pipes) if r not in answers and r not in failures}
            ready = wait(list(waiting.values()), max(0.0, end - time.monotonic()))
            if not ready:
                self._give_up(f"the ranks {list(waiting)} hang in {what}", failures)
            for rank, pipe in waiting.items():
                if pipe not in ready:
                    continue
                try:
                    failure, answer = pipe.recv()
                except (EOFError, ConnectionError):
                    self.processes[rank].join(5)
                    code = self.processes[rank].exitcode
                    self._give_up(f"rank {rank} ended with exit code {code} in {what}", failures)
                if failure is None:
                    answers[rank] = answer
                else:
                    failures[rank] = failure
                    grace = 1.0 if _refused({rank: failure}) else self.grace
                    end = min(end, time.monotonic() + grace)
        _skip_if_refused(failures)
        assert not failures, _by_rank(failures)
        return [answers[rank] for rank in range(len(self.pipes))]

    def _give_up(self, reason: str, failures: Mapping[int, str]) -> None:
        """Ends the group, which no test can use any more.

        Raises:
            AssertionError: always, with the reason and the test.
        """
        self.kill()
        _skip_if_refused(failures)
        test = os.environ.get("PYTEST_CURRENT_TEST", "no test")
        raise AssertionError(f"{reason}, called by {test}\n{_by_rank(failures)}")

    def kill(self) -> None:
        """Ends the processes at once."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(20)

    def stop(self) -> None:
        """Ends the processes in order."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self.processes:
            process.join(20)
        self.kill()


def _by_rank(failures: Mapping[int, str]) -> str:
    return "\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(failures.items()))


def _refused(failures: Mapping[int, str]) -> str:
    """What torch itself, of an old version, refused to do in these tracebacks, if anything."""
    ends = ["\n".join(text.rstrip().splitlines()[-4:]) for text in failures.values()]
    found = [refusal for refusal in REFUSALS if any(refusal in end for end in ends)]
    return found[0] if IS_OLD_TORCH and found else ""


def _skip_if_refused(failures: Mapping[int, str]) -> None:
    if refusal := _refused(failures):
        pytest.skip(f"torch {torch.__version__}: {refusal}")


@contextmanager
def workers(world: int, backend: str = "gloo") -> Iterator[Workers]:
    """Processes for the length of a block."""
    with tempfile.TemporaryDirectory() as folder:
        group = Workers(world, f"{folder}/store", backend)
        try:
            yield group
        finally:
            group.stop()


class Pool(Mapping[int, Workers]):
    """Process groups that all tests share, by their number of ranks; each is started when first asked for.

    A group that lost a rank is restarted for the next test that asks.
    """

    def __init__(self) -> None:
        self._groups: dict[int, Workers] = {}
        self._open = ExitStack()

    def __getitem__(self, world: int) -> Workers:
        if world not in SIZES:
            raise KeyError(world)
        group = self._groups.get(world)
        if group is None or not group.alive:
            group = self._groups[world] = self._open.enter_context(workers(world))
        return group

    def __iter__(self) -> Iterator[int]:
        return iter(SIZES)

    def __len__(self) -> int:
        return len(SIZES)

    def stop(self) -> None:
        """Ends all processes in order."""
        self._open.close()
        self._groups.clear()
