"""What the ranks do in the tests of averages of the weights."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from . import jobs

STEPS = 4


def steps(name: str, keys: dict[str, Any]) -> float:
    """Largest distance of weights and of their averages from those of a model that one process trains."""
    world = dist.get_world_size()
    networks = [jobs.model(), jobs.model()]
    fully_shard(networks[0], mesh=jobs.mesh_of({"dp": 2, "fs": world // 2}))
    optimizers = [jobs.optimizer_of(network, name, **keys) for network in networks]
    jobs.train(networks[0], optimizers[0], STEPS, (dist.get_rank(), world))
    jobs.train(networks[1], optimizers[1], STEPS)
    errors = [furthest(networks)]
    with optimizers[0].averaged(), optimizers[1].averaged():
        errors.append(furthest(networks))
    return max(errors)


def furthest(networks: list[Any]) -> float:
    """Largest distance of the weights of one model from those of the other."""
    trained, expected = ([jobs.whole(param) for param in network.parameters()] for network in networks)
    return jobs.furthest(trained, expected)
