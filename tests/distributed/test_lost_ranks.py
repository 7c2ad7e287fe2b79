"""Ranks that end or are interrupted within a step: what the others say and refuse to save."""

from __future__ import annotations

import pytest

from support import forks

SCRIPT = """
import datetime, os, signal, sys, threading
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import oxidion

kind, name = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))
rank = dist.get_rank()
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
print(f"rank {rank}: {said}", flush=True)
if kind == "interrupt":
    optimizer._comms = own if rank == 1 else optimizer._comms
    step()
    print(f"rank {rank}: went on with step {optimizer.param_groups[0]['step']}", flush=True)
os._exit(0 if kind == "interrupt" else 1)  # a rank that has said what is asked for waits for no other
"""


def printed(kind: str, name: str) -> list[str]:
    ended = forks.common().run(SCRIPT, kind, name, ranks=2, limit=120)
    lines = [line for rank in ended for line in rank.stdout.splitlines() if line.startswith("rank ")]
    assert lines, "".join(rank.stderr for rank in ended)[-2000:]
    return lines


@pytest.mark.parametrize("name", ["Muon", "Lamb"])
@pytest.mark.parametrize("kind", ["ends", "stops"])
def test_rank_that_is_lost_within_a_step_poisons_the_others(kind: str, name: str) -> None:
    said = printed(kind, name)[0]
    assert said.startswith("rank 0: PoisonedOptimizer: step 4 failed half way (")
    step, saved = said.split(" | ")
    assert "parameters and states are half new" in step
    assert "Load a checkpoint" in step
    assert saved.startswith("PoisonedOptimizer: step 4 failed half way")


def test_interrupt_on_one_rank_comes_after_the_step_of_all() -> None:
    assert printed("interrupt", "Muon") == [
        "rank 0: done | saved",
        "rank 0: went on with step 5",
        "rank 1: KeyboardInterrupt:  | saved",
        "rank 1: went on with step 5",
    ]
