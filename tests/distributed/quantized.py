"""8-bit states on the ranks of a gloo process group."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import oxidion
from oxidion._dist.comm import in_bytes
from oxidion.functional import dequantize_blockwise
from support.inputs import gaussian

from . import jobs

SHAPES = {"a": (30, 512), "b": (17, 300), "c": (6, 40), "d": (600, 24)}
SETTINGS: dict[str, dict[str, Any]] = {
    "Muon": {"orth_dtype": "float32"},
    # 8-bit moments of 8 x 512 and 600 x 8, float32 ones of 8 x 300, AdamW's of 6 x 40.
    "GaLoreAdamW": {"rank": 8, "update_proj_gap": 2},
    "Dion": {"rank_fraction": 0.5},
}


class Weights(nn.Module):
    """Matrices, sharded along their first dimension where there are several ranks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for index, (name, shape) in enumerate(SHAPES.items()):
            full = gaussian(shape, 1, index, scale=0.1).to(dtype)
            self.register_parameter(name, nn.Parameter(sharded(full)))


def sharded(tensor: Tensor) -> Tensor:
    """The tensor, over all ranks if there are several."""
    if not dist.is_initialized():
        return tensor
    mesh = jobs.mesh_of({"fs": dist.get_world_size()})
    return jobs.placed(tensor, mesh, {"fs": ("S", 0)}, ["fs"])


def train(
    name: str,
    steps: int,
    source: str | None,
    target: str | None,
    dtype: torch.dtype = torch.float32,
    keys: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Loads, takes steps on gradients that depend on their number, saves; all that there is, whole."""
    network = Weights(dtype)
    settings = {"lr": 0.01, "state_bits": 8, **SETTINGS.get(name, {}), **(keys or {})}
    optimizer = getattr(oxidion, name)(network.parameters(), **settings)
    alone = not dist.is_initialized()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        if source is not None:
            model, states = get_state_dict(network, optimizer)
            loaded = {"model": model, "optimizer": states}
            dcp.load(loaded, checkpoint_id=source, no_dist=alone)
            set_state_dict(
                network, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
            )
        for _ in range(steps):
            number = optimizer.param_groups[0]["step"]
            for index, param in enumerate(network.parameters()):
                param.grad = sharded(gaussian(param.shape, 2, number, index).to(dtype))
            optimizer.step()
        if target is not None:
            model, states = get_state_dict(network, optimizer)
            dcp.save({"model": model, "optimizer": states}, checkpoint_id=target, no_dist=alone)
    found = {}
    for at, param in network.named_parameters():
        found[f"{at} param"] = jobs.whole(param).clone()
        for key, value in optimizer.state[param].items():
            sent = in_bytes(value) if value.dtype == torch.int16 else value
            found[f"{at} {key}"] = jobs.whole(sent).clone()
    return found


def gathered() -> bool:
    """Whether weights with masters go on from a whole state dict as they went on without one, bit by bit."""
    keys = {"lr": 0.01, "master_weights": True, "state_dtype": torch.float32}

    def steps(network: nn.Module, optimizer: Any, numbers: range) -> None:
        for number in numbers:
            for index, param in enumerate(network.parameters()):
                param.grad = sharded(gaussian(param.shape, 2, number, index).bfloat16())
            optimizer.step()

    networks = [Weights(torch.bfloat16) for _ in range(2)]
    first, second = (oxidion.AdamW(network.parameters(), **keys) for network in networks)
    steps(networks[0], first, range(3))
    options = StateDictOptions(full_state_dict=True)
    model, states = get_state_dict(networks[0], first, options=options)
    assert {value["master_remainder"].dtype for value in states["state"].values()} == {torch.uint8}
    set_state_dict(networks[1], second, model_state_dict=model, optim_state_dict=states, options=options)
    for network, optimizer in zip(networks, (first, second), strict=True):
        steps(network, optimizer, range(3, 6))
    pairs = zip(*(network.parameters() for network in networks), strict=True)
    return all(
        torch.equal(jobs.whole(one), jobs.whole(other))
        and torch.equal(
            *(
                jobs.whole(in_bytes(o.state[p]["master_remainder"]))
                for o, p in ((first, one), (second, other))
            )
        )
        and bool(jobs.whole(in_bytes(first.state[one]["master_remainder"])).any())
        for one, other in pairs
    )


def synchronized() -> tuple[float, float, float]:
    """Differences between 8-bit momenta of replicas before and after synchronizing; the error of the mean."""
    param = nn.Parameter(gaussian((64, 96), 1).float())
    optimizer = oxidion.Dion([param], replicate_mesh=dist.group.WORLD, rank_fraction=0.25, state_bits=8)
    param.grad = gaussian((64, 96), 2, dist.get_rank()).float()
    optimizer.step()

    def momenta() -> Tensor:
        own = optimizer.state[param]
        mine = dequantize_blockwise(own["momentum"], own["momentum_absmax"])
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        return torch.stack(both)

    before = momenta()
    optimizer.synchronize_for_checkpoint()
    after = momenta()
    mean = before.mean(0)
    error = (after[0] - mean).abs().max() / mean.abs().max()
    return float((before[0] - before[1]).abs().max()), float((after[0] - after[1]).abs().max()), float(error)
