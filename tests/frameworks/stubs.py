"""Stand-ins for frameworks, written from what they document: what an adapter calls, and what calls it."""

from __future__ import annotations

import argparse
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn


def installed(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> types.ModuleType:
    """A module of this name with its packages, which an import finds."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        whole = ".".join(parts[:end])
        module = types.ModuleType(whole)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, whole, module)
    for key, value in content.items():
        setattr(module, key, value)
    return module


# ------------------------------------------------------------------------------------------ torchtitan


@dataclass
class ParamGroupConfig:
    """A pattern of names, the optimizer that steps what it matches first, and its settings."""

    pattern: str
    optimizer_name: str
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)


class OptimizersContainer:
    """Optimizers by name, each over groups with ``param_names`` and the flags of an implementation."""

    def __init__(self, groups: list[ParamGroupConfig], model: nn.Module) -> None:
        by_name: dict[str, list[dict[str, Any]]] = {}
        left = dict(model.named_parameters())
        for group in groups:
            found = [name for name in left if re.search(group.pattern, name) and left[name].requires_grad]
            by_name.setdefault(group.optimizer_name, []).append(
                {
                    "params": [left.pop(name) for name in found],
                    "param_names": found,
                    "fused": True,
                    "foreach": False,
                    **group.optimizer_kwargs,
                }
            )
        self.optimizers = [self._resolve_optimizer_factory(name)(by_name[name]) for name in by_name]

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name != "AdamW":
            raise NotImplementedError(name)
        return torch.optim.AdamW

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def step(self) -> None:
        """A step of all."""
        for optimizer in self.optimizers:
            optimizer.step()


# --------------------------------------------------------------------------------------------- axolotl


class BasePlugin:
    """A plugin whose hooks do nothing."""

    def register(self, cfg: Any) -> None:
        """Receives the configuration."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Receives the trainer."""

    def create_optimizer(self, cfg: Any, trainer: Any) -> None:
        """Asked for an optimizer."""


# -------------------------------------------------------------------------------------------- Megatron


@dataclass
class EmergingOptimizerEntry:
    """What a registry of Megatron holds by name."""

    optimizer_cls: Any
    init_state_fn: Any = None
    config_to_kwargs: Any = None
    default_param_overrides: Any = field(default_factory=lambda: {"matrices": {"optimizer": "adam"}})


@dataclass
class Config:
    """Fields of ``OptimizerConfig`` that optimizers are made of, with its defaults."""

    lr: float = 0.01
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    muon_momentum: float = 0.95
    muon_split_qkv: bool = True
    muon_nesterov: bool = False
    muon_scale_mode: str = "spectral"
    muon_coefficient_type: str = "quintic"
    muon_num_ns_steps: int = 5
    muon_tp_mode: str = "blockwise"
    muon_extra_scale_factor: float = 1.0


def megatron(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The registry of Megatron-Core, and the coefficients of Emerging-Optimizers."""
    sets = {"simple": [(3.4445, -4.775, 2.0315)], "polar_express": [(8.0, -22.0, 16.0), (2.0, -1.5, 0.5)]}
    installed(monkeypatch, "emerging_optimizers.orthogonalized_optimizers.muon_utils", _COEFFICIENT_SETS=sets)
    return installed(
        monkeypatch,
        "megatron.core.optimizer.emerging_optimizers",
        EmergingOptimizerEntry=EmergingOptimizerEntry,
        _EMERGING_OPTIMIZERS={"muon": EmergingOptimizerEntry(object)},
    )


def groups_of(model: nn.Module, *, matrices: bool = True) -> list[dict[str, Any]]:
    """Groups as Megatron makes them, with keys of its scheduler."""
    keys = {
        "is_expert_parallel": False,
        "default_config": True,
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": 0.01,
        "min_lr": 0.0,
    }
    params = [p for p in model.parameters() if p.requires_grad and (p.ndim == 2 or not matrices)]
    return [{"params": params, **keys}, {"params": [], **keys, "wd_mult": 0.0}]


def parser() -> argparse.ArgumentParser:
    """Arguments of Megatron-LM as far as they name optimizers."""
    made = argparse.ArgumentParser()
    made.add_argument("--optimizer", default="adam", choices=["adam", "sgd", "muon"])
    return made
