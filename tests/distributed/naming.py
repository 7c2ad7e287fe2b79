"""What ranks do in the tests of names of parameters, and of the one name that the mesh has on every class."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import oxidion
from support.inputs import gaussian, gradients

from .agreeing import two_errors
from .jobs import mesh_of, placed, whole

SHAPES = ((44, 12), (48, 44), (12, 44))
ALIKE = ((24, 12), (24, 12), (12, 20))


def one_by_one(name: str, keys: dict[str, Any]) -> float:
    """Compares one optimizer per sharded parameter with one optimizer for all of one process.

    Returns:
        The largest difference, relative to the way of the parameter.
    """
    cls = getattr(oxidion, name)
    mesh = mesh_of({"fs": dist.get_world_size()})
    full = [gaussian(shape, i) for i, shape in enumerate(SHAPES)]
    single = {f"{i}.weight": nn.Parameter(p.clone()) for i, p in enumerate(full)}
    sharded = {
        f"module.{i}.weight": nn.Parameter(placed(p.clone(), mesh, {"fs": ("S", 0)}, ["fs"]))
        for i, p in enumerate(full)
    }
    reference = cls(list(single.items()), lr=0.01, **keys)
    optimizers = [cls([item], lr=0.01, **keys) for item in sharded.items()]
    for grads in gradients(SHAPES, 4, 0):
        for param, one, grad in zip(sharded.values(), single.values(), grads, strict=True):
            param.grad, one.grad = placed(grad.clone(), mesh, {"fs": ("S", 0)}, ["fs"]), grad
        for optimizer in (reference, *optimizers):
            optimizer.step()
    pairs = zip(sharded.values(), single.values(), full, strict=True)
    return max(float((whole(a) - b).norm() / (b - c).norm()) for a, b, c in pairs)


def copies(name: str, keys: dict[str, Any], how: str) -> tuple[float, bool]:
    """Compares steps on replicas with ``distributed_mesh`` with those of one process.

    Returns:
        The largest difference, and whether the plan shares the work: whether it has transfers.
    """
    cls, mesh = getattr(oxidion, name), mesh_of({"dp": dist.get_world_size()})
    given: Any = mesh.get_group() if how == "group" else mesh
    full = [gaussian(shape, i) for i, shape in enumerate(ALIKE)]
    both = [[nn.Parameter(p.clone()) for p in full] for _ in range(2)]
    optimizer = cls(both[0], lr=0.01, distributed_mesh=given, **keys)
    reference = cls(both[1], lr=0.01, **keys)
    for grads in gradients(ALIKE, 3, 0):
        for param, one, grad in zip(*both, grads, strict=True):
            param.grad, one.grad = grad.clone(), grad
        optimizer.step()
        reference.step()
    pairs = zip(*both, full, strict=True)
    far = max(float((a - b).norm() / (b - c).norm()) for a, b, c in pairs)
    return far, bool(optimizer.plan().transfers)


def copies_that_differ(name: str, keys: dict[str, Any]) -> tuple[str, str]:
    """What the first step says of parameters that the ranks have made on their own."""
    random = torch.Generator().manual_seed(dist.get_rank())
    param = nn.Parameter(torch.randn(16, 16, generator=random))
    param.grad = torch.ones(16, 16)
    optimizer = getattr(oxidion, name)([("w", param)], lr=0.01, distributed_mesh=dist.group.WORLD, **keys)
    return two_errors(optimizer.step)


def two_words() -> tuple[list[bool], tuple[str, str]]:
    """``replicate_mesh`` and ``distributed_mesh`` of Dion: the same, and with other ranks."""
    plane = mesh_of({"dp": 2, "fs": 2})
    dp, fs = plane["dp"], plane["fs"]
    weight = nn.Parameter(torch.ones(8, 8))
    same = oxidion.Dion([weight], replicate_mesh=dp, distributed_mesh=dp.get_group())
    averaged = oxidion.Dion([weight], distributed_mesh=dp)
    one = oxidion.Dion([weight], replicate_mesh=dp, replicate_mesh_grad_sync=False)
    pending = [bool(optimizer._meshes.pending) for optimizer in (same, averaged, one)]
    return pending, two_errors(lambda: oxidion.Dion([weight], replicate_mesh=dp, distributed_mesh=fs))
