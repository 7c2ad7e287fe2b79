"""Processes that stay up and run functions as the ranks of a process group."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TESTS = Path(__file__).resolve().parents[1]
PATIENCE = 150.0
"""Seconds that a job may take before its processes are taken to hang."""


def _serve(rank: int, world: int, store: str, pipe: Connection, backend: str) -> None:
    """Runs jobs until told to stop."""
    sys.path.insert(0, str(TESTS))
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


class Workers:
    """A process group of its own processes."""

    def __init__(self, world: int, store: str, backend: str = "gloo") -> None:
        context = mp.get_context("spawn")
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank in range(world):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, store, theirs, backend), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, job: Any, *args: object) -> list[Any]:
        """Calls a module-level function on every rank; returns the answers in the order of the ranks.

        Raises:
            AssertionError: with the traceback of every rank that failed, or when a rank hangs.
        """
        for pipe in self.pipes:
            pipe.send((job.__module__, job.__name__, args))
        failures, answers = [], []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(PATIENCE):
                self.kill()
                raise AssertionError(f"rank {rank} hangs in {job.__name__}{args}; others: {failures}")
            failure, answer = pipe.recv()
            answers.append(answer)
            if failure is not None:
                failures.append(f"--- rank {rank}\n{failure}")
        assert not failures, "\n".join(failures)
        return answers

    def kill(self) -> None:
        """Ends the processes at once."""
        for process in self.processes:
            process.kill()

    def stop(self) -> None:
        """Ends the processes in order."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self.processes:
            process.join(20)
        self.kill()


@contextmanager
def workers(world: int, backend: str = "gloo") -> Iterator[Workers]:
    """Processes for the length of a block."""
    with tempfile.TemporaryDirectory() as folder:
        group = Workers(world, f"{folder}/store", backend)
        try:
            yield group
        finally:
            group.stop()
