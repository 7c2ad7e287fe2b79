"""Trains a tiny Llama with transformers' Trainer and Dion, and resumes it from a checkpoint bit for bit.

    python examples/frameworks/with_transformers.py
    torchrun --standalone --nproc-per-node 2 examples/frameworks/with_transformers.py

Under torchrun the Trainer wraps the model in DistributedDataParallel; on a CPU the processes meet over
gloo.

- `from_name("muon", args, scalar_lr=3e-4)` of ``oxidion.compat.hf`` is shorter than the factory used
  here and reads ``learning_rate`` and ``weight_decay`` of the matrices, and Adam's betas and epsilon,
  from ``TrainingArguments``. It takes transformers' own names too.
  ``optim_args="scalar_lr=3e-4,mu=0.9"`` has arguments of the class.
- A factory is not reached by ``TrainingArguments``: give it ``lr``, ``scalar_lr`` and ``weight_decay``.
  Schedules of the Trainer scale both rates; those of torch that set one rate take a list.
- ``(oxidion.Muon, {...})`` in place of the factory is a ValueError: the Trainer hands over no model,
  and norms and biases would be among the matrices.
- The arguments have to be the same whenever a run is resumed: states belong to positions in groups.
- ``max_grad_norm`` is 1.0 unless set, and harmless: orthonormalized updates do not depend on the size
  of a gradient.
- ``bf16=True`` is autocast. A model that was loaded in bfloat16 loses small updates without
  ``master_weights=True``.
- On several processes the optimizer is made before the model is wrapped, so each repeats the whole
  step. Add ``distributed_mesh=torch.distributed.group.WORLD``, after ``TrainingArguments`` are made.
  ``fsdp`` is Accelerate's: version 2 only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from oxidion.compat.hf import OptimizerFactory

VOCABULARY = 64


def tiny_model(seed: int) -> LlamaForCausalLM:
    """A Llama of two layers with random weights."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes))


def sequences(count: int = 256, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Sequences that count upwards from random starts: the next token is the last one and one."""
    starts = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(0))
    tokens = (starts + torch.arange(length)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


def build_trainer(folder: Path, steps: int, seed: int, bf16: bool) -> Trainer:
    """A Trainer with a new model; it writes a checkpoint when half of the steps are done."""
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_grad_norm=1.0,
        bf16=bf16,
        save_strategy="steps",
        save_steps=steps // 2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
    )
    kwargs = {"optimizer": "Dion", "lr": 0.02, "weight_decay": 0.01, "groups": {"scalar_lr": 3e-3}}
    trainer = Trainer(
        tiny_model(seed),
        args,
        train_dataset=sequences(),
        optimizer_cls_and_kwargs=(OptimizerFactory, kwargs),
    )
    return trainer


def main() -> int:
    """Trains, resumes from the checkpoint with other initial weights, and compares the ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="length of the run, even")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    options = parser.parse_args()
    folder = Path(tempfile.gettempdir()) / f"with_transformers-{os.getppid()}"  # the same in all processes

    trainer = build_trainer(folder, options.steps, seed=0, bf16=options.bf16)
    result = trainer.train()
    resumed = build_trainer(folder, options.steps, seed=1, bf16=options.bf16)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{options.steps // 2}"))

    ends = zip(trainer.model.parameters(), resumed.model.parameters(), strict=True)
    equal = all(torch.equal(one, other) for one, other in ends)
    if trainer.is_world_process_zero():
        print(f"{options.steps} steps, mean loss {result.training_loss:.3f}")
        print(f"resumed at step {options.steps // 2}: bit-equal {equal}")
        shutil.rmtree(folder)
    return 0 if equal else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads of gloo outlive their group, and may abort while Python is torn down
