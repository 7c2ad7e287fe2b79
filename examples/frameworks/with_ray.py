"""Trains a small network with Ray Train and Muon, and resumes it from a checkpoint bit for bit.

    pip install "ray[train]"
    python examples/frameworks/with_ray.py
    python examples/frameworks/with_ray.py --workers 2

With several workers ``prepare_model`` wraps the model in DistributedDataParallel, over gloo on CPUs.

- Make the optimizer in ``train_loop_per_worker``, after the model is wrapped. It has process groups and
  cannot be pickled; its ``state_dict()`` can.
- ``prepare_model`` with several workers is DistributedDataParallel, whose processes share the matrices.
  Using ``fully_shard`` instead works with every class.
- ``prepare_model(model, parallel_strategy="fsdp")`` flattens parameters: AdamW, Lion and AdEMAMix
  alone.
- ``prepare_optimizer`` is not needed: it prepares torch's gradient scaler, which works with the
  optimizer as it is.

Run with Ray 2.60.0 and torch 2.11 on CPUs, by one worker and by two; the tests run it where Ray is
installed, and everywhere over a stand-in.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.nn.functional as F
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import oxidion

FILE = "state.pt"


def network(seed: int) -> nn.Sequential:
    """Three layers with random weights."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """Trains in each worker, from a checkpoint if there is one; reports some, the last at the end."""
    torch.set_num_threads(1)
    model = ray.train.torch.prepare_model(network(config["seed"]))
    group = getattr(model, "process_group", None)  # of DistributedDataParallel
    optimizer = oxidion.Muon(model, lr=0.02, scalar_lr=0.01, weight_decay=0.01, distributed_mesh=group)
    plain, done = getattr(model, "module", model), 0
    if config["checkpoint"]:
        state = torch.load(Path(config["checkpoint"]) / FILE, weights_only=True)
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
    context, teacher = ray.train.get_context(), network(seed=2)
    for step in range(done, config["steps"]):
        everything = torch.randn(64, 32, generator=torch.Generator().manual_seed(step % 8))
        inputs = everything.chunk(context.get_world_size())[context.get_world_rank()]
        with torch.no_grad():
            targets = teacher(inputs)
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 not in (1, config["steps"] // 2, config["steps"]):
            continue
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if context.get_world_rank() == 0:
                state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "done": step + 1}
                torch.save(state, Path(folder) / FILE)
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report({"loss": loss.item()}, checkpoint=checkpoint)


def fit(folder: Path, name: str, workers: int, **config: Any) -> list[tuple[Checkpoint, dict[str, Any]]]:
    """Runs the workers; returns their checkpoints with what was reported, in order."""
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name=name, storage_path=str(folder), checkpoint_config=CheckpointConfig()),
    )
    return trainer.fit().best_checkpoints


def main() -> int:
    """Trains, resumes from a checkpoint of the middle with other initial weights, and compares the ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="length of the run")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    options = parser.parse_args()
    ray.init(num_cpus=options.workers + 1, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kept = fit(folder, "whole", options.workers, seed=0, steps=options.steps, checkpoint="")
        middle = kept[1][0].path
        resumed = fit(folder, "rest", options.workers, seed=1, steps=options.steps, checkpoint=middle)
        ends = [torch.load(Path(run[-1][0].path) / FILE, weights_only=True) for run in (kept, resumed)]
    ray.shutdown()

    one, other = (end["model"].values() for end in ends)
    equal = all(map(torch.equal, one, other))
    first, last = kept[0][1]["loss"], kept[-1][1]["loss"]
    print(f"{options.workers} workers, loss {first:.3f} -> {last:.4f}")
    print(f"resumed at step {options.steps // 2}: bit-equal {equal}")
    return 0 if equal and last < first / 2 else 1


if __name__ == "__main__":
    sys.exit(main())
