"""Muon for verl, which is given plain parameters and takes a function by the name of its module.

    python examples/frameworks/with_verl.py
    torchrun --standalone --nproc-per-node 2 examples/frameworks/with_verl.py

Put `muon` into a module that verl's workers import, and name it in the configuration of an actor or of
supervised training:

    optim.optimizer_impl=my_module optim.optimizer=muon optim.lr=1e-6
    +optim.override_optimizer_config.vocabulary=151936

- verl passes parameters without names, so embeddings and the output layer are recognized by one
  dimension: the vocabulary, which tensor parallelism and padding may have changed. The function raises
  an error where no parameter has it.
- With ``adjust_lr="match_rms_adamw"`` one rate, that of AdamW, serves matrices and the rest.
- Classes for parameters of any shape need no function: ``optim.optimizer_impl=oxidion
  optim.optimizer=AdamW``.
- The actor's strategy has to be ``fsdp2``: FSDP1 flattens parameters.
- Call ``synchronize_for_checkpoint()`` on all ranks before a checkpoint where Dion or SOAP has
  owner-sharded states; Muon needs no call.

Its workers need GPUs and have not been run; the script makes verl's call in its own words, also on
shards.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import oxidion


def muon(params: Iterable[Tensor], *, vocabulary: int, **settings: Any) -> oxidion.Muon:
    """Builds Muon for matrices without a side of the vocabulary's size, AdamW for all other parameters.

    Args:
        params: of a model, without names, sharded or not.
        vocabulary: rows of the embedding and of the output layer.
        **settings: ``lr``, ``weight_decay`` and ``betas`` of verl's configuration, and arguments of Muon.

    Raises:
        ValueError: for a vocabulary that no parameter has.
    """
    known = [param for param in params if param.requires_grad]
    tables = [param for param in known if param.ndim == 2 and vocabulary in param.shape]
    if not tables:
        raise ValueError(f"vocabulary must be a side of the embedding, got {vocabulary}")
    others = {id(param) for param in known if param.ndim < 2} | {id(param) for param in tables}
    groups = [
        {"params": [param for param in known if id(param) not in others]},
        {"params": [param for param in known if id(param) in others], "algorithm": "adamw"},
    ]
    return oxidion.Muon(groups, adjust_lr="match_rms_adamw", **settings)


def as_verl_makes_it(params: Iterable[Tensor], config: dict[str, Any]) -> Any:
    """The optimizer of a configuration: verl imports a module and calls what it names."""
    maker = getattr(importlib.import_module(config["optimizer_impl"]), config["optimizer"])
    keys = ("lr", "weight_decay", "betas")
    return maker(params, **{key: config[key] for key in keys}, **config["override_optimizer_config"])


def main() -> int:
    """Trains a small network, and tests that its loss falls."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 64))
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    config = {"optimizer_impl": "with_verl", "optimizer": "muon", "lr": 0.01, "weight_decay": 0.01}
    config |= {"betas": (0.9, 0.999), "override_optimizer_config": {"vocabulary": 64, "nesterov": True}}
    optimizer = as_verl_makes_it(model.parameters(), config)
    kinds = [(group["algorithm"], len(group["params"])) for group in optimizer.param_groups]
    words, losses = torch.arange(128).view(4, 32) % 61, []
    for _ in range(10):
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if world == 1 or dist.get_rank() == 0:
        print(f"{kinds}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return 0 if losses[-1] < losses[0] else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
