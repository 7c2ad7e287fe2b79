"""Contenders of the memory-efficient families: LAMB, Adafactor, CAME, 8-bit AdamW, GaLore.

Within a family all do the same job at the same settings; where a peer's equations differ, ``note`` says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from contender import LR, OURS, WD, Build, Contender
from workloads import ADAFACTOR, ADAMW8, CAME, GALORE, GALORE_REFRESH, LAMB, Tensors

RANK = 128


def flat(module: str, name: str, **settings: Any) -> Build:
    """All parameters in one group of a class."""

    def build(tensors: Tensors) -> list[Optimizer]:
        cls = getattr(importlib.import_module(module), name)
        return [cls(tensors.everything, lr=LR, weight_decay=WD, **settings)]

    return build


def _lamb() -> list[Contender]:
    theirs = "norm of the weight at most 10, decay outside the ratio"
    return [
        Contender("oxidion.Lamb", OURS, LAMB, flat("oxidion", "Lamb")),
        Contender(
            "pytorch_optimizer.Lamb", "pytorch_optimizer", LAMB, flat("pytorch_optimizer", "Lamb"), theirs
        ),
    ]


def _adafactor() -> list[Contender]:
    fixed = flat("oxidion", "Adafactor", relative_step=False)
    other = "eps bounds the mean of the row factor"
    return [
        Contender("oxidion.Adafactor", OURS, ADAFACTOR, fixed),
        Contender(
            "torch.optim.Adafactor default", "torch", ADAFACTOR, flat("torch.optim", "Adafactor"), other
        ),
        Contender(
            "torch.optim.Adafactor foreach",
            "torch",
            ADAFACTOR,
            flat("torch.optim", "Adafactor", foreach=True),
            other,
        ),
    ]


def _came() -> list[Contender]:
    return [
        Contender("oxidion.CAME", OURS, CAME, flat("oxidion", "CAME")),
        Contender("came_pytorch.CAME", "came-pytorch", CAME, flat("came_pytorch", "CAME")),
        Contender("pytorch_optimizer.CAME", "pytorch_optimizer", CAME, flat("pytorch_optimizer", "CAME")),
    ]


def _adamw8() -> list[Contender]:
    theirs = flat("torchao.optim", "AdamW8bit")
    return [
        Contender("oxidion.AdamW 8-bit", OURS, ADAMW8, flat("oxidion", "AdamW", state_bits=8)),
        Contender("oxidion.AdamW 32-bit", OURS, ADAMW8, flat("oxidion", "AdamW"), "states in float32"),
        Contender("torchao AdamW8bit eager", "torchao", ADAMW8, theirs, max_tensors=200),
        Contender("torchao AdamW8bit compiled", "torchao", ADAMW8, theirs, compiled=True, max_tensors=200),
    ]


def _low_rank(family: str, gap: int) -> Callable[[], list[Contender]]:
    """GaLore of rank 128 whose projections are computed every ``gap`` steps."""

    def groups(tensors: Tensors) -> list[dict[str, Any]]:
        keys = {"rank": RANK, "update_proj_gap": gap, "scale": 0.25, "proj_type": "std"}
        made: list[dict[str, Any]] = [{"params": tensors.matrices, **keys}]
        return [*made, {"params": tensors.others}] if tensors.others else made

    def ours(svd: str) -> Build:
        def build(tensors: Tensors) -> list[Optimizer]:
            oxidion = importlib.import_module("oxidion")
            return [oxidion.GaLoreAdamW(groups(tensors), lr=LR, weight_decay=WD, svd=svd)]

        return build

    def theirs(tensors: Tensors) -> list[Optimizer]:
        galore = importlib.import_module("galore_torch")
        return [
            galore.GaLoreAdamW(groups(tensors), lr=LR, weight_decay=WD, eps=1e-8, no_deprecation_warning=True)
        ]

    def table() -> list[Contender]:
        return [
            Contender("oxidion.GaLoreAdamW gram", OURS, family, ours("gram")),
            Contender(
                "oxidion.GaLoreAdamW exact",
                OURS,
                family,
                ours("exact"),
                "a singular value decomposition",
                max_tensors=10,
            ),
            Contender("oxidion.GaLoreAdamW random", OURS, family, ours("random"), "of a sketch"),
            Contender("galore_torch.GaLoreAdamW", "galore-torch", family, theirs),
        ]

    return table


TABLE: dict[str, Callable[[], list[Contender]]] = {
    LAMB: _lamb,
    ADAFACTOR: _adafactor,
    CAME: _came,
    ADAMW8: _adamw8,
    GALORE: _low_rank(GALORE, 1_000_000),
    GALORE_REFRESH: _low_rank(GALORE_REFRESH, 1),
}
"""The contenders of every family, ours first."""
