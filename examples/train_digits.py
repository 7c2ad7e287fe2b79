"""Trains a small ResNet on the handwritten digits of scikit-learn, which come with that package.

    python examples/train_digits.py
    python examples/train_digits.py --optimizer AdamW --lr 0.003

The 1797 images have 8 x 8 pixels; every fifth is held out. Filters are matrices to Muon and Dion: each output
channel is a row. The last layer, the normalizations and the biases go to AdamW.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import oxidion


class Block(nn.Module):
    """Two convolutions with batch normalization, and a shortcut around them."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(out_channels)
        self.second = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Conv2d(channels, out_channels, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """The images through both paths."""
        inner = F.relu(self.first_norm(self.first(images)))
        return F.relu(self.second_norm(self.second(inner)) + self.shortcut(images))


class ResNet(nn.Module):
    """A stem, blocks that halve the image, and a linear output layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(
            Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the ten digits."""
        result: Tensor = self.head(self.blocks(F.relu(self.stem(images))).mean((2, 3)))
        return result


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and digits to train on, and those held out."""
    pixels, targets = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16 - 0.3
    numbers = torch.from_numpy(targets).long()
    held_out = torch.arange(len(images)) % 5 == 0
    return images[~held_out], numbers[~held_out], images[held_out], numbers[held_out]


def main() -> int:
    """Trains and prints the accuracy on the images that were held out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", choices=("AdamW", "Dion", "Muon", "NorMuon"), default="Muon")
    parser.add_argument("--lr", type=float, default=0.02, help="of the filters")
    parser.add_argument("--scalar-lr", type=float, default=3e-3, help="of the last layer, norms and biases")
    parser.add_argument("--epochs", type=int, default=5, help="times that every image is seen")
    parser.add_argument("--batch", type=int, default=64, help="images in a step")
    parser.add_argument("--width", type=int, default=16, help="channels of the stem")
    parser.add_argument("--seed", type=int, default=0, help="weights and order of the images")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    images, targets, held_images, held_targets = digits()
    model = ResNet(options.width)
    optimizer = getattr(oxidion, options.optimizer)(
        model, lr=options.lr, scalar_lr=options.scalar_lr, weight_decay=0.01
    )
    steps = options.epochs * (len(images) // options.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        [group["lr"] for group in optimizer.param_groups],
        total_steps=steps,
        cycle_momentum=False,
    )
    for epoch in range(options.epochs):
        model.train()
        order = torch.randperm(len(images)).split(options.batch)
        for chosen in order[: len(images) // options.batch]:
            loss = F.cross_entropy(model(images[chosen]), targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            right = (model(held_images).argmax(1) == held_targets).double().mean().item()
        done = f"epoch {epoch + 1}, loss {loss.item():.3f}"
        print(f"{options.optimizer}: {done}, held-out accuracy {right:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
