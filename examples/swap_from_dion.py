"""The swap from microsoft/dion: the import changes, the lines that make the optimizer do not.

    python examples/swap_from_dion.py

A student network learns a teacher of the same shape. Where microsoft/dion is installed, which needs neither a
device nor several processes for this, the same lines make its optimizer too: it is compared with the one of
this package, and half a run of it is continued here from its checkpoint.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

import oxidion


def network(seed: int) -> nn.Sequential:
    """A two-layer network with weights from ``seed``."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))


def build_optimizer(package: ModuleType, model: nn.Module) -> torch.optim.Optimizer:
    """Dion for the matrices and AdamW for the biases: groups and arguments that both packages take."""
    matrices = [param for param in model.parameters() if param.ndim == 2]
    vectors = [param for param in model.parameters() if param.ndim < 2]
    groups = [
        {"params": matrices},
        {"params": vectors, "algorithm": "adamw", "lr": 0.01, "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = package.Dion(groups, lr=0.03, rank_fraction=0.25, weight_decay=0.01)
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Fits the teacher's answers to fixed inputs; returns the losses."""
    inputs = torch.randn(256, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        targets = network(seed=1)(inputs)
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(model(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def main() -> None:
    """Trains with each package that is there, then begins with one and goes on with the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="full-batch steps of each training")
    steps = parser.parse_args().steps
    names = ["dion", "oxidion"] if importlib.util.find_spec("dion") else ["oxidion"]
    for name in names:
        model = network(seed=0)
        losses = train(model, build_optimizer(importlib.import_module(name), model), steps)
        print(f"{name}.Dion: loss {losses[0]:.4f} -> {losses[-1]:.6f}")
    if "dion" not in names:
        print("microsoft/dion is not installed: no checkpoint of it to go on from")
        return
    model = network(seed=0)
    before = build_optimizer(importlib.import_module("dion"), model)
    losses = train(model, before, steps // 2)
    after = build_optimizer(oxidion, model)
    after.load_state_dict(before.state_dict())
    losses += train(model, after, steps - steps // 2)
    print(f"dion.Dion, then oxidion.Dion: loss {losses[0]:.4f} -> {losses[-1]:.6f}")


if __name__ == "__main__":
    main()
