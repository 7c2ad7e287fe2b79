"""Gloo processes, and a model of matrices that they share by ``fully_shard``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Stack(nn.Module):
    """Matrices that belong together: only their shapes matter."""

    def __init__(self, shapes: Iterable[tuple[int, int]]) -> None:
        """Makes the matrices."""
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes)


def stack(shapes: Iterable[tuple[int, int]], mesh: DeviceMesh) -> Stack:
    """The model, sharded, with gradients."""
    torch.manual_seed(0)
    model = Stack(shapes)
    fully_shard(model, mesh=mesh)
    for param in model.parameters():
        assert isinstance(param, DTensor)
        own = torch.randn(param.to_local().shape)
        sizes = {"shape": param.shape, "stride": param.stride()}
        param.grad = DTensor.from_local(own, mesh, param.placements, run_check=False, **sizes)
    return model


Work = Callable[[DeviceMesh, Any], Any]


def on_ranks(world: int, work: Work, options: Any) -> Any:
    """Runs ``work`` on ``world`` processes of one thread each; returns the result of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_serve, args=(world, folder, work, options), nprocs=world)
        return json.loads(Path(folder, "found").read_text(encoding="utf-8"))


def _serve(rank: int, world: int, folder: str, work: Work, options: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = work(init_device_mesh("cpu", (world,), mesh_dim_names=("fs",)), options)
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
