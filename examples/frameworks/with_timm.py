"""Trains a tiny vision transformer or ResNet of timm with its scheduler and Muon, and resumes it bit for bit.

    python examples/frameworks/with_timm.py
    python examples/frameworks/with_timm.py --model resnet

The images are bars in eight directions with noise, made here.

- The class knows timm's models: tables of positions, class tokens and the classifier go to AdamW
  whatever its name, a fused ``qkv`` is cut into its three matrices, and filters are matrices with a row
  for each output channel.
- timm's schedulers work; ``warmup_lr_init`` is one number for all groups.
- timm's schedulers multiply by ``group["lr_scale"]``. Groups of ``timm.optim.param_groups_layer_decay``
  go to ``oxidion.AdamW`` as they are; for Muon set ``lr_scale`` in groups of your own.
- ``weight_decay`` is for the matrices only.
- ``timm.utils.dispatch_clip_grad`` and ``NativeScaler`` work. Adaptive clipping changes little.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn

import oxidion

CLASSES = 8
SIZE = 16


def build_model(name: str, seed: int) -> nn.Module:
    """A model of timm with random weights, for small images with one channel."""
    torch.manual_seed(seed)
    if name == "vit":
        sizes = {"img_size": SIZE, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
        return timm.create_model("vit_tiny_patch16_224", in_chans=1, num_classes=CLASSES, **sizes)
    sizes = {"channels": (16, 16, 32, 32), "stem_width": 8}
    return timm.create_model("resnet10t", in_chans=1, num_classes=CLASSES, **sizes)


def build_optimizer(model: nn.Module) -> oxidion.Muon:
    """Muon for matrices and filters; AdamW for positions, class tokens, the output layer and vectors."""
    return oxidion.Muon(model, lr=0.02, scalar_lr=3e-3, weight_decay=0.01)


def batch(step: int, count: int = 32) -> tuple[Tensor, Tensor]:
    """Images of bars and the numbers of their directions."""
    generator = torch.Generator().manual_seed(step)
    targets = torch.randint(CLASSES, (count,), generator=generator)
    angles = targets.view(-1, 1, 1) * torch.pi / CLASSES
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, SIZE), torch.linspace(-1, 1, SIZE), indexing="ij")
    distance = (rows * torch.cos(angles) - columns * torch.sin(angles)).abs()
    images = (distance < 0.2).float() + 0.3 * torch.randn(count, SIZE, SIZE, generator=generator)
    return images.unsqueeze(1), targets


class Run:
    """Model, optimizer and schedule of one run."""

    def __init__(self, name: str, steps: int, seed: int) -> None:
        """Builds them; the schedule counts updates."""
        self.model = build_model(name, seed)
        self.optimizer = build_optimizer(self.model)
        self.schedule = CosineLRScheduler(
            self.optimizer, t_initial=steps, warmup_t=4, warmup_lr_init=1e-4, t_in_epochs=False
        )

    def train(self, steps: range) -> list[float]:
        """Takes steps; returns their losses."""
        losses = []
        for step in steps:
            self.schedule.step_update(step)
            images, targets = batch(step)
            loss = F.cross_entropy(self.model(images), targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def state_dict(self) -> dict[str, dict]:
        """Everything that the rest of the run depends on."""
        return {key: getattr(self, key).state_dict() for key in ("model", "optimizer", "schedule")}

    def load_state_dict(self, state: dict[str, dict]) -> None:
        """Continues from there."""
        for key, part in state.items():
            getattr(self, key).load_state_dict(part)


def main() -> int:
    """Trains, resumes from a checkpoint of the middle with other initial weights, and compares the ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("vit", "resnet"), default="vit")
    parser.add_argument("--steps", type=int, default=100, help="length of the run")
    options = parser.parse_args()
    half = options.steps // 2
    run = Run(options.model, options.steps, seed=0)
    losses = run.train(range(half))
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "checkpoint.pt"
        with oxidion.checkpoint.whole_file(path) as file:
            torch.save(run.state_dict(), file)
        losses += run.train(range(half, options.steps))
        resumed = Run(options.model, options.steps, seed=1)
        resumed.load_state_dict(torch.load(path, weights_only=True))
    resumed.train(range(half, options.steps))

    equal = all(map(torch.equal, run.model.parameters(), resumed.model.parameters()))
    print(f"{options.model}, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"resumed at step {half}: bit-equal {equal}")
    return 0 if equal and losses[-1] < losses[0] / 2 else 1


if __name__ == "__main__":
    sys.exit(main())
