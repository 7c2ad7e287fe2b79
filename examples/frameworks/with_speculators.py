"""Steps the optimizers that speculators makes of ``torch.optim``, with this package behind torch's names.

    python examples/frameworks/with_speculators.py
    torchrun --standalone --nproc-per-node 2 examples/frameworks/with_speculators.py

Replace torch's classes before importing a framework that calls ``torch.optim.Muon``:

    torch.optim.Muon = oxidion.compat.torch.Muon
    torch.optim.AdamW = oxidion.AdamW

- Muon is given matrices alone and has torch's defaults, groups and checkpoints. Under FSDP2 a matrix is
  sent to one owner and back, where torch gathers it on every rank in every product.
- AdamW is replaced for speed alone.

speculators trains draft models of large ones and has not been run; the script makes its calls in its
own words.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import oxidion
import oxidion.compat.torch


def build_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices, AdamW for vectors, and AdamW at Muon's rate for tables of words."""
    named = list(model.named_parameters())
    tables = [(name, param) for name, param in named if name.startswith(("embed_tokens", "lm_head"))]
    vectors = [(name, param) for name, param in named if param.ndim == 1]
    left_out = {name for name, _ in (*tables, *vectors)}
    matrices = [(name, param) for name, param in named if name not in left_out]
    return [
        torch.optim.Muon(
            matrices, lr=0.01, momentum=0.95, weight_decay=0.1, ns_steps=5, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(vectors, lr=0.001, weight_decay=0.01),
        torch.optim.AdamW(tables, lr=0.01, weight_decay=0.1),
    ]


class Draft(nn.Module):
    """A draft model with the names that are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 16)
        self.layer = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.LayerNorm(16))
        self.lm_head = nn.Linear(16, 64, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Logits of the next words."""
        logits: torch.Tensor = self.lm_head(self.layer(self.embed_tokens(words)))
        return logits


def main() -> int:
    """Trains a small draft model, and tests that its loss falls."""
    torch.optim.Muon = oxidion.compat.torch.Muon  # type: ignore[misc, assignment]
    torch.optim.AdamW = oxidion.AdamW  # type: ignore[misc, assignment]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Draft()
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizers = build_optimizers(model)
    words, losses = torch.arange(128).view(4, 32) % 61, []
    for _ in range(10):
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if world == 1 or dist.get_rank() == 0:
        made = ", ".join(type(optimizer).__module__ for optimizer in optimizers)
        print(f"{made}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return 0 if losses[-1] < losses[0] else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
