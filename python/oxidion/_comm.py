"""Everything that touches ``torch.distributed``: meshes that users pass, and states that are DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oxidion._oxidion import LayoutError


def check_mesh(name: str, mesh: Any) -> None:
    """Checks a mesh or process group that a constructor was given.

    Raises:
        TypeError: for anything but a ``DeviceMesh`` or ``ProcessGroup``.
        LayoutError: for more than one rank.
    """
    if mesh is None:
        return
    if not torch.distributed.is_available():
        raise TypeError(f"{name} must be None where torch.distributed is not available, got {mesh!r}")
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, (DeviceMesh, ProcessGroup)):
        raise TypeError(f"{name} must be a DeviceMesh or ProcessGroup, got {type(mesh).__name__}")
    if mesh.size() != 1:
        raise LayoutError(
            f"{name} has {mesh.size()} ranks: this version optimizes parameters on one device. "
            f"Leave {name} out and let DistributedDataParallel average the gradients"
        )


def like_param(state: Tensor, param: Tensor, *, sharded: bool) -> Tensor:
    """A state as the kind of tensor that its parameter is.

    Args:
        state: the local tensor.
        param: a tensor or DTensor.
        sharded: whether the state has the parameter's placements; if not it is replicated.
    """
    if not hasattr(param, "_local_tensor"):
        return state
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(param, DTensor)
    mesh = param.device_mesh
    placements = param.placements if sharded else [Replicate()] * mesh.ndim
    return DTensor.from_local(state, mesh, placements, run_check=False)
