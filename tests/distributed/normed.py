"""What the ranks do in the tests of Lamb, Adafactor and CAME."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import oxidion
from support.inputs import gaussian

from . import jobs

SETTINGS: dict[str, dict[str, Any]] = {
    "Lamb": {"lr": 0.01, "weight_decay": 0.1},
    "Adafactor": {},
    "CAME": {"lr": 1e-3},
}


def sharded(count: int, axes: dict[str, int], placements: list[Any]) -> list[nn.Parameter]:
    """Matrices of several shapes with gradients."""
    mesh = jobs.mesh_of(axes)
    params = []
    for index in range(count):
        shape = ((8, 6), (12, 8), (10, 6), (9, 7))[index % 4]
        param = nn.Parameter(distribute_tensor(gaussian(shape, 1, index), mesh, placements))
        param.grad = distribute_tensor(gaussian(shape, 2, index), mesh, placements)
        params.append(param)
    return params


def collectives(name: str, count: int, plane: bool = False) -> tuple[int, int]:
    """Collectives that a step on one axis or two starts, and those in its plan."""
    one = ({"fs": 4}, [Shard(0)])
    params = sharded(count, *(({"fs": 2, "tp": 2}, [Shard(0), Shard(1)]) if plane else one))
    optimizer = getattr(oxidion, name)(params, **SETTINGS.get(name, {}))
    optimizer.step()
    with CommDebugMode() as counted:
        optimizer.step()
    return counted.get_total_counts(), len(optimizer.plan().transfers)


def placements() -> tuple[str, str, str]:
    """Of the factors of a matrix whose rows and columns are cut."""
    (param,) = sharded(1, {"fs": 2, "tp": 2}, [Shard(0), Shard(1)])
    optimizer = oxidion.CAME([param], lr=1e-3)
    optimizer.step()
    state = optimizer.state[param]
    found = []
    for part in ("row", "col", "mean"):
        for moment in ("sq", "res"):
            value = state[f"exp_avg_{moment}_{part}"]
            assert isinstance(value, DTensor)
        found.append(str(value.placements))
    return found[0], found[1], found[2]


def sum_with_uneven_groups() -> float:
    """Largest difference of steps from those of one process; one rank alone has made a process group."""
    dist.new_group([0])
    return jobs.steps_on_a_layout("lamb-default", "dp2-fsdp2-tp2", torch.float64, False)
