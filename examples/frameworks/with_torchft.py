"""Trains two replicas independently with Muon; torchft's DiLoCo synchronizes them every few steps.

    python examples/frameworks/with_torchft.py
    python examples/frameworks/with_torchft.py --optimizer Dion

Each replica is a process; they find each other through torchft's lighthouse and meet over gloo.

- Any class is an inner optimizer of DiLoCo. The outer one of the paper is SGD with Nesterov momentum.
- Within a replica there is one process, DDP or FSDP2, as everywhere. Momenta of the inner optimizer
  are kept when replicas synchronize, as in the paper.
- ``average="schedule_free"`` and ``weight_norm="hyperball"`` do not go with DiLoCo, which writes
  weights of its own between two steps.
- A replica that comes back gets ``state_dict()`` of the others, by the functions given to ``Manager``.

Run with torchft-nightly 2026.10.26 and torch 2.11 on CPUs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

import oxidion

SYNC_EVERY = 4
"""Steps between two synchronizations of the replicas."""
LIMIT = timedelta(seconds=30)


def network(seed: int) -> nn.Sequential:
    """Two layers with random weights."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))


def train(number: int, name: str, steps: int, lighthouse: str, answers: Any) -> None:
    """Trains one replica on data of its own."""
    torch.set_num_threads(1)
    model, teacher = network(seed=0), network(seed=1)
    inner = getattr(oxidion, name)(model, lr=0.02, scalar_lr=0.01, summary=False)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.5, nesterov=True)
    parts = {"model": model, "inner": inner, "outer": outer}
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        min_replica_size=2,
        use_async_quorum=False,
        # What a replica gets that joins later, or comes back.
        state_dict=lambda: {key: part.state_dict() for key, part in parts.items()},
        load_state_dict=lambda state: [part.load_state_dict(state[key]) for key, part in parts.items()],
        replica_id=f"replica-{number}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=LIMIT,
    )
    data, losses = torch.Generator().manual_seed(number), []
    with DiLoCo(manager, [model], inner, outer, sync_every=SYNC_EVERY):
        for _ in range(steps):
            inputs = torch.randn(64, 32, generator=data)
            with torch.no_grad():
                targets = teacher(inputs)
            loss = F.mse_loss(model(inputs), targets)
            inner.zero_grad()
            loss.backward()
            inner.step()
            losses.append(loss.item())
    answers.put((losses[0], losses[-1], [param.detach().tolist() for param in model.parameters()]))
    manager.shutdown(wait=False)


def main() -> int:
    """Starts both replicas and compares their weights behind the last meeting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", default="Muon", help="class of oxidion that steps within a replica")
    parser.add_argument("--steps", type=int, default=10 * SYNC_EVERY, help="steps, a multiple of SYNC_EVERY")
    options = parser.parse_args()
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    arguments = options.optimizer, options.steps, server.address(), answers
    replicas = [spawn.Process(target=train, args=(number, *arguments)) for number in range(2)]
    for replica in replicas:
        replica.start()
    (first, last, mine), (_, _, others) = (answers.get(timeout=120) for _ in replicas)
    for replica in replicas:
        replica.join(30)
    server.shutdown()
    print(f"loss {first:.3f} -> {last:.4f}")
    print(f"replicas bit-equal {mine == others}")
    return 0 if mine == others and last < first else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
