"""Trains a small network with Lightning and Dion, and resumes it from a checkpoint bit for bit.

    python examples/frameworks/with_lightning.py
    torchrun --standalone --nproc-per-node 2 examples/frameworks/with_lightning.py

Under torchrun the Trainer's strategy is DistributedDataParallel; on a CPU the processes meet over gloo.

- One optimizer serves matrices, embeddings, norms and biases: no manual optimization with two of them.
- With ``gradient_clip_val`` and ``"bf16-mixed"`` or ``"16-mixed"`` Lightning raises "does not allow for
  gradient clipping because it performs unscaling of gradients internally".
  ``optimizer._step_supports_amp_scaling = False`` has the scaler unscale the gradients before the step;
  the step is the same.
- Lightning steps a schedule once an epoch unless ``"interval": "step"`` is given.
- From a checkpoint at the end of an epoch a run goes on to the last bit. From one within an epoch it
  begins again with the first batches of the loader, as Lightning says.
- ``FSDPStrategy`` is FSDP1, which classes for matrices refuse: use ``ModelParallelStrategy``, as with
  Fabric.
- ``bf16-true``: parameters are bfloat16 and states float32; docs/low-precision.md has the settings.
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
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import oxidion


def network(seed: int) -> nn.Sequential:
    """Three layers with random weights."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))


class Student(L.LightningModule):
    """Learns what another network answers."""

    def __init__(self, seed: int, steps: int) -> None:
        super().__init__()
        self.network = network(seed)
        self.steps = steps
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        inputs, targets = batch
        loss = F.mse_loss(self.network(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        """Dion for matrices, AdamW for the last layer and biases, under one schedule, stepped every batch."""
        optimizer = oxidion.Dion(self, lr=0.02, scalar_lr=0.01, weight_decay=0.01)
        # Lightning clips under mixed precision only what leaves the scale of gradients to the scaler.
        optimizer._step_supports_amp_scaling = False
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def build_loader(batch_size: int) -> DataLoader:
    """Random inputs and the answers of the teacher, in a fixed order."""
    inputs = torch.randn(512, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return DataLoader(TensorDataset(inputs, network(seed=2)(inputs)), batch_size=batch_size)


def fit(folder: Path, epochs: int, seed: int, precision: str, resume: Path | None = None) -> Student:
    """Trains a new module, from the beginning or from a checkpoint; returns it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        precision=precision,
        max_epochs=epochs,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],  # at the end of each epoch
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = build_loader(64 // world)
    student = Student(seed, epochs * 8)
    trainer.fit(student, loader, ckpt_path=resume)
    return student


def main() -> int:
    """Trains, resumes from the checkpoint with other initial weights, and compares the ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4, help="length of the run, of 8 steps each")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true")
    options = parser.parse_args()
    folder = Path(tempfile.gettempdir()) / f"with_lightning-{os.getppid()}"  # the same in all processes

    student = fit(folder, options.epochs, 0, options.precision)
    done = options.epochs // 2
    resumed = fit(folder, options.epochs, 1, options.precision, folder / f"epoch={done - 1}.ckpt")

    equal = all(map(torch.equal, student.network.parameters(), resumed.network.parameters()))
    if student.global_rank == 0:
        print(f"loss {student.losses[0]:.3f} -> {student.losses[-1]:.4f}")
        print(f"resumed after epoch {done}: bit-equal {equal}")
        shutil.rmtree(folder)
    return 0 if equal and len(resumed.losses) == 8 * (options.epochs - done) else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads of gloo outlive their group, and may abort while Python is torn down
