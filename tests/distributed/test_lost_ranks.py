"""Ranks that end or are interrupted within a step: what the others say and refuse to save."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import datetime, os, signal, sys, threading
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import oxidion

def rank_of(rank, store, kind, name):
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=5)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2, timeout=patience)
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.ones(16, 8), mesh, [Shard(0)]))
    optimizer = getattr(oxidion, name)([param])
    def step():
        param.grad = distribute_tensor(torch.randn(16, 8), mesh, [Shard(0)], src_data_rank=None)
        optimizer.step()
    for _ in range(3):
        step()
    if rank == 1 and kind == "ends":
        optimizer._comms = tuple((lambda: os._exit(0)) for _ in optimizer._comms)
    if rank == 1 and kind == "stops":
        optimizer._comms = tuple((lambda: threading.Event().wait(60)) for _ in optimizer._comms)
    if kind == "interrupt" and rank == 1:
        own = optimizer._comms
        def late(start):
            return lambda: (os.kill(os.getpid(), signal.SIGINT), start())[1]
        optimizer._comms = tuple(map(late, own))
    try:
        step()
        said = "done"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    try:
        optimizer.state_dict()
        said += " | saved"
    except BaseException as error:
        said += f" | {type(error).__name__}: {error}"
    tell = open(f"{store}-told-{rank}", "w")
    print(f"rank {rank}: {said}", file=tell, flush=True)
    if kind == "interrupt":
        optimizer._comms = own if rank == 1 else optimizer._comms
        step()
        print(f"rank {rank}: went on with step {optimizer.param_groups[0]['step']}", file=tell, flush=True)
    os._exit(0)

if __name__ == "__main__":
    context = mp.get_context("spawn")
    ranks = [context.Process(target=rank_of, args=(r, *sys.argv[1:])) for r in range(2)]
    [rank.start() for rank in ranks]
    ranks[0].join(60)
    if sys.argv[2] == "interrupt":
        ranks[1].join(60)
    [rank.kill() for rank in ranks]
"""


def told(tmp_path: Path, kind: str, name: str) -> list[str]:
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "store"), kind, name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for path in sorted(tmp_path.glob("store-told-*")) for line in path.read_text().splitlines()]
    assert lines, ended.stderr[-2000:]
    return lines


@pytest.mark.parametrize("name", ["Muon", "Lamb"])
@pytest.mark.parametrize("kind", ["ends", "stops"])
def test_rank_that_is_lost_within_a_step_poisons_the_others(tmp_path: Path, kind: str, name: str) -> None:
    said = told(tmp_path, kind, name)[0]
    assert said.startswith("rank 0: PoisonedOptimizer: step 4 failed half way (")
    step, saved = said.split(" | ")
    assert "parameters and states are half new" in step
    assert "Load a checkpoint" in step
    assert saved.startswith("PoisonedOptimizer: step 4 failed half way")


def test_interrupt_on_one_rank_comes_after_the_step_of_all(tmp_path: Path) -> None:
    assert told(tmp_path, "interrupt", "Muon") == [
        "rank 0: done | saved",
        "rank 0: went on with step 5",
        "rank 1: KeyboardInterrupt:  | saved",
        "rank 1: went on with step 5",
    ]
