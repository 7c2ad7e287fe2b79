"""Steps optimizers that are made as prime-rl and NeMo AutoModel make those of microsoft/dion.

    python examples/frameworks/with_dion_groups.py
    torchrun --standalone --nproc-per-node 2 examples/frameworks/with_dion_groups.py

Both import microsoft/dion, and find this package after `python -m oxidion shim dion`.

- NeMo AutoModel takes ``optimizer: muon`` or another name of the family, prime-rl ``type = "muon"``,
  OLMo-core what its configuration says of Muon. No file of theirs changes.
- Words of their forks for meshes, as ``world_mesh``, are accepted; layouts are read from the DTensors.

They need GPUs and have not been run; the script makes their calls in its own words.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import oxidion.compat.dion as dion


class Experts(nn.Module):
    """Weights of four experts, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 32, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """The mean of what all experts say."""
        return torch.einsum("eoi,bsi->bso", self.up, x) / 4


def model() -> nn.Module:
    """An embedding, a layer with experts and a head, by the names that the frameworks look at."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    layer.add_module("experts", Experts())
    parts = {"embed_tokens": nn.Embedding(64, 16), "layer": layer, "lm_head": nn.Linear(32, 64, bias=False)}
    return nn.Sequential(*parts.values())


def kinds(net: nn.Module) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Matrices, stacks of experts, and all other parameters."""
    embedding, layer, head = net
    own = [param for param in layer.parameters() if param.ndim == 2]
    stacks = [param for param in layer.parameters() if param.ndim == 3]
    vectors = [param for param in layer.parameters() if param.ndim == 1]
    return own, stacks, [*vectors, embedding.weight, head.weight]


def as_prime_rl(net: nn.Module, mesh: Any) -> Any:
    """Groups for Muon, experts on a mesh with a name of its own, and words of its fork for meshes."""
    matrices, experts, rest = kinds(net)
    common = {"lr": 0.02, "weight_decay": 0.01}
    muon = {"algorithm": "muon", "adjust_lr": "rms_norm", **common}
    groups = [
        {"params": matrices, **muon},
        {"params": experts, "distributed_mesh_name": None, **muon},
        {"params": rest, "algorithm": "adamw", **common},
    ]
    fork = {"world_mesh": mesh, "fsdp_mesh_dim": 0}
    return dion.Muon(groups, mu=0.95, betas=(0.9, 0.95), distributed_mesh=mesh, **common, **fork)


def as_automodel(net: nn.Module, mesh: Any) -> Any:
    """Groups whose scalars have rates and moments of their own; one of them may be empty."""
    matrices, experts, rest = kinds(net)
    scalar = {"algorithm": "adamw", "lr": 0.01, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
    groups = [
        {"params": [*matrices, *experts]},
        {"params": rest, "weight_decay": 0.0, **scalar},
        {"params": [], **scalar},
    ]
    return dion.NorMuon(groups, lr=0.02, weight_decay=0.01, distributed_mesh=mesh)


def main() -> int:
    """Trains by both, and tests that losses fall."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
    good = True
    for name, make in (("prime-rl", as_prime_rl), ("NeMo AutoModel", as_automodel)):
        net = model()
        if mesh is not None:
            fully_shard(net, mesh=mesh)
        optimizer, losses = make(net, mesh), []
        words = torch.arange(128).view(4, 32) % 61
        for _ in range(10):
            loss = nn.functional.cross_entropy(net(words).flatten(0, 1), words.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        good = good and losses[-1] < losses[0]
        if world == 1 or dist.get_rank() == 0:
            print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return 0 if good else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
