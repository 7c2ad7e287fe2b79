"""Writes what `metrics()` measures of a step to TensorBoard or wandb.

    python examples/frameworks/with_logging.py
    python examples/frameworks/with_logging.py --to wandb

`metrics()` measures with the present gradients and changes nothing. Call it between ``backward()`` and
``step()``, now and then: it takes a step on copies. On several ranks all of them call `scalars`, and
one writes.

- ``optimizer/update_rms/...`` much larger for one parameter than for its like: its learning rate, or a
  spike.
- ``optimizer/param_rms/...`` growing without end: weight decay.
- ``optimizer/orthogonality_error/...`` above ``optimizer/expected/...`` by 0.3 or so: too few steps of
  the iteration.
- ``optimizer/captured_energy/...`` of Dion, falling: its rank is too small.
- ``optimizer/bytes_sent``: what this process gives to collectives in a step.

What does not change from step to step is a table: ``explain().to_dict()`` has its columns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import oxidion

EVERY = 50
"""Steps between two measurements."""


def scalars(optimizer: Any) -> dict[str, float]:
    """Measurements by name, as loggers take them."""
    table = optimizer.metrics()
    found = {
        f"optimizer/{key}/{row['name']}": value
        for row in table
        for key, value in row.items()
        if isinstance(value, float)
    }
    found["optimizer/bytes_sent"] = table.bytes_sent
    return found


def columns(optimizer: Any) -> dict[str, Any]:
    """Arguments of ``wandb.Table``: a row for each parameter."""
    rows = optimizer.explain().to_dict()
    return {"columns": list(rows), "data": list(zip(*rows.values(), strict=True))}


def train(write: Callable[[dict[str, float], int], None]) -> oxidion.Muon:
    """Trains a small network for 100 steps and writes measurements."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    optimizer = oxidion.Muon(model, lr=0.02, scalar_lr=1e-3, summary=False)
    for step in range(100):
        model(torch.randn(8, 64)).square().mean().backward()
        if step % EVERY == 0:
            write(scalars(optimizer), step)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def to_tensorboard(folder: str = "runs/muon") -> None:
    """Writes events into a folder."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)
    train(lambda values, step: [writer.add_scalar(name, value, step) for name, value in values.items()])
    writer.close()


def to_wandb() -> None:
    """Writes a run, which stays on this machine."""
    import wandb

    run = wandb.init(project="muon", mode="offline", config={"optimizer": "Muon"})
    optimizer = train(lambda values, step: run.log(values, step=step))
    run.log({"parameters": wandb.Table(**columns(optimizer))})
    run.finish()


def main() -> None:
    """Writes where the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", choices=("tensorboard", "wandb"), default="tensorboard")
    {"tensorboard": to_tensorboard, "wandb": to_wandb}[parser.parse_args().to]()


if __name__ == "__main__":
    main()
