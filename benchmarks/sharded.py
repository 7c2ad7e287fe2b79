"""A model of matrices that processes share by ``fully_shard``."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Stack(nn.Module):
    """Matrices that belong together: only their shapes matter."""

    def __init__(self, shapes: Iterable[tuple[int, int]]) -> None:
        """Makes the matrices."""
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes)


def stack(shapes: Iterable[tuple[int, int]], mesh: DeviceMesh) -> Stack:
    """The model, sharded, with gradients."""
    torch.manual_seed(0)
    model = Stack(shapes)
    fully_shard(model, mesh=mesh)
    for param in model.parameters():
        assert isinstance(param, DTensor)
        own = torch.randn(param.to_local().shape)
        sizes = {"shape": param.shape, "stride": param.stride()}
        param.grad = DTensor.from_local(own, mesh, param.placements, run_check=False, **sizes)
    return model
