"""Handwritten low-rank adapters: two thin matrices per layer adapt a frozen network to another task.

    python examples/train_lora.py
    python examples/train_lora.py --optimizer AdamW --lr 0.01 --rank 8

The adapters learn a teacher whose layers differ from those of the base by matrices of low rank. The base is
frozen, so the optimizer leaves it out. It does not know this class: ``overrides`` says that both thin
matrices are matrices. PEFT's adapters it knows, see ``frameworks/with_peft.py``.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oxidion

WIDTHS = (32, 64, 64, 16)
CHANGE = 2
"""Rank of what the teacher has and the base has not."""


class Adapted(nn.Module):
    """A frozen linear layer plus a low-rank ``up @ down``; ``up`` begins at zero."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        """The layer of the base plus the low-rank part."""
        result: Tensor = self.base(inputs) + inputs @ self.down.T @ self.up.T
        return result


def network(seed: int) -> nn.Sequential:
    """Linear layers with random weights and tanh between them."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for width, following in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(width, following), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def adapted(base: nn.Sequential, rank: int) -> nn.Sequential:
    """The network with an adapter at each linear layer."""
    return nn.Sequential(*(Adapted(part, rank) if isinstance(part, nn.Linear) else part for part in base))


def changed(base: nn.Sequential) -> nn.Sequential:
    """The base, to whose weights matrices of rank CHANGE are added."""
    teacher = copy.deepcopy(base)
    for layer in teacher:
        if isinstance(layer, nn.Linear):
            left, right = torch.randn(layer.out_features, CHANGE), torch.randn(CHANGE, layer.in_features)
            layer.weight.data += left @ right / (CHANGE * layer.in_features) ** 0.5 / 2
    return teacher


def main() -> int:
    """Adapts the base and prints the losses; fails where the base has changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", choices=("AdamW", "Dion", "Muon", "NorMuon"), default="Muon")
    parser.add_argument("--lr", type=float, default=0.02, help="of the thin matrices")
    parser.add_argument("--rank", type=int, default=4, help="of the adapters")
    parser.add_argument("--steps", type=int, default=200, help="full-batch steps")
    options = parser.parse_args()
    base = network(seed=1)
    teacher = changed(base)
    frozen = {name: weight.clone() for name, weight in base.state_dict().items()}
    model = adapted(base, options.rank)
    algorithm = getattr(oxidion, options.optimizer)
    optimizer = algorithm(model, lr=options.lr, weight_decay=0.0, overrides={Adapted: algorithm})
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=options.steps)
    inputs = torch.randn(512, WIDTHS[0])
    with torch.no_grad():
        targets = teacher(inputs)
    losses = []
    for _ in range(options.steps):
        loss = F.mse_loss(model(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    count = sum(p.numel() for p in model.parameters())
    print(f"{options.optimizer}: {trained} of {count} parameters are trained")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.5f}")
    same = all(torch.equal(weight, frozen[name]) for name, weight in base.state_dict().items())
    print(f"the base is unchanged: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
