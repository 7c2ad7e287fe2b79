"""Trains a small network by Composer's Trainer with Muon, and resumes it from a checkpoint.

    pip install mosaicml "torch==2.7.*"
    python examples/frameworks/with_composer.py

- One device, DDP, closures, gradient scaling and its schedulers work, and so does FSDP2: the Trainer
  replaces the optimizer's groups by groups of DTensors.
- FSDP1 flattens parameters: for AdamW, Lion and AdEMAMix alone.
- Under tensor parallelism Composer asks for one group that has all parameters: AdamW, Lion, Lamb,
  Adafactor, CAME.

Composer 0.32 is for torch 2.6 and 2.7. Run with Composer 0.32.1 and torch 2.7.0 in one process; the
tests run it where Composer is installed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.models import ComposerModel
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import oxidion


class Model(ComposerModel):  # type: ignore[misc]  # of a package that need not be there
    """Two layers and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Answers to a batch."""
        answers: Tensor = self.net(batch[0])
        return answers

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean square of what is wrong."""
        return (outputs - batch[1]).square().mean()


def trained(epochs: int, folder: str | None = None) -> tuple[Any, oxidion.Muon]:
    """A trainer after some epochs, which went on from the checkpoint of a folder."""
    torch.manual_seed(0)
    model = Model()
    optimizer = oxidion.Muon(model, lr=0.02, scalar_lr=3e-4)
    data = DataLoader(TensorDataset(torch.randn(64, 64), torch.randn(64, 32)), batch_size=16)
    trainer = Trainer(
        model=model,
        train_dataloader=data,
        optimizers=optimizer,
        max_duration=f"{epochs}ep",
        device="cpu",
        progress_bar=False,
        load_path=None if folder is None else str(Path(folder, "kept.pt")),
    )
    trainer.fit()
    return trainer, optimizer


def main() -> int:
    """Trains, saves and resumes; the number of steps shows whether the states were restored."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = trained(2)
        trainer.save_checkpoint(str(Path(folder, "kept.pt")))
        _, optimizer = trained(3, folder)
    steps = [group["step"] for group in optimizer.param_groups]
    print(f"resumed: {steps} steps")
    return 0 if steps == [12, 12] else 1


if __name__ == "__main__":
    raise SystemExit(main())
