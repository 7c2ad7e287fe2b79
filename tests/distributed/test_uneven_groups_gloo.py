"""Ranks that are in different numbers of process groups agree on their steps all the same."""

from __future__ import annotations

from pathlib import Path

from support import forks

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
import oxidion

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=ranks)
dist.new_group([0, 1])
mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
param = torch.nn.Parameter(torch.ones(8, 8))
param.grad = torch.ones(8, 8)
optimizer = oxidion.Muon([param], distributed_mesh=mesh)
optimizer.step()
assert not (param == 1).any()
dist.destroy_process_group()
"""


def test_ranks_of_different_numbers_of_groups_take_a_step(tmp_path: Path) -> None:
    for ended in forks.common().run(SCRIPT, str(tmp_path), ranks=3, limit=60):
        assert ended.returncode == 0, ended.stderr
