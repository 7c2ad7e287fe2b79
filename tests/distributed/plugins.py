"""Jobs of the ranks in the table of plugins: wrap a model as a page says, compare it with one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import oxidion
from support.inputs import gaussian

NAMES = {
    "CPUOffloadPolicy": CPUOffloadPolicy,
    "ColwiseParallel": ColwiseParallel,
    "DistributedDataParallel": DistributedDataParallel,
    "RowwiseParallel": RowwiseParallel,
    "Shard": Shard,
    "distribute_tensor": distribute_tensor,
    "fully_shard": fully_shard,
    "init_device_mesh": init_device_mesh,
    "oxidion": oxidion,
    "parallelize_module": parallelize_module,
    "torch": torch,
}
"""Names that the lines of the page may use, in addition to ``model``."""


class Mixture(nn.Module):
    """A dense layer next to experts that all see the input."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(16, 12)
        self.experts = nn.Parameter(torch.empty(8, 16, 12))

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of the dense layer, and of the experts that this process stores, a row for each."""
        weights = self.experts.to_local() if isinstance(self.experts, DTensor) else self.experts
        outputs = torch.einsum("bi,eio->ebo", x, weights)
        return torch.cat([self.dense(x)[None], outputs])


def model_of(wrap: str) -> nn.Module:
    """The model that the lines wrap, with the same values on every rank."""
    model: nn.Module = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 12))
    if "experts" in wrap:
        model = Mixture()
    model.double()
    for index, param in enumerate(model.parameters()):
        param.data.copy_(gaussian(tuple(param.shape), 21, index, scale=0.2))
    return model


def whole(tensor: Tensor) -> Tensor:
    """The whole of a parameter, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run(wrap: str, build: str) -> tuple[float, bool, str]:
    """Compares three steps of the wrapped model with three of one process.

    Returns:
        The largest distance relative to the way of its parameter, whether every parameter has moved, and the
        class that stepped.
    """
    single = model_of(wrap)
    wrapped: dict[str, Any] = {**NAMES, "model": copy.deepcopy(single)}
    exec(wrap, wrapped)
    optimizers = [eval(build, wrapped), eval(build, {**NAMES, "model": single})]
    start = [param.detach().clone() for param in single.parameters()]
    for step in range(3):
        x = gaussian((32, 16), 22, step)
        for model, optimizer in zip((wrapped["model"], single), optimizers, strict=True):
            optimizer.zero_grad()
            # Every row of the output has a loss of its own, so experts do not share one.
            model(x).square().mean(dim=-1).sum().backward()
            optimizer.step()
    worst, moved = 0.0, True
    for param, expected, old in zip(wrapped["model"].parameters(), single.parameters(), start, strict=True):
        way = float((expected.detach() - old).norm())
        moved = moved and way > 0.0
        worst = max(worst, float((whole(param) - expected.detach()).norm()) / (way or 1.0))
    return worst, moved, type(optimizers[0]).__name__
