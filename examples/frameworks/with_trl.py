"""Fine-tunes a tiny Llama with TRL's SFTTrainer and Muon, and resumes it from a checkpoint bit for bit.

    python examples/frameworks/with_trl.py
    python examples/frameworks/with_trl.py --lora

Model, tokenizer and data are made here: nothing is downloaded. With ``--lora`` PEFT's adapters are
trained.

- ``SFTConfig.learning_rate`` and ``weight_decay`` do not reach a factory: give them to it.
- ``SFTConfig`` sets ``bf16=True``, and TRL casts adapters over a quantized base to bfloat16: those lose
  small updates without ``master_weights=True``.
- The base of the adapters has to be the same model when a run is resumed.
- Trainers that take no ``optimizer_cls_and_kwargs`` take ``optimizers=(oxidion.Muon(model, ...),
  None)``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from oxidion.compat.hf import OptimizerFactory

NUMBERS = 64


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each number, and one each for the end and for padding."""
    words = {str(number): number for number in range(NUMBERS)} | {"<end>": NUMBERS, "<pad>": NUMBERS + 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def tiny_model(seed: int) -> LlamaForCausalLM:
    """A Llama of two layers with random weights."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"eos_token_id": NUMBERS, "pad_token_id": NUMBERS + 1, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=NUMBERS + 2, max_position_embeddings=64, **sizes, **ends))


def dataset() -> Dataset:
    """Prompts with a number, completed by the numbers that follow."""
    rows = [[str((start + k) % NUMBERS) for k in range(8)] for start in range(NUMBERS)]
    return Dataset.from_list([{"prompt": row[0], "completion": " " + " ".join(row[1:])} for row in rows])


def build_trainer(folder: Path, steps: int, seed: int, lora: bool) -> SFTTrainer:
    """An SFTTrainer with a new model; it writes a checkpoint when half of the steps are done."""
    args = SFTConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        max_length=32,
        lr_scheduler_type="constant",
        save_steps=steps // 2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    kwargs = {"optimizer": "Muon", "lr": 0.02, "weight_decay": 0.0, "groups": {"scalar_lr": 3e-3}}
    trainer = SFTTrainer(
        tiny_model(seed),
        args,
        train_dataset=dataset(),
        processing_class=build_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear") if lora else None,
        optimizer_cls_and_kwargs=(OptimizerFactory, kwargs),
    )
    return trainer


def main() -> int:
    """Trains, resumes from the checkpoint with other initial weights, and compares the ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="length of the run, even")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 4")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainer = build_trainer(folder, options.steps, 0, options.lora)
        result = trainer.train()
        # Adapters are trained over the same base; else the initial weights are others.
        resumed = build_trainer(folder, options.steps, 0 if options.lora else 1, options.lora)
        resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{options.steps // 2}"))

    equal = all(map(torch.equal, trainer.model.parameters(), resumed.model.parameters()))
    print(f"{options.steps} steps, mean loss {result.training_loss:.3f}")
    print(f"resumed at step {options.steps // 2}: bit-equal {equal}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
