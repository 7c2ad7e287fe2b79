"""Muon for Megatron-Core through its registry of optimizers, next to Megatron's own Muon.

    python examples/frameworks/with_megatron.py

``get_megatron_optimizer(config, model_chunks)`` makes it: matrices are stepped by the class,
embeddings, the output layer, norms and biases by Megatron's Adam. A script of Megatron-LM passes
``extra_args_provider=oxidion.compat.megatron.extra_args`` to ``pretrain`` instead, and ``--optimizer
oxidion_muon``. What is read of the configuration, and what happens on which layout, is in
``help(oxidion.compat.megatron)``.

Run with Megatron-Core 0.19.2 and Emerging-Optimizers 0.3.0 on CPUs in float32: three steps equal those
of Megatron's Muon to 4e-6 of the update, also on two ranks of tensor parallelism in all three modes.
Its training loop needs a GPU and has not been run.
"""

from __future__ import annotations

from megatron.core.optimizer import OptimizerConfig

import oxidion.compat.megatron

name = oxidion.compat.megatron.register("Muon")  # "oxidion_muon"
config = OptimizerConfig(
    optimizer=name,
    lr=3e-4,
    weight_decay=0.1,
    bf16=True,
    muon_momentum=0.95,
    muon_nesterov=True,
    muon_scale_mode="spectral",
    muon_extra_scale_factor=0.2,
    muon_split_qkv=False,
)

if __name__ == "__main__":
    print(f"{config.optimizer} at {config.lr}")
