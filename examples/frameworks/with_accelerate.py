"""Trains a small network with Accelerate and Muon, and resumes it from a checkpoint bit for bit.

    python examples/frameworks/with_accelerate.py
    torchrun --standalone --nproc-per-node 2 examples/frameworks/with_accelerate.py
    torchrun --standalone --nproc-per-node 2 examples/frameworks/with_accelerate.py --fsdp2

Under torchrun the model is wrapped in DistributedDataParallel or, with ``--fsdp2``, sharded by
``fully_shard``; on a CPU the processes meet over gloo.

- The optimizer is made of the whole model and prepared together with it. Under FSDP2 Accelerate puts
  the shards into its groups, and a step equals that of one process.
- ``fsdp_version=1`` makes one vector of each unit, which classes for matrices refuse. Use
  ``fsdp_version=2``.
- Under DistributedDataParallel the optimizer is made before the model is wrapped, so each process
  repeats the whole step. ``distributed_mesh=torch.distributed.group.WORLD``, after ``Accelerator()``,
  has them share the matrices.
- The wrapper keeps the optimizer in ``.optimizer``: call its ``synchronize_for_checkpoint()`` before
  ``save_state``.
- A prepared schedule takes as many steps at once as there are processes, unless ``split_batches=True``
  or ``step_scheduler_with_optimizer=False``.
- ``mixed_precision="bf16"`` leaves parameters and states in float32. Under FSDP2 it turns parameters
  that were in bfloat16 into float32.
- Accelerate takes the FSDP2 plugin on devices only. On a CPU this script says to it what it is to do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, broadcast_object_list
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import oxidion


def network(seed: int) -> nn.Sequential:
    """Three layers with random weights."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))


def dataset() -> TensorDataset:
    """Random inputs and what another network answers to them."""
    inputs = torch.randn(512, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return TensorDataset(inputs, network(seed=2)(inputs))


def build_accelerator(fsdp2: bool, mixed_precision: str) -> Accelerator:
    """One process, DDP or FSDP2, by what torchrun has started."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if fsdp2 else None
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision, fsdp_plugin=plugin)
    if plugin is not None:
        # Accelerate takes the plugin on devices only: on a CPU it would wrap the model in DDP without a word.
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    return accelerator


class Run:
    """Model, optimizer, schedule and data of one run, as Accelerate prepares them."""

    def __init__(self, accelerator: Accelerator, steps: int, seed: int) -> None:
        """Builds the parts and prepares them together: FSDP2 shards the model under the optimizer."""
        self.accelerator = accelerator
        model = network(seed)
        optimizer = oxidion.Muon(model, lr=0.02, scalar_lr=0.01, weight_decay=0.01)
        # At each step Accelerate takes as many steps of the schedule as there are processes.
        length = steps * accelerator.num_processes
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=length)
        loader = DataLoader(dataset(), batch_size=64 // accelerator.num_processes)
        self.model, self.optimizer, self.schedule, self.loader = accelerator.prepare(
            model, optimizer, schedule, loader
        )
        self.done = 0

    def train(self, until: int) -> Tensor:
        """Trains until ``until`` steps are done; returns the last loss of this process."""
        while True:
            for at, (inputs, targets) in enumerate(self.loader):
                if at != self.done % len(self.loader):
                    continue
                with self.accelerator.autocast():
                    loss = F.mse_loss(self.model(inputs), targets)
                self.accelerator.backward(loss)
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                self.done += 1
                if self.done == until:
                    return loss.detach()

    def weights(self) -> list[Tensor]:
        """What this process holds of every parameter."""
        return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in self.model.parameters()]


def main() -> int:
    """Trains, resumes from a checkpoint of the middle with other initial weights, and compares the ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="length of the run")
    parser.add_argument("--fsdp2", action="store_true", help="shard the parameters")
    parser.add_argument("--mixed-precision", choices=("no", "bf16"), default="no")
    options = parser.parse_args()
    accelerator = build_accelerator(options.fsdp2, options.mixed_precision)
    folder = broadcast_object_list([tempfile.mkdtemp()])[0]

    run = Run(accelerator, options.steps, seed=0)
    first = run.train(1).item()
    run.train(options.steps // 2)
    run.optimizer.optimizer.synchronize_for_checkpoint()
    accelerator.save_state(folder)
    last = run.train(options.steps).item()

    accelerator.free_memory()
    resumed = Run(accelerator, options.steps, seed=1)
    accelerator.load_state(folder)
    resumed.done = options.steps // 2
    resumed.train(options.steps)

    equal = all(map(torch.equal, run.weights(), resumed.weights()))
    accelerator.print(f"{accelerator.distributed_type}, loss {first:.3f} -> {last:.4f}")
    accelerator.print(f"resumed at step {options.steps // 2}: bit-equal {equal}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder)
    accelerator.end_training()
    return 0 if equal and last < first / 2 else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads of gloo outlive their group, and may abort while Python is torn down
