"""Trains a small network with DeepSpeed, by Muon or under ZeRO by AdamW, and resumes it bit for bit.

    python examples/frameworks/with_deepspeed.py
    python examples/frameworks/with_deepspeed.py --stage 2 --bf16
    torchrun --standalone --nproc-per-node 2 examples/frameworks/with_deepspeed.py

Muon is for stage 0. On CPUs the processes meet over gloo.

- ZeRO, stages 1 to 3, replaces a group's parameters by a part of one flat vector. AdamW, Lion and
  AdEMAMix step vectors, with 8-bit states too; all other classes refuse them, as norms, factors and
  matrices are lost. For those use stage 0, or FSDP2, which keeps shapes and saves the same memory.
  Parameters that were made within ``zero.Init()`` are refused when the optimizer is made.
- ``zero_allow_untested_optimizer`` is for ZeRO, which has a list of the classes that it knows.
- At stage 0 on several processes ``distributed_mesh=torch.distributed.group.WORLD``, after
  ``deepspeed.init_distributed()``, has them share the matrices.
- ``offload_optimizer`` needs ``"zero_force_ds_cpu_optimizer": false``; the step then runs on the CPU.
- A resumed run goes on to the last bit as long as the number of processes stays.
- On CPUs DeepSpeed compiles a sum of its own at the first start, which takes minutes. This script has
  gloo sum.

Run with DeepSpeed 0.19 and torch 2.11 on CPUs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oxidion

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def network(seed: int) -> nn.Sequential:
    """Three layers with random weights."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))


def build_optimizer(model: nn.Module, stage: int) -> torch.optim.Optimizer:
    """Muon, which shares out matrices, with AdamW for the rest where shapes are kept, else AdamW."""
    if stage > 0:
        return oxidion.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    return oxidion.Muon(
        model, lr=0.02, scalar_lr=0.01, weight_decay=0.01, distributed_mesh=torch.distributed.group.WORLD
    )


class Run:
    """The engine of one run, and how many steps it has taken."""

    def __init__(self, stage: int, bf16: bool, seed: int) -> None:
        """Makes the model, the optimizer, and DeepSpeed's engine of both."""
        config = {
            "train_micro_batch_size_per_gpu": 64 // int(os.environ["WORLD_SIZE"]),
            "gradient_clipping": 1.0,
            "bf16": {"enabled": bf16},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        model = network(seed)
        optimizer = build_optimizer(model, stage)
        self.engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.done = 0

    def train(self, until: int) -> float:
        """Trains until ``until`` steps are done; returns the last loss of this process."""
        loss = torch.zeros(())
        teacher = network(seed=2)
        while self.done < until:
            everything = torch.randn(64, 32, generator=torch.Generator().manual_seed(self.done % 8))
            inputs = everything.chunk(self.engine.world_size)[self.engine.global_rank]
            with torch.no_grad():
                targets = teacher(inputs)
            outputs = self.engine(inputs.to(self.engine.device, self.dtype))
            loss = F.mse_loss(outputs.float(), targets.to(self.engine.device))
            self.engine.backward(loss)
            self.engine.step()
            self.done += 1
        return loss.item()

    def save(self, folder: Path) -> None:
        """Writes a checkpoint; all processes call it."""
        self.engine.save_checkpoint(str(folder), client_state={"done": self.done})

    def load(self, folder: Path) -> None:
        """Continues from a checkpoint; all processes call it."""
        _, client_state = self.engine.load_checkpoint(str(folder))
        self.done = client_state["done"]

    def weights(self) -> list[Tensor]:
        """Whole parameters; all processes call it."""
        params: list[Any] = list(self.engine.module.parameters())
        with deepspeed.zero.GatheredParameters(params):
            return [param.detach().clone() for param in params]


def main() -> int:
    """Trains, resumes from a checkpoint of the middle with other initial weights, and compares the ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="length of the run")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=0, help="of ZeRO")
    parser.add_argument("--bf16", action="store_true", help="parameters in bfloat16")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        os.environ.update(ALONE)
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__ = {}  # gloo sums; a sum of DeepSpeed's would be compiled for minutes
    deepspeed.init_distributed()
    folder = Path(tempfile.gettempdir()) / f"with_deepspeed-{os.getppid()}"  # the same in all processes

    run = Run(options.stage, options.bf16, 0)
    first = run.train(1)
    run.train(options.steps // 2)
    run.save(folder)
    last = run.train(options.steps)
    resumed = Run(options.stage, options.bf16, 1)
    resumed.load(folder)
    resumed.train(options.steps)

    equal = all(map(torch.equal, run.weights(), resumed.weights()))
    deepspeed.comm.barrier()
    if run.engine.global_rank == 0:
        print(f"stage {options.stage}, loss {first:.3f} -> {last:.4f}")
        print(f"resumed at step {options.steps // 2}: bit-equal {equal}")
        shutil.rmtree(folder)
    return 0 if equal and last < first / 2 else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads of gloo outlive their group, and may abort while Python is torn down
