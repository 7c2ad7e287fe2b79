"""Trains LoRA adapters of a tiny Llama with PEFT and Muon, and resumes them from a checkpoint bit for bit.

    python examples/frameworks/with_peft.py

The base is random and frozen; the adapters and a copy of the output layer are trained.

- The optimizer has states of the adapters alone. What else is trained, as a copy of the output layer,
  goes to AdamW, and so do adapters of embeddings, which are tables.
- ``lora_B`` begins at zero, so ``lora_A`` moves from the second step on.
- An orthonormalized update does not depend on the size of a gradient, so ``lora_alpha`` acts in the
  forward pass only: after changing it, tune the learning rate again.
- Weight decay of adapters pulls towards the base. Zero is usual; the default of Muon is 0.01.
- Dion's ``rank_fraction`` is of the shorter side, here LoRA's rank: a fraction of a rank of 8 leaves
  little.
- ``save_pretrained`` writes adapters only: save the optimizer's state next to them, as here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from peft.utils import load_peft_weights
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import oxidion

VOCABULARY = 64


def adapted_model(seed: int) -> nn.Module:
    """A frozen Llama of two layers, the same for every seed, with new adapters of rank 4."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes))
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    return get_peft_model(base, config)


def build_optimizer(model: nn.Module) -> oxidion.Muon:
    """Muon for the adapters, AdamW for the trained copy of the head; what is frozen is left out."""
    return oxidion.Muon(model, lr=0.02, scalar_lr=3e-3, weight_decay=0.0)


def batch(step: int) -> Tensor:
    """Sequences that count upwards from random starts."""
    starts = torch.randint(VOCABULARY, (8, 1), generator=torch.Generator().manual_seed(step))
    return (starts + torch.arange(16)) % VOCABULARY


def train(model: nn.Module, optimizer: oxidion.Muon, steps: range) -> list[float]:
    """Takes steps; returns their losses."""
    losses = []
    for step in steps:
        tokens = batch(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    """Trains, resumes from a checkpoint of the middle with other initial adapters, and compares the ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="length of the run")
    options = parser.parse_args()
    half = options.steps // 2
    model = adapted_model(seed=1)
    base = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = build_optimizer(model)
    losses = train(model, optimizer, range(half))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder)
        with oxidion.checkpoint.whole_file(folder / "optimizer.pt") as file:
            torch.save(optimizer.state_dict(), file)
        losses += train(model, optimizer, range(half, options.steps))

        resumed = adapted_model(seed=2)
        set_peft_model_state_dict(resumed, load_peft_weights(folder))
        other = build_optimizer(resumed)
        other.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    train(resumed, other, range(half, options.steps))

    held = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    equal = all(map(torch.equal, model.parameters(), resumed.parameters()))
    untouched = all(torch.equal(p, base[name]) for name, p in model.named_parameters() if name in base)
    count = sum(p.numel() for p in model.parameters())
    print(f"{held} of {count} parameters are trained, the base untouched {untouched}")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"resumed at step {half}: bit-equal {equal}")
    return 0 if equal and untouched and losses[-1] < losses[0] - 0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
