"""Models wrapped as users wrap them, trained by the ranks of a process group, compared with one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import oxidion

from . import jobs

STEPS = 4


def _dim_one(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 else None


def _other_dim(param: nn.Parameter) -> Shard | None:
    """The dimension that tensor parallelism leaves."""
    if param.ndim < 2 or not isinstance(param, DTensor):
        return None
    return Shard(1) if any(p.is_shard(0) for p in param.placements) else Shard(0)


def fsdp(name: str, named: bool, dim: int) -> float:
    """FSDP2 over one axis."""
    mesh = jobs.mesh_of({"fs": dist.get_world_size()})
    network = jobs.placed_model()
    fully_shard(network, mesh=mesh, shard_placement_fn=_dim_one if dim else None)
    keys: dict[str, Any] = {}
    if named and name == "Muon":
        keys = {"distributed_mesh": mesh}
    optimizer = jobs.optimizer_of(network, name, **keys)
    jobs.train(network, optimizer, STEPS, (dist.get_rank(), dist.get_world_size()))
    return jobs.distance(network, name, STEPS)


def ddp(name: str, compressed: bool) -> float:
    """``DistributedDataParallel``; compressed: under ``no_sync``."""
    network = jobs.placed_model()
    wrapped = DistributedDataParallel(network)
    group = dist.group.WORLD
    keys: dict[str, Any] = {}
    if name == "Muon":
        keys = {"distributed_mesh": wrapped.process_group}
    if name == "Dion":
        keys = {"replicate_mesh": group, "replicate_mesh_grad_sync": compressed}
    optimizer = jobs.optimizer_of(network, name, **keys)
    share = (dist.get_rank(), dist.get_world_size())
    if compressed:
        with wrapped.no_sync():
            jobs.train(wrapped, optimizer, STEPS, share)
    else:
        jobs.train(wrapped, optimizer, STEPS, share)
    same = [torch.zeros_like(p) for p in network.parameters()]
    for copy, param in zip(same, network.parameters(), strict=True):
        copy.copy_(param.detach())
        dist.broadcast(copy, 0)
        assert torch.equal(copy, param.detach()), "replicas differ"
    return jobs.distance(network, name, STEPS)


def hsdp(name: str, compressed: bool) -> float:
    """HSDP on 2 × n: mode 1 shards over the inner axis only, mode 2 over both."""
    mesh = jobs.mesh_of({"dp": 2, "fs": dist.get_world_size() // 2})
    network = jobs.placed_model()
    fully_shard(network, mesh=mesh["fs"] if compressed else mesh)
    keys: dict[str, Any] = {}
    if name == "Dion":
        keys = {"replicate_mesh": mesh["dp"], "replicate_mesh_grad_sync": compressed}
    optimizer = jobs.optimizer_of(network, name, **keys)
    jobs.train(network, optimizer, STEPS, (dist.get_rank(), dist.get_world_size()))
    optimizer.synchronize_for_checkpoint()
    return jobs.distance(network, name, STEPS)


def plane(name: str, axes: dict[str, int], strided: bool, compressed: bool) -> float:
    """FSDP2 and tensor parallelism, with a replica axis in front where ``axes`` has one."""
    mesh = jobs.mesh_of(axes)
    network = jobs.placed_model()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(network, mesh["tp"], plan)
    data = ("dp", "fs") if "dp" in axes and not compressed else ("fs",)
    for layer in (network[0], network[2], network):
        fully_shard(layer, mesh=mesh[data], shard_placement_fn=None if strided else _other_dim)
    keys: dict[str, Any] = {}
    if name == "Dion" and "dp" in axes:
        keys = {"replicate_mesh": mesh["dp"], "replicate_mesh_grad_sync": compressed}
    optimizer = jobs.optimizer_of(network, name, **keys)
    count = axes.get("dp", 1) * axes["fs"]
    place = mesh.get_local_rank("fs") + (mesh.get_local_rank("dp") * axes["fs"] if "dp" in axes else 0)
    jobs.train(network, optimizer, STEPS, (place, count))
    return jobs.distance(network, name, STEPS)


def flattened(name: str) -> float:
    """FSDP2 over a mesh of two flattened axes."""
    mesh = jobs.new_mesh({"dp": 2, "cp": dist.get_world_size() // 2})
    both = mesh["dp", "cp"]._flatten("dp_cp")
    network = jobs.placed_model()
    fully_shard(network, mesh=both)
    optimizer = jobs.optimizer_of(network, name, **({"distributed_mesh": both} if name == "Muon" else {}))
    jobs.train(network, optimizer, STEPS, (dist.get_rank(), dist.get_world_size()))
    return jobs.distance(network, name, STEPS)


def rebuilt_mesh(name: str) -> float:
    """Meshes are compared by their ranks: the optimizer gets another object than the model."""
    world = dist.get_world_size()
    network = jobs.placed_model()
    fully_shard(network, mesh=jobs.mesh_of({"fs": world}))
    again = jobs.new_mesh({"fs": world})
    keys = {"distributed_mesh": again} if name == "Muon" else {}
    optimizer = jobs.optimizer_of(network, name, **keys)
    jobs.train(network, optimizer, STEPS, (dist.get_rank(), world))
    return jobs.distance(network, name, STEPS)


def tensor_parallel(name: str) -> float:
    """Tensor parallelism alone."""
    mesh = jobs.mesh_of({"tp": dist.get_world_size()})
    network = jobs.placed_model()
    parallelize_module(network, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    keys: dict[str, Any] = {"distributed_mesh": mesh} if name == "Muon" else {}
    optimizer = jobs.optimizer_of(network, name, **keys)
    jobs.train(network, optimizer, STEPS)
    return jobs.distance(network, name, STEPS)


def fsdp1(made_first: bool) -> str:
    """The error of Muon over parameters of FSDP1, made before or after it."""
    network: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))

    def made() -> oxidion.Muon:
        return oxidion.Muon(oxidion.param_groups(network, algorithm="muon", lr=0.02))

    optimizer = made() if made_first else None
    network = FullyShardedDataParallel(network, use_orig_params=True, device_id=torch.device("cpu"))
    try:
        optimizer = optimizer or made()
        network(torch.randn(8, 32)).square().sum().backward()
        optimizer.step()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
