"""The optimizers of a torchtitan configuration: matrices by Muon, the rest by AdamW, by patterns of names.

    python examples/frameworks/with_torchtitan.py

Put `config` into the module of your configurations, where ``Trainer.Config(optimizer=...)`` takes it.

- ``register()`` has to be called before the trainer is built. It adds "oxidion.Muon", "oxidion.Dion"
  and the others.
- A parameter of one dimension that a pattern gives to Muon or Dion is a ValueError that names it.
  Weights of experts have names without ``weight``: give them a pattern of their own, they are stacks of
  matrices.
- ``optimizer_kwargs`` are keys of the group, arguments of a constructor go to
  ``optimizer_factory_kwargs_by_name``.
- ``implementation`` chooses nothing here: give ``state_dtype="bfloat16"`` or ``state_bits=8`` in
  ``optimizer_kwargs`` for small states.
- FSDP2, HSDP, tensor and expert parallelism are read from the DTensors that ``parallelize`` makes.
- States are made with the optimizer, so that a checkpoint of step 0 has them, and
  ``synchronize_for_checkpoint()`` is called before each state dict.

The trainer of torchtitan 0.3.0 needs a torch newer than 2.11. Its container of optimizers works with
2.11: building, stepping, schedules and a checkpoint that goes on to the last bit were run in one
process.
"""

from __future__ import annotations

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

import oxidion.compat.titan

oxidion.compat.titan.register()

config = OptimizersContainer.Config(
    param_groups=[
        ParamGroupConfig(
            pattern=r"^layers\..*\.weight$(?<!norm\.weight)",
            optimizer_name="oxidion.Muon",
            optimizer_kwargs={"lr": 0.02, "weight_decay": 0.01},
        ),
        ParamGroupConfig(
            pattern=r".*",  # embeddings, norms, the output layer
            optimizer_name="oxidion.AdamW",
            optimizer_kwargs={"lr": 3e-4, "weight_decay": 0.0},
        ),
    ],
)


def model() -> nn.ModuleDict:
    """A layer by torchtitan's names."""
    layer = nn.ModuleDict({"wq": nn.Linear(4, 4, bias=False), "attention_norm": nn.RMSNorm(4)})
    return nn.ModuleDict({"tok_embeddings": nn.Embedding(5, 4), "layers": nn.ModuleDict({"0": layer})})


def main() -> int:
    """Steps the optimizers once."""
    net = model()
    optimizers = OptimizersContainer(config, model_parts=[net])
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    optimizers.step()
    for optimizer in optimizers:
        names = [name for group in optimizer.param_groups for name in group["param_names"]]
        print(f"{type(optimizer).__name__}: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
