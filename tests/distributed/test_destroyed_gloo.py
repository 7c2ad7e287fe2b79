"""Process groups that are destroyed and recreated, with an optimizer that has read the old ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import forks

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
import oxidion

kind, name, folder = sys.argv[1:]
torch.set_num_threads(1)

def begin(use):
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/{use}", rank=rank, world_size=ranks)

begin("first")
world = dist.get_world_size()
torch.manual_seed(0)
start = torch.randn(16, 8)

def mesh_of_now():
    return init_device_mesh("cpu", (1, world), mesh_dim_names=("a", "b"))["b"]

def made(param):
    if kind == "dtensor":
        return getattr(oxidion, name)([param]), None
    mesh = dist.new_group(list(range(world))) if kind == "subgroup" else mesh_of_now()
    return getattr(oxidion, name)([param], distributed_mesh=mesh), mesh

def sharded(own):
    return nn.Parameter(DTensor.from_local(own, mesh_of_now(), [Shard(0)]))

def step(param, optimizer):
    grad = torch.ones(16, 8) * optimizer.param_groups[0]["step"]
    param.grad = distribute_tensor(grad, param.device_mesh, [Shard(0)]) if kind == "dtensor" else grad
    optimizer.step()

def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

param = nn.Parameter(start.clone())
if kind == "dtensor":
    param = sharded(start.chunk(world)[dist.get_rank()].clone())
optimizer, group = made(param)
for _ in range(2):
    step(param, optimizer)
before = local(param.detach()).clone()
if kind == "subgroup":
    dist.destroy_process_group(group)
else:
    dist.destroy_process_group()
    begin("second")
for _ in range(2):
    try:
        step(param, optimizer)
        said = "done"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print("SAID", said, flush=True)
if world > 1:
    assert torch.equal(local(param.detach()), before)
    assert optimizer.param_groups[0]["step"] == 2
if kind == "dtensor":
    param = sharded(param.to_local().detach())
new, _ = made(param)
new.load_state_dict(optimizer.state_dict())
for _ in range(2):
    step(param, new)
if kind == "dtensor":
    states = [value for value in new.state[param].values() if isinstance(value, DTensor)]
    assert states
    for state in states:
        assert state.device_mesh is param.device_mesh
        state.full_tensor()
new.synchronize_for_checkpoint()
reference = nn.Parameter(start.clone())
alone = getattr(oxidion, name)([reference])
for _ in range(6 if world == 1 else 4):
    reference.grad = torch.ones(16, 8) * alone.param_groups[0]["step"]
    alone.step()
own = param.full_tensor() if kind == "dtensor" else param
print("NEAR", torch.allclose(own, reference, rtol=1e-5, atol=1e-6), flush=True)
dist.barrier()
"""


def printed(kind: str, name: str, folder: Path, ranks: int) -> list[list[str]]:
    ended = forks.common().run(SCRIPT, kind, name, str(folder), ranks=ranks, limit=120)
    assert all(rank.returncode == 0 for rank in ended), "".join(rank.stderr for rank in ended)[-2000:]
    return [[line for line in rank.stdout.splitlines() if line[:4] in ("SAID", "NEAR")] for rank in ended]


@pytest.mark.parametrize("name", ["Muon", "AdamW"])
@pytest.mark.parametrize("kind", ["mesh", "subgroup", "dtensor"])
def test_destroyed_groups_are_refused_and_new_ones_work(kind: str, name: str, tmp_path: Path) -> None:
    for lines in printed(kind, name, tmp_path, 2):
        *refused, near = lines
        for line in refused:
            assert line.startswith(
                "SAID RuntimeError: the optimizer needs the process group of the ranks [0, 1]"
            )
            assert ("distributed_mesh" in line) == (kind != "dtensor")
            assert "init_device_mesh" in line
            assert "load_state_dict(old.state_dict())" in line
        assert len(refused) == 2
        assert near == "NEAR True"


@pytest.mark.parametrize("kind", ["mesh", "subgroup", "dtensor"])
def test_one_rank_needs_no_group_and_steps_on(kind: str, tmp_path: Path) -> None:
    assert printed(kind, "Muon", tmp_path, 1) == [["SAID done", "SAID done", "NEAR True"]]
