"""A script written for ColossalAI: the imports are changed, the lines that build the optimizer are not.

    python examples/coming_from/colossalai.py --folder runs/adafactor
    torchrun --nproc-per-node 2 examples/coming_from/colossalai.py --fs 2 --folder runs/adafactor --steps 80
    torchrun --nproc-per-node 4 examples/coming_from/colossalai.py --fs 2 --tp 2 --optimizer galore
    torchrun --nproc-per-node 2 examples/coming_from/colossalai.py --dp 2

torch's FSDP2, tensor parallelism and DDP replace ColossalAI's plugins.
"""

from __future__ import annotations

import argparse

from torch import nn
from torch.optim import Optimizer

from layouts import Job, Model
from oxidion.compat.colossalai import (  # was: from colossalai.nn.optimizer import ...
    DistGaloreAwamW,
    DistributedAdaFactor,
    DistributedCAME,
    DistributedLamb,
    get_galore_param_groups,
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this script."""
    parser.add_argument("--optimizer", choices=("adafactor", "came", "galore", "lamb"), default="adafactor")


def build_optimizer(model: nn.Module, job: Job) -> Optimizer:
    """Arguments as ColossalAI's classes take them."""
    match job.options.optimizer:
        case "galore":
            return DistGaloreAwamW(get_galore_param_groups(model, decay=1e-2, rank=4), nbits=32)
        case "lamb":
            return DistributedLamb(model.parameters(), lr=1e-2, weight_decay=0.1)
        case "came":
            return DistributedCAME(model.parameters(), lr=2e-3)
    return DistributedAdaFactor(model.parameters())


def main() -> None:
    """Trains until the last step, from the newest checkpoint on."""
    job = Job(__doc__, add_options)
    model = job.distribute(Model())
    optimizer = build_optimizer(model, job)
    for step in range(job.resume(model, optimizer), job.options.steps):
        loss = model(job.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.report(step, loss)
        if job.is_to_save(step + 1):
            optimizer.synchronize_for_checkpoint()
            job.save(step + 1, model, optimizer)
    job.close()


if __name__ == "__main__":
    main()
