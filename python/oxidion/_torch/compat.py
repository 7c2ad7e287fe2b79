"""Differences among the versions of torch that are supported, and all private names of it in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

__all__ = [
    "check_capture",
    "cuda_graph",
    "disable_dynamo",
    "dtensor",
    "is_inside_ddp",
    "refuse_modes",
    "root_mesh",
]

PRIVATE: dict[str, tuple[str, ...]] = {
    "torch._C": ("_TorchDispatchModeKey", "_get_dispatch_mode", "_len_torch_dispatch_stack"),
    "torch.Tensor": ("_cdata", "_use_count", "_version"),
    "torch._compile": ("_disable_dynamo",),
    "torch.distributed.ProcessGroup": ("_device_types", "_get_backend", "_get_backend_name"),
    "torch.distributed.tensor.DTensor": ("_local_tensor",),
    "torch.distributed.tensor": ("_dtensor_spec",),
    "torch.distributed.tensor.placement_types": ("_StridedShard",),
    "torch.nn.parallel.DistributedDataParallel": ("_get_active_ddp_module",),
    "torch.optim.Optimizer": ("_patch_step_function",),
    "torch.optim.Optimizer()": (
        "_optimizer_load_state_dict_post_hooks",
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_state_dict_post_hooks",
        "_optimizer_state_dict_pre_hooks",
        "_optimizer_step_post_hooks",
        "_optimizer_step_pre_hooks",
    ),
}
"""Private names that every version has, by their owner. Other modules use no name that a version lacks."""

FLAT = ("_fsdp_flattened", "_is_flat_param")
"""Names that FSDP1 gives to parameters that it flattened, where it did."""

# Its second name is that of torch up to 2.9.
_CAPTURE_NAMES = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
_CAPTURE_CHECK = next(getattr(Optimizer, name) for name in _CAPTURE_NAMES if hasattr(Optimizer, name))


_Function = TypeVar("_Function", bound=Callable[..., Any])


def disable_dynamo(function: _Function) -> _Function:
    """A method of an optimizer that runs as it is inside of ``torch.compile``, and says why where it cannot.

    torch shows the reason where a function with a call of it is compiled with ``fullgraph=True``.
    """
    found: Any = _disable_dynamo(function)
    name = f"optimizer.{function.__name__}()"
    found._torchdynamo_disable = True
    found._torchdynamo_disable_msg = (
        f"{name} of oxidion computes outside of the graph. Compile the forward pass and the loss with "
        f"fullgraph=True and call {name} after them, or compile the function that calls it without fullgraph"
    )
    made: _Function = found
    return made


def check_capture(optimizer: Optimizer) -> None:
    """Warns, as torch's optimizers do, where a step is captured into a graph that was not made for it."""
    _CAPTURE_CHECK(optimizer)


def refuse_modes() -> None:
    """Refuses a mode under which operations act on no memory: the core writes memory, whatever mode there is.

    Raises:
        TypeError: that names the mode.
    """
    if not torch._C._len_torch_dispatch_stack():
        return
    keys = torch._C._TorchDispatchModeKey
    for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL):
        mode = torch._C._get_dispatch_mode(key)
        if mode is not None:
            raise TypeError(
                f"an optimizer of oxidion cannot step within {type(mode).__name__}, where tensors have no "
                "memory. Leave the mode before step(), or trace the model without its optimizer"
            )


def cuda_graph() -> torch.cuda.CUDAGraph:
    """A CUDA graph that can be changed between capture and replay.

    Raises:
        RuntimeError: where torch has none.
    """
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec"):
        raise RuntimeError(f"a step as a CUDA graph needs torch 2.9 or newer, found {torch.__version__}")
    return torch.cuda.CUDAGraph(keep_graph=True)


def dtensor(
    own: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: torch.Size, stride: Sequence[int]
) -> torch.Tensor:
    """A DTensor that has ``own`` itself as the part of this process, wherever that lies.

    ``DTensor.from_local`` moves it to the device of the mesh. FSDP2 makes its DTensors as this does.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, tuple(stride), own.dtype))
    made: Any = DTensor
    whole: torch.Tensor = made(own, spec, requires_grad=False)
    return whole


def is_inside_ddp() -> bool:
    """True while ``DistributedDataParallel`` runs the forward pass of its module."""
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    return ddp._get_active_ddp_module() is not None


def root_mesh(mesh: Any) -> Any:
    """The device mesh that this one was cut out of, or itself."""
    if mesh is None or hasattr(mesh, "_get_root_mesh"):
        return mesh and mesh._get_root_mesh()
    from torch.distributed import device_mesh

    resources: Any = device_mesh._mesh_resources
    return resources.get_root_mesh(mesh)
