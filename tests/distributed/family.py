"""What ranks do with NorMuon, Dion2 and NorDion2."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import oxidion
from support.cases import Case, Group
from support.inputs import gaussian, gradients
from support.layouts import setting_named
from support.sim_mesh import SimMesh, layouts_for

from . import jobs

STEPS = 4


def wrapped_model(kind: str, name: str, keys: dict[str, Any], named: bool) -> float:
    """Largest distance of a wrapped model from one that one process trains."""
    network = jobs.model()
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh: Any = dist.group.WORLD
    trained: nn.Module = network
    if kind == "ddp":
        trained = DistributedDataParallel(network)
    elif kind == "hsdp":
        whole = jobs.mesh_of({"dp": 2, "fs": world // 2})
        fully_shard(network, mesh=whole)
        mesh = whole["fs"]
    else:
        mesh = jobs.mesh_of({"fs": world})
        side = int(kind == "columns")
        fully_shard(network, mesh=mesh, shard_placement_fn=lambda p: Shard(side if p.ndim > 1 else 0))
    own = {"distributed_mesh": mesh} if named else {}
    jobs.train(trained, jobs.optimizer_of(network, name, **keys, **own), STEPS, (rank, world))
    return jobs.distance(network, name, STEPS, **keys)


def local_steps(cls_name: str, setting_name: str, kwargs: dict[str, Any]) -> float:
    """Largest difference of steps on DTensors from those of all ranks simulated in this one process."""
    cls, setting = getattr(oxidion, cls_name), setting_named(setting_name)
    settings = {"orth_dtype": "float64", "selection_scope": "local", "fraction": 0.4, **kwargs}
    case = Case("", cls, cls._ALGORITHM, settings, (Group(((12, 8), (8, 12), (17, 5), (2, 7), (3, 6, 4))),))
    simulated = SimMesh(setting.axes, case.build, layouts_for(case, setting.place), extra=setting.extra)
    full = [p.detach() for p in case.parameters()]
    simulated.build(full)
    mesh, dims = jobs.mesh_of(setting.axes), list(setting.axes)
    layouts = [setting.place(shape) for shape in case.shapes]
    params = [
        nn.Parameter(jobs.placed(p, mesh, layout, dims)) for p, layout in zip(full, layouts, strict=True)
    ]
    optimizer = case.build(params)
    for grads in gradients(case.shapes, 3, 0):
        for param, grad, layout in zip(params, grads, layouts, strict=True):
            param.grad = jobs.placed(grad, mesh, layout, dims)
        optimizer.step()
        simulated.step(lambda _, g=grads: g)  # type: ignore[misc]
    own = simulated.ranks[dist.get_rank()]
    worst = 0.0
    for param, twin in zip(params, own.params, strict=True):
        pairs = [(param.detach(), twin.detach())]
        pairs += [(value, own.optimizer.state[twin][key]) for key, value in optimizer.state[param].items()]
        for mine, other in pairs:
            part = mine.to_local() if isinstance(mine, DTensor) else mine
            assert part.shape == other.shape
            if part.numel():
                worst = max(worst, float((part - other).abs().max()))
    return worst


def verified(cls_name: str, kwargs: dict[str, Any]) -> tuple[float | None, float | None]:
    """What ``verify`` says of a sharded matrix and of one that every rank has whole."""
    mesh = jobs.mesh_of({"fs": dist.get_world_size()})
    params = [
        nn.Parameter(jobs.placed(gaussian((12, 8), i).float(), mesh, {"fs": layout}, ["fs"]))
        for i, layout in enumerate((("S", 0), ("R", 0)))
    ]
    cls = getattr(oxidion, cls_name)
    orth = {"orth_dtype": "float32"} if "orth_dtype" in cls._SCHEMA else {}
    optimizer = cls(params, **orth, **kwargs)
    for param in params:
        param.grad = torch.ones_like(param) + param.detach()
    first, second = (row["update_error"] for row in optimizer.verify())
    return first, second
