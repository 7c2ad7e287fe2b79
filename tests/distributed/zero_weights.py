"""Weights of zeros on ranks that each have a part."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import oxidion
from support.inputs import gaussian

from . import jobs


def refused(name: str) -> bool:
    """Refused before anything is written; and whether steps go on once the weights are others."""
    mesh = jobs.mesh_of({"fs": dist.get_world_size()})

    def cut(value: torch.Tensor) -> torch.Tensor:
        return jobs.placed(value, mesh, {"fs": ("S", 0)}, ["fs"])

    params = [nn.Parameter(cut(own)) for own in (gaussian((8, 6), 0), torch.zeros(8, 6), gaussian((6, 8), 1))]
    named = [(f"layer{at}", param) for at, param in enumerate(params)]
    optimizer = getattr(oxidion, name)(named, lr=0.1, weight_norm="hyperball", weight_decay=0.0)
    for param in params:
        param.grad = torch.ones_like(param)
    before = [jobs.whole(param).clone() for param in params]
    with pytest.raises(ValueError, match=r"layer1: weight_norm='hyperball' .* all zero"):
        optimizer.step()
    assert all(map(torch.equal, before, map(jobs.whole, params)))
    with torch.no_grad():
        params[1].copy_(cut(gaussian((8, 6), 2)))
    optimizer.step()
    # Zeros in all that one rank has are none.
    with torch.no_grad():
        params[1]._local_tensor.fill_(float(dist.get_rank()))  # type: ignore[attr-defined]
    again = getattr(oxidion, name)(params, lr=0.1, weight_norm="hyperball", weight_decay=0.0)
    again.step()
    return all(bool(jobs.whole(param).isfinite().all()) for param in params)


def of_an_expert(is_zero: bool) -> str:
    """What each of four ranks says where pairs have experts of their own, one or two, and a weight of all."""
    rank = dist.get_rank()
    everyone = jobs.mesh_of({"fs": 4})
    pair = jobs.mesh_of({"ep": 2, "efs": 2})["efs"]
    dense = jobs.placed(gaussian((8, 6), 0), everyone, {"fs": ("S", 0)}, ["fs"])
    count = 1 + rank // 2
    values = [gaussian((8, 6), 10 * rank // 2 + at) for at in range(count)]
    if is_zero and rank < 2:
        values[0].zero_()
    experts = [distribute_tensor(value, pair, [Shard(0)]) for value in values]
    params = [nn.Parameter(own) for own in (dense, *experts)]
    optimizer = oxidion.AdamW(params, lr=0.1, weight_norm="hyperball", weight_decay=0.0)
    for param in params:
        param.grad = torch.ones_like(param)
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return ""


def again(init_state: bool) -> list[str]:
    """What steps say, one after the other."""
    mesh = jobs.mesh_of({"fs": dist.get_world_size()})
    param = nn.Parameter(jobs.placed(torch.zeros(8, 6), mesh, {"fs": ("S", 0)}, ["fs"]))
    optimizer = oxidion.AdamW(
        [param], lr=0.1, weight_norm="hyperball", weight_decay=0.0, init_state=init_state
    )
    said = []
    for _ in range(2):
        param.grad = torch.ones_like(param)
        try:
            optimizer.step()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
