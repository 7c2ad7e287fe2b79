"""A script written for microsoft/dion: the import is changed, the lines that build the optimizer are not.

    python examples/coming_from/microsoft_dion.py --folder runs/dion
    torchrun --nproc-per-node 2 examples/coming_from/microsoft_dion.py --fs 2 --folder runs/dion --steps 80
    torchrun --nproc-per-node 4 examples/coming_from/microsoft_dion.py --fs 2 --tp 2 --optimizer muon
    torchrun --nproc-per-node 2 examples/coming_from/microsoft_dion.py --dp 2 --compressed

Hidden matrices go to Dion or Muon, the LM head to Lion or AdamW at ``lr / sqrt(DIM)``, the rest to the same
at a tenth of ``lr``. With ``--compressed`` Dion averages low-rank factors over ``dp``, not gradients.

Dion has Q on the side of a matrix that ``outer_shard_mesh`` shards. ``layouts.py`` shards the shorter side,
which one process takes too, so a run goes on from checkpoints of any layout with the same losses.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

from torch import nn

from layouts import DIM, Job, Model, parameters_by_kind
from oxidion.compat.dion import Dion, Muon  # was: from dion import Dion, Muon


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this script."""
    parser.add_argument("--optimizer", choices=("dion", "muon"), default="dion")
    parser.add_argument("--scalars", choices=("lion", "adamw"), default="lion")
    parser.add_argument("--compressed", action="store_true", help="Dion averages over dp, not FSDP2 or DDP")


def build_optimizer(model: nn.Module, job: Job) -> Dion | Muon:
    """Groups and meshes as microsoft/dion takes them."""
    name, scalars, lr = job.options.optimizer, job.options.scalars, 0.01
    matrices, head, rest = parameters_by_kind(model)
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": head, "algorithm": scalars, "lr": lr / math.sqrt(DIM), "weight_decay": 0.0},
        {"params": rest, "algorithm": scalars, "lr": lr / 10, "weight_decay": 0.0},
    ]
    if name == "muon":
        sharded = job.options.fs > 1
        return Muon(groups, distributed_mesh=job.axis("fs" if sharded else "dp"), lr=lr, nesterov=True)
    return Dion(
        groups,
        replicate_mesh=job.axis("dp"),
        outer_shard_mesh=job.axis("fs"),
        inner_shard_mesh=job.axis("tp"),
        replicate_mesh_grad_sync=job.options.compressed,
        rank_fraction=0.25,
        lr=lr,
    )


def main() -> None:
    """Trains until the last step, from the newest checkpoint on."""
    job = Job(__doc__, add_options)
    model = job.distribute(Model(), average_gradients=not job.options.compressed)
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
