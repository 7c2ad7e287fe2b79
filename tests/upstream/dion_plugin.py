"""pytest plugin: microsoft/dion's tests with the classes of this package, on a machine without a CUDA device.

`oxidion.compat.dion` takes the place of `dion`. Tests for several devices run on processes of gloo. The
function that its tests of empty shards call is a step of this package's Muon over the same shards.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from oxidion.compat import dion
from upstream.gloo import replace_spawn, without_devices
from upstream.skips import unskip

DEVICES = 4
"""How many processes of gloo a test may use, at most as many as its tests need."""


def _orthogonalize(
    U: list[Tensor],
    *,
    world_size: int,
    newton_schulz_func: Any,
    epsilon: Tensor,
    global_comm_dim_size: int | None,
    **_: Any,
) -> Generator[None, None, list[Tensor]]:
    """Orthogonalizes matrices from the rows that each rank has, by one step of Muon without momentum."""
    mesh, placements = init_device_mesh("cpu", (world_size,)), [Shard(0)]

    def whole(local: Tensor) -> DTensor:
        rows, columns = global_comm_dim_size, local.shape[1]
        known: dict[str, Any] = (
            {} if rows is None else {"shape": torch.Size((rows, columns)), "stride": (columns, 1)}
        )
        return DTensor.from_local(local, mesh, placements, run_check=False, **known)

    params: list[Any] = [torch.nn.Parameter(whole(torch.zeros_like(shard))) for shard in U]
    for param, shard in zip(params, U, strict=True):
        param.grad = whole(shard)
    options = {"newton_schulz_func": newton_schulz_func, "epsilon": float(epsilon)}
    dion.Muon(params, lr=1.0, mu=0.0, weight_decay=0.0, adjust_lr=None, **options).step()
    yield
    return [-param.to_local() for param in params]


class _Task:
    """A generator that is run to its end."""

    def __init__(self, generator: Generator[Any, Any, Any]) -> None:
        self.generator = generator


class _Runtime:
    """Runs tasks one after the other."""

    def __init__(self, tasks: Iterable[_Task], max_concurrent_tasks: int) -> None:
        del max_concurrent_tasks
        self._tasks = tasks

    def run(self) -> None:
        """Runs all tasks."""
        for task in self._tasks:
            for _ in task.generator:
                pass


def install() -> None:
    """Makes the tests import the package as `dion`."""
    sys.modules["dion"] = dion
    modules: dict[str, Any] = dict(dion.register("dion"))
    modules["megabatch_base"].megabatch_orthogonalize_async = _orthogonalize
    modules["opt_utils"].AsyncRuntime, modules["opt_utils"].AsyncTask = _Runtime, _Task


def pytest_configure() -> None:
    """Before anything is collected."""
    install()
    without_devices()
    replace_spawn()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs on the CPU what asks for CUDA devices only because its package has no other kernels."""
    for words in ("CUDA required", "needs 2 GPUs", "needs 4 GPUs"):
        unskip(items, words)
    unskip((item for item in items if item.path.name == "test_adamw_foreach.py"), "requires CUDA")
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item.module, "CUDA_DEVICE_COUNT"):
            item.module.CUDA_DEVICE_COUNT = DEVICES
