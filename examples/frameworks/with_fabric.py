"""Trains a small network with Lightning Fabric and Muon, and resumes it from a checkpoint bit for bit.

    python examples/frameworks/with_fabric.py
    torchrun --standalone --nproc-per-node 2 examples/frameworks/with_fabric.py
    torchrun --standalone --nproc-per-node 2 examples/frameworks/with_fabric.py --fsdp2

Under torchrun the model is wrapped in DistributedDataParallel or, with ``--fsdp2``, sharded by
``fully_shard`` in Fabric's ``ModelParallelStrategy``; on a CPU the processes meet over gloo.

- For FSDP2 the strategy is ``ModelParallelStrategy``, with a function that calls ``fully_shard``. The
  model is set up first, and the optimizer is made of what came back: it sees through Fabric's wrapper.
- ``FSDPStrategy`` is FSDP1 and makes one vector of each unit, which classes for matrices refuse.
- The wrapper keeps the optimizer in ``.optimizer``: call its ``synchronize_for_checkpoint()`` before
  ``fabric.save``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import oxidion


def network(seed: int) -> nn.Sequential:
    """Three layers with random weights."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    """Shards the model over the data-parallel axis of the strategy."""
    return fully_shard(model, mesh=mesh["data_parallel"])


def build_fabric(fsdp2: bool, precision: str) -> L.Fabric:
    """One process, DDP or FSDP2."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    strategy: Any = "ddp" if world > 1 else "auto"
    if fsdp2:
        strategy = ModelParallelStrategy(shard, data_parallel_size=world, tensor_parallel_size=1)
    fabric = L.Fabric(accelerator="cpu", devices=world, strategy=strategy, precision=precision)
    fabric.launch()
    return fabric


class Run:
    """Model, optimizer and schedule of one run, as Fabric sets them up."""

    def __init__(self, fabric: L.Fabric, steps: int, seed: int, fsdp2: bool) -> None:
        """Sets the model up before the optimizer is made where the strategy shards it, else both together."""
        self.fabric = fabric
        self.model: Any = network(seed)
        if fsdp2:
            self.model = fabric.setup(self.model)
            self.optimizer = fabric.setup_optimizers(self.build_optimizer())
        else:
            self.model, self.optimizer = fabric.setup(self.model, self.build_optimizer())
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=steps)
        self.done = 0

    def build_optimizer(self) -> oxidion.Muon:
        """Muon for the matrices; AdamW for the last layer and the biases."""
        return oxidion.Muon(self.model, lr=0.02, scalar_lr=0.01, weight_decay=0.01)

    def train(self, until: int) -> float:
        """Trains until ``until`` steps are done; returns the last loss of this process."""
        loss = torch.zeros(())
        teacher = network(seed=2)
        while self.done < until:
            everything = torch.randn(64, 32, generator=torch.Generator().manual_seed(self.done % 8))
            inputs = everything.chunk(self.fabric.world_size)[self.fabric.global_rank]
            with torch.no_grad():
                targets = teacher(inputs)
            loss = F.mse_loss(self.model(inputs), targets)
            self.fabric.backward(loss)
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.done += 1
        return loss.item()

    def save(self, folder: Path) -> None:
        """Writes a checkpoint; all processes call it."""
        self.optimizer.optimizer.synchronize_for_checkpoint()
        state = {"model": self.model, "optimizer": self.optimizer}
        self.fabric.save(folder, {**state, "schedule": self.schedule.state_dict(), "done": self.done})

    def load(self, folder: Path) -> None:
        """Continues from a checkpoint; all processes call it."""
        state = {"model": self.model, "optimizer": self.optimizer}
        rest = self.fabric.load(folder, state)
        self.schedule.load_state_dict(rest["schedule"])
        self.done = rest["done"]

    def weights(self) -> list[Tensor]:
        """What this process holds of every parameter."""
        return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in self.model.parameters()]


def main() -> int:
    """Trains, resumes from a checkpoint of the middle with other initial weights, and compares the ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="length of the run")
    parser.add_argument("--fsdp2", action="store_true", help="shard the parameters")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed", "bf16-true"), default="32-true")
    options = parser.parse_args()
    fabric = build_fabric(options.fsdp2, options.precision)
    folder = Path(fabric.broadcast(tempfile.mkdtemp()))

    run = Run(fabric, options.steps, 0, options.fsdp2)
    first = run.train(1)
    run.train(options.steps // 2)
    run.save(folder / "middle")
    last = run.train(options.steps)
    resumed = Run(fabric, options.steps, 1, options.fsdp2)
    resumed.load(folder / "middle")
    resumed.train(options.steps)

    equal = all(map(torch.equal, run.weights(), resumed.weights()))
    fabric.print(f"{type(fabric.strategy).__name__}, loss {first:.3f} -> {last:.4f}")
    fabric.print(f"resumed at step {options.steps // 2}: bit-equal {equal}")
    fabric.barrier()
    if fabric.is_global_zero:
        shutil.rmtree(folder)
    return 0 if equal and last < first / 2 else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads of gloo outlive their group, and may abort while Python is torn down
