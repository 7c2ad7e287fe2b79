"""Folders in the layout of microsoft/dion, written and read by ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import oxidion
from support import dion_folder

from . import jobs, saving


def write(folder: str, kind: str, scalar: str, side: str) -> None:
    """Writes by all ranks, each its rows."""
    mesh = jobs.mesh_of({"fs": dist.get_world_size()})

    def place(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)])

    dion_folder.write(folder, jobs.model(), kind, scalar, side, place)


def build(layout: str, kind: str, scalar: str) -> tuple[nn.Module, Any, tuple[int, int]]:
    """A model and an optimizer whose settings are others than those of the checkpoint."""
    network, _, share = saving.build(layout, "AdamW", {}, torch.float64)
    groups: list[dict[str, Any]] = [
        {"params": [(n, p) for n, p in network.named_parameters() if p.ndim == 2]},
        {"params": [(n, p) for n, p in network.named_parameters() if p.ndim == 1], "algorithm": scalar},
    ]
    return network, getattr(oxidion, kind)(groups, lr=0.5, betas=(0.3, 0.4), orth_dtype="float64"), share


def load(folder: str, layout: str, kind: str, scalar: str) -> tuple[list[Tensor], dict[str, Any], bool]:
    """Loads and takes three steps.

    Returns:
        The weights, what was there besides, and whether every tensor of a sharded parameter is read in parts.
    """
    network, optimizer, share = build(layout, kind, scalar)
    found_dtensors: list[bool] = []
    read = oxidion._dist.folders.read

    def noted(place: Any, wanted: Any) -> Any:
        found = [value for value in wanted.values() if isinstance(value, Tensor) and value.ndim]
        found_dtensors.extend(isinstance(value, DTensor) for value in found)
        return read(place, wanted)

    oxidion._dist.folders.read = noted
    try:
        extra = oxidion.checkpoint.load_dcp(folder, network, optimizer)
    finally:
        oxidion._dist.folders.read = read
    jobs.train(network, optimizer, 3, share)
    return saving.weights(network), extra, all(found_dtensors)


def there_and_back(folder: str, back: str, layout: str, kind: str, q_side: Any = None) -> None:
    """Loads, and saves what was loaded."""
    network, optimizer, _ = build(layout, kind, "adamw")
    extra = oxidion.checkpoint.load_dcp(folder, network, optimizer)
    oxidion.checkpoint.save_dcp(back, network, optimizer, extra=extra, q_side=q_side)


def counters_of_a_shard(step: int) -> list[tuple[float, float]]:
    """Counters before and after a step, of states whose part on the last rank is all zeros."""
    mesh = jobs.mesh_of({"fs": dist.get_world_size()})
    param = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    optimizer = oxidion.AdamW([param], lr=0.1, init_state=True)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["step"] = step
    moment = torch.tensor([1.0, 1.0, 0.0, 0.0])
    for key in ("exp_avg", "exp_avg_sq"):
        saved["state"][0][key] = distribute_tensor(moment, mesh, [Shard(0)])
    optimizer.load_state_dict(saved)
    counts = [float(optimizer.state[param]["step"])]
    param.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    optimizer.step()
    return [(counts[0], float(optimizer.state[param]["step"]))]


def read_whole(folder: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """What a run in one process reads that has exactly these keys."""
    dcp.load(wanted, checkpoint_id=folder, no_dist=True)
    return wanted
