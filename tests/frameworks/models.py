"""A model with what adapters sort, and where packages of other frameworks are found."""

from __future__ import annotations

import importlib
import os
import sys
import typing
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import typing_extensions
from torch import Tensor, nn

MATRICES = {"block.attn.weight", "block.mlp.weight"}
REST = {"embed.weight", "block.attn.bias", "block.mlp.bias", "norm.weight", "norm.bias", "lm_head.weight"}


class Tiny(nn.Module):
    """A language model in small: an embedding, a block of two layers, a norm, an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.block = nn.ModuleDict({"attn": nn.Linear(6, 8), "mlp": nn.Linear(8, 8)})
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 10, bias=False)
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        inner = self.block["mlp"](self.block["attn"](self.embed(tokens)).tanh())
        logits: Tensor = self.lm_head(self.norm(inner))
        return logits


def tiny(seed: int = 0) -> Tiny:
    """The model with weights of a seed."""
    torch.manual_seed(seed)
    return Tiny()


def backward(model: nn.Module) -> None:
    """Gradients of a loss."""
    model(torch.arange(10)).square().sum().backward()


def names(model: nn.Module, params: Any) -> set[str]:
    """Names of parameters in the model."""
    held = {id(param) for param in params}
    return {name for name, param in model.named_parameters() if id(param) in held}


def peer(module: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of another framework as it is installed; skips the test where it is not.

    ``OXIDION_PEERS`` names a folder of packages behind those of this environment.
    """
    if folder := os.environ.get("OXIDION_PEERS"):
        monkeypatch.setattr(sys, "path", [*sys.path, str(Path(folder).expanduser().resolve())])
    # Some need Python 3.12 for this name alone.
    monkeypatch.setattr(typing, "override", typing_extensions.override, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(module)
        except ImportError as error:
            pytest.skip(f"{module} cannot be imported: {error}")
