"""Steps of several processes, one on each GPU, compared with those of one."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import oxidion
from oxidion._cuda import child, self_check
from oxidion._gpu_check.found import Found
from oxidion._gpu_check.parts import difference, numbers
from oxidion._gpu_check.place import EMULATED, place

SHAPES = ((96, 64), (64, 96), (30, 50))
CLASSES: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Muon": {"orth_dtype": "float32"},
    "Dion": {"rank_fraction": 0.25, "orth_dtype": "float32"},
    "SOAP": {"precondition_frequency": 2},
    "Adafactor": {"relative_step": False},
}
STEPS = 3
BAR = 1e-3
"""The largest difference of updates: sums of ranks have another order than those of one."""
SECONDS = 90
LAYOUTS: dict[str, dict[str, int]] = {"rows sharded": {"dim": 0}, "columns sharded": {"dim": 1}}
BACKENDS = ("nccl", "cpu:gloo,cuda:nccl")
PARTS = tuple(f"{backend} {layout}" for backend in BACKENDS for layout in LAYOUTS)


def steps(cls: str, device: torch.device, mesh: Any = None, dim: int = 0) -> list[Tensor]:
    """By how much parameters move, whole and in float64 on the host; sharded along a dimension on a mesh."""

    def placed(values: Tensor) -> Tensor:
        values = values.float().to(device)
        return values if mesh is None else distribute_tensor(values, mesh, [Shard(dim)])

    def whole(values: Tensor) -> Tensor:
        values = values.detach()
        return (values.full_tensor() if isinstance(values, DTensor) else values).double().cpu()

    params = [nn.Parameter(placed(numbers(shape, 1.0 + i))) for i, shape in enumerate(SHAPES)]
    optimizer = getattr(oxidion, cls)(params, lr=0.01, **CLASSES[cls])
    before = [whole(param) for param in params]
    for step in range(STEPS):
        for i, param in enumerate(params):
            param.grad = placed(numbers(tuple(param.shape), 100.0 + 10 * step + i))
        optimizer.step()
    return [whole(param) - old for param, old in zip(params, before, strict=True)]


def work(number: str, rank: int, count: int, part: str, store: str) -> dict[str, Any]:
    """Findings of a rank: by class the largest difference from one process, and what computes there."""
    backend, _, layout = part.partition(" ")
    device = place(number)
    if number == EMULATED:
        backend = "gloo"
    dist.init_process_group(backend, store=FileStore(store, count), rank=rank, world_size=count)
    mesh = init_device_mesh(device.type, (count,), mesh_dim_names=("fs",))
    off = {
        cls: difference(steps(cls, device, mesh, **LAYOUTS[layout]), steps(cls, device)) for cls in CLASSES
    }
    found = {"off": off, "kernels": self_check.states(device)}
    dist.barrier()
    dist.destroy_process_group()
    return found


def run(part: str, numbers_of_gpus: list[str]) -> Found:
    """Runs a part with a process for each of these devices."""
    count = len(numbers_of_gpus)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        ranks = [
            subprocess.Popen(
                [*child.command(number), "--rank", str(rank), str(count), part, store],
                env={**os.environ, child.VARIABLE: "0"},  # kernels are tried as they are
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            for rank, number in enumerate(numbers_of_gpus)
        ]
        try:
            said = [process.communicate(timeout=SECONDS) for process in ranks]
        except subprocess.TimeoutExpired:
            return Found("FAIL", {"ranks": count}, f"no answer within {SECONDS} s")
        finally:
            for process in ranks:
                process.kill()
                process.communicate()
    for rank, (process, (_, complaints)) in enumerate(zip(ranks, said, strict=True)):
        if process.returncode:
            last = (complaints.strip().splitlines() or ["nothing was said"])[-1]
            reason = f"rank {rank} ended with {process.returncode}: {last[:300]}"
            return Found("FAIL", {"ranks": count}, reason)
    return judged([json.loads(out.strip().splitlines()[-1]) for out, _ in said])


def judged(found: list[dict[str, Any]]) -> Found:
    """The outcome from what all ranks have found."""
    figures: dict[str, Any] = {"ranks": len(found)}
    for cls in CLASSES:
        off = [float(rank["off"][cls]) for rank in found]
        figures[cls] = max(off) if all(one == one for one in off) else float("nan")
    if any(rank["kernels"] != found[0]["kernels"] for rank in found):
        return Found("FAIL", figures, "other kernels are used on some ranks than on others")
    wrong = [cls for cls in CLASSES if not figures[cls] <= BAR]
    reason = f"{', '.join(wrong)}: updates differ from those of one process by more than {BAR:g}"
    return Found("FAIL" if wrong else "PASS", figures, reason if wrong else "")
