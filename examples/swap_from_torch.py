"""The smallest swap: a script that trains with ``torch.optim.AdamW``, and what changes for ``oxidion.Dion``.

A student network learns a teacher of the same shape; only the lines that make the optimizer differ:

    python examples/swap_from_torch.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import oxidion


def network(seed: int) -> nn.Sequential:
    """A two-layer network with weights from ``seed``."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> tuple[float, float]:
    """Fits the teacher's answers to fixed inputs; returns the loss before and after."""
    inputs = torch.randn(256, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        targets = network(seed=1)(inputs)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    losses = []
    for _ in range(steps + 1):
        loss = F.mse_loss(model(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return losses[0], losses[-1]


def main() -> None:
    """Trains twice from the same weights and prints both losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="full-batch steps of each training")
    steps = parser.parse_args().steps
    model = network(seed=0)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    print("torch.optim.AdamW: loss {:.4f} -> {:.6f}".format(*train(model, optimizer, steps)))

    model = network(seed=0)
    optimizer = oxidion.Dion(model, lr=0.03, scalar_algorithm="adamw", scalar_lr=0.01)
    print("oxidion.Dion:      loss {:.4f} -> {:.6f}".format(*train(model, optimizer, steps)))


if __name__ == "__main__":
    main()
