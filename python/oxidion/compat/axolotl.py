"""Plugin for axolotl, which its configuration files name: ``plugins: [oxidion.compat.axolotl.Plugin]``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from oxidion import optim
from oxidion._core.base import OxOptimizer
from oxidion._core.constructor import SCALAR
from oxidion.compat.hf import read_optim_args
from oxidion.groups import algorithms

_base: Any = importlib.import_module("axolotl.integrations.base")

NAMES = {"muon": ("Muon", 32), "muon_8bit": ("Muon", 8), "dion": ("Dion", 32)}
"""Values of ``optimizer`` that the plugin takes: the class, and the bits of its states."""

NOT_READ = ("lr_groups", "embedding_lr", "embedding_lr_scale", "loraplus_lr_ratio")
"""Keys that ask for groups which the plugin does not make."""


def _word(cfg: Mapping[str, Any]) -> str:
    """The value of ``optimizer``, which may be a member of an enumeration."""
    given = cfg.get("optimizer")
    return str(getattr(given, "value", given))


ADAM_BETAS = (0.9, 0.999)
"""Defaults of ``adam_beta1`` and ``adam_beta2`` of transformers' ``TrainingArguments``."""


def _adam(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the groups of AdamW."""
    keys: dict[str, Any] = {}
    betas = [cfg.get(key) for key in ("adam_beta1", "adam_beta2")]
    if betas != [None, None]:
        # The one that is left out is that of transformers' arguments, which axolotl fills in too.
        keys["betas"] = tuple(
            default if beta is None else float(beta) for beta, default in zip(betas, ADAM_BETAS, strict=True)
        )
    if cfg.get("adam_epsilon") is not None:
        keys["eps"] = float(cfg["adam_epsilon"])
    return keys


def _dion(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of Dion."""
    names = {
        "dion_lr": "lr",
        "dion_momentum": "mu",
        "dion_rank_fraction": "rank_fraction",
        "dion_rank_multiple_of": "rank_multiple_of",
    }
    return {own: cfg[key] for key, own in names.items() if cfg.get(key) is not None}


def make(model: nn.Module, cfg: Mapping[str, Any]) -> OxOptimizer:
    """The optimizer that a configuration asks for.

    Matrices are stepped by Muon or Dion, embeddings, the output layer, norms and biases by AdamW with
    ``learning_rate``, the betas and ``adam_epsilon``. Matrices have ``dion_lr`` where it is given, else
    ``learning_rate`` too; ``weight_decay`` is theirs.

    Args:
        model: as axolotl has loaded it, with its adapters, wrapped or not.
        cfg: the configuration; ``optim_args`` holds arguments of the class.

    Raises:
        ValueError: for keys that ask for other groups, and for values that the class does not take.
    """
    if given := [key for key in NOT_READ if cfg.get(key) is not None]:
        raise ValueError(
            f"{given[0]} is not read by oxidion.compat.axolotl: leave it out, or take an optimizer of "
            "axolotl's own"
        )
    name, bits = NAMES[_word(cfg)]
    lr = float(cfg["learning_rate"])
    keys = _dion(cfg) if name == "Dion" else {}
    decay = cfg.get("weight_decay")
    own = {"lr": lr, "weight_decay": 0.0 if decay is None else float(decay), "scalar_lr": lr, **keys}
    cls: Any = getattr(optim, name)
    arguments = read_optim_args(cfg.get("optim_args"))
    scalars = algorithms.wanted(arguments.get("scalar_algorithm", "adamw"), "scalar_algorithm")
    adam = {f"{SCALAR}{key}": value for key, value in _adam(cfg).items() if key in scalars._SCHEMA}
    made: OxOptimizer = cls(model, **{"state_bits": bits, **own, **adam, **arguments})
    return made


class Factory:
    """Factory that axolotl's trainers and transformers' call with the model, once it is wrapped."""

    def __call__(self, model: nn.Module, training_args: Any = None, *, cfg: Mapping[str, Any]) -> OxOptimizer:
        """The optimizer for the model; the arguments of the training are those of ``cfg`` already."""
        del training_args
        return make(model, cfg)


class Plugin(_base.BasePlugin):  # type: ignore[misc]  # of a package that need not be there
    """Steps of ``optimizer: muon``, ``muon_8bit`` and ``dion`` by this package instead of axolotl's own code.

    Other values of ``optimizer`` are left to axolotl.
    """

    def post_trainer_create(self, cfg: Mapping[str, Any], trainer: Any) -> None:
        """Gives the trainer the factory of its optimizer: axolotl 0.21 asks no plugin for it.

        Args:
            cfg: the configuration.
            trainer: of axolotl or of transformers.
        """
        if _word(cfg) in NAMES:
            trainer.optimizer_cls_and_kwargs = (Factory, {"cfg": cfg})

    def create_optimizer(self, cfg: Mapping[str, Any], trainer: Any) -> OxOptimizer | None:
        """The optimizer for the trainer's model; None where the configuration names another.

        Args:
            cfg: the configuration.
            trainer: that has the model.
        """
        return make(trainer.model, cfg) if _word(cfg) in NAMES else None
