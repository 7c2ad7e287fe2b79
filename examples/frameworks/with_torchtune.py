"""Fine-tunes a tiny Llama by a recipe of torchtune with Muon or 8-bit AdamW, and resumes it bit for bit.

    pip install torchtune "torchao==0.13.*"
    python examples/frameworks/with_torchtune.py
    python examples/frameworks/with_torchtune.py --optimizer adamw

The recipe is the one for a single device, here on the CPU; everything else is in its configuration.

- Classes for parameters of any shape need a line of the configuration: ``_component_: oxidion.AdamW``.
  Recipes pass parameters without names, so Muon, Dion and their relatives need `_setup_optimizer` of a
  recipe of your own, to which ``tune cp full_finetune_single_device .`` is the beginning.
- Recipes refuse groups whose rates differ ("LR Schedulers are different across all param groups"). With
  ``adjust_lr="match_rms_adamw"`` one rate, that of AdamW, serves all.
- ``optimizer_in_bwd: True`` makes an optimizer for each parameter: it works for any shape, and many
  small steps are slower than one.
- ``resume_from_checkpoint: True`` goes on from the end of an epoch; ``checkpoint_files`` then names
  that epoch's file.
- torchtune 0.6.1 imports what torchao has lost since, and peft refuses a torchao that old: give it an
  environment.

Run with torchtune 0.6.1, torchao 0.13 and torch 2.11 on a CPU; the tests run it where torchtune is
installed, and everywhere over a stand-in.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torchtune
from omegaconf import OmegaConf
from torch.utils.data import Dataset
from torchtune.models.llama2 import llama2

import oxidion

# Recipes are files that `tune cp` copies and no package: here the file is read where pip has put it.
sys.path.append(str(Path(torchtune.__file__).parents[1] / "recipes"))
from full_finetune_single_device import FullFinetuneRecipeSingleDevice

SIZES = {
    "vocab_size": 64,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "max_seq_len": 32,
    "intermediate_dim": 64,
}
FILE = "model-00001-of-00001.bin"  # as the checkpointer names it


class Tokenizer:
    """The part of a tokenizer that a recipe asks for: the number of the padding."""

    pad_id = 0


class Counting(Dataset):
    """Sequences that count upwards from random starts: the next token is the last one and one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Makes the sequences; there is no text to be read."""
        starts = torch.randint(SIZES["vocab_size"], (256, 1), generator=torch.Generator().manual_seed(0))
        self.rows = ((starts + torch.arange(16)) % SIZES["vocab_size"]).tolist()

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """One of them, with its tokens as labels."""
        return {"tokens": self.rows[index], "labels": self.rows[index]}


class Recipe(FullFinetuneRecipeSingleDevice):
    """The recipe with Muon for the matrices and AdamW for the rest."""

    def _setup_optimizer(
        self, cfg_optimizer: Any, optimizer_in_bwd: bool = False, opt_state_dict: dict[str, Any] | None = None
    ) -> oxidion.Muon:
        """Sorts the parameters; one rate for all, which recipes ask for, suits both by AdamW's size."""
        optimizer = oxidion.Muon(
            self._model, lr=cfg_optimizer.lr, weight_decay=0.01, adjust_lr="match_rms_adamw"
        )
        if opt_state_dict:
            optimizer.load_state_dict(opt_state_dict)
        return optimizer


OPTIMIZERS: dict[str, Any] = {
    "muon": (Recipe, {"lr": 1e-2}),
    "adamw": (FullFinetuneRecipeSingleDevice, {"_component_": "oxidion.AdamW", "lr": 1e-2, "state_bits": 8}),
}


def configuration(folder: Path, optimizer: dict[str, Any], resume: bool) -> Any:
    """Configuration of a recipe: two epochs that each end with a checkpoint."""
    return OmegaConf.create(
        {
            "output_dir": str(folder),
            "device": "cpu",
            "dtype": "fp32",
            "seed": 1 if resume else 0,
            "epochs": 2,
            "max_steps_per_epoch": None,
            "batch_size": 8,
            "shuffle": True,
            "gradient_accumulation_steps": 1,
            "clip_grad_norm": 1.0,
            "compile": False,
            "optimizer_in_bwd": False,
            "resume_from_checkpoint": resume,
            "optimizer": optimizer,
            "model": {"_component_": "torchtune.models.llama2.llama2", **SIZES},
            "tokenizer": {"_component_": f"{Path(__file__).stem}.Tokenizer"},
            "dataset": {"_component_": f"{Path(__file__).stem}.Counting"},
            "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
            "metric_logger": {
                "_component_": "torchtune.training.metric_logging.DiskLogger",
                "log_dir": str(folder / "logs"),
                "filename": "log.txt",
            },
            "lr_scheduler": {
                "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
                "num_warmup_steps": 4,
            },
            "checkpointer": {
                "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
                "checkpoint_dir": str(folder.parent / "start"),
                "checkpoint_files": [f"epoch_0/{FILE}" if resume else "start.pt"],
                "model_type": "LLAMA2",
                "output_dir": str(folder),
            },
        }
    )


def train(folder: Path, recipe_class: type, optimizer: dict[str, Any], resume: bool = False) -> None:
    """Runs a recipe from its configuration to its last checkpoint."""
    cfg = configuration(folder, optimizer, resume)
    recipe = recipe_class(cfg)
    recipe.setup(cfg)
    recipe.train()
    recipe.cleanup()


def end_of(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that the last epoch has left."""
    return torch.load(folder / "epoch_1" / FILE, weights_only=True)


def main() -> int:
    """Trains two epochs, the second one again from the checkpoint of the first, and compares the ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="muon")
    options = parser.parse_args()
    made = OPTIMIZERS[options.optimizer]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "start").mkdir()
        torch.manual_seed(0)
        torch.save(llama2(**SIZES).state_dict(), folder / "start" / "start.pt")
        train(folder / "run", *made)
        shutil.copytree(folder / "run", folder / "again")
        shutil.rmtree(folder / "again" / "epoch_1")
        train(folder / "again", *made, resume=True)
        one, other = end_of(folder / "run"), end_of(folder / "again")
        log = (folder / "run" / "logs" / "log.txt").read_text()
    losses = [float(line.split("loss:")[1].split()[0]) for line in log.splitlines() if "loss:" in line]

    equal = all(torch.equal(one[key], other[key]) for key in one)
    print(f"{options.optimizer}, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"resumed after the first epoch: bit-equal {equal}")
    return 0 if equal and losses[-1] < losses[0] / 2 else 1


if __name__ == "__main__":
    sys.exit(main())
