"""Stand-ins by which tests for several CUDA devices run on a CPU, as processes of gloo.

The processes are forked, which takes none of the seconds in which a new one imports torch. In each of them
devices, meshes and process groups that a test makes for CUDA and NCCL are those of the CPU and of gloo.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed
import torch.distributed.tensor
import torch.multiprocessing

_cuda: Any = torch.cuda
_dist: Any = torch.distributed
_dtensor: Any = torch.distributed.tensor
_processes: Any = torch.multiprocessing
_init_process_group = _dist.init_process_group
_init_device_mesh = _dtensor.init_device_mesh


class _CpuTorch(ModuleType):
    """The module `torch` as a test sees it: every device is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(*_: Any) -> torch.device:
        """The CPU, whichever device is asked for."""
        return torch.device("cpu")


def _device_mesh(_: str, *args: Any, **kwargs: Any) -> Any:
    return _dtensor.DeviceMesh("cpu", *args, **kwargs)


def _cpu_mesh(_: str, *args: Any, **kwargs: Any) -> Any:
    return _init_device_mesh("cpu", *args, **kwargs)


def _gloo_group(_: str = "nccl", /, *, backend: str = "nccl", **kwargs: Any) -> None:
    del backend
    _init_process_group("gloo", **kwargs)


def _no_op(*_: Any) -> None:
    """Replaces calls that only concern a CUDA device."""


def without_devices() -> None:
    """Leaves tensors on the CPU and waits for no device."""
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    _cuda.synchronize = _cuda.set_device = _no_op


def _process(rank: int, worker: Any, args: tuple[Any, ...]) -> None:
    """A process of a test."""
    torch.set_num_threads(1)
    _dist.init_process_group = _gloo_group
    _dtensor.init_device_mesh = _cpu_mesh
    module: Any = sys.modules[worker.__module__]
    module.torch = _CpuTorch("torch")
    if hasattr(module, "DeviceMesh"):
        module.DeviceMesh = _device_mesh
    worker(rank, *args)


def _spawn(fn: Any, args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True) -> Any:
    return _processes.start_processes(_process, (fn, args), nprocs, join, start_method="fork")


def replace_spawn() -> None:
    """Replaces ``torch.multiprocessing.spawn`` by one whose processes use the CPU and gloo."""
    _processes.spawn = _spawn
