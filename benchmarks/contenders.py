"""Optimizers that the benchmarks race, by family, and whether each is installed.

Within a family every contender does the same job at the same settings (learning rate, momentum, weight decay,
nesterov); what differs on purpose, such as the polynomial of the orthonormalization, is named in ``note``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from contender import LR, OURS, WD, Build, Contender
from memory_contenders import TABLE
from workloads import ADAMW, DION2, DION_4, DION_16, LION, MUON, NORDION2, NORMUON, Tensors

#: Contenders of ours at other settings than the default.
FAST, HALF = "oxidion.Muon fast", "oxidion.Dion bf16"
NOT_INSTALLED = "not installed"

#: Import name of each source and the distribution that holds its version.
SOURCES = {
    OURS: ("oxidion", "oxidion"),
    "torch": ("torch", "torch"),
    "microsoft/dion": ("dion", ""),
    "pytorch_optimizer": ("pytorch_optimizer", "pytorch_optimizer"),
    "lion_pytorch": ("lion_pytorch", "lion-pytorch"),
    "came-pytorch": ("came_pytorch", "came-pytorch"),
    "torchao": ("torchao", "torchao"),
    "galore-torch": ("galore_torch", "galore-torch"),
    "heavyball": ("heavyball", "heavyball"),
}


def availability() -> dict[str, str]:
    """Version of every source, or ``not installed``, or why its import failed."""
    return {source: _version(*names) for source, names in SOURCES.items()}


def _version(module_name: str, distribution: str) -> str:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        return NOT_INSTALLED if error.name == module_name else f"import failed: {error}"
    except Exception as error:
        return f"import failed: {type(error).__name__}: {error}"
    try:
        return importlib.metadata.version(distribution or module_name)
    except importlib.metadata.PackageNotFoundError:
        return _checkout(Path(str(module.__file__)).parent) or str(
            getattr(module, "__version__", "unknown version")
        )


def _checkout(folder: Path) -> str:
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"commit {answer.stdout.strip()}" if answer.returncode == 0 else ""


def contenders(family: str, *, compiled: bool) -> list[Contender]:
    """Contenders of a family, ours first; compiled ones only when asked: they take minutes to compile."""
    table: dict[str, Callable[[], list[Contender]]] = {
        MUON: _muon,
        DION_4: lambda: _dion(DION_4, 1 / 4),
        DION_16: lambda: _dion(DION_16, 1 / 16),
        NORMUON: lambda: relative(NORMUON, "NorMuon"),
        DION2: lambda: relative(DION2, "Dion2", fraction=1 / 4),
        NORDION2: lambda: relative(NORDION2, "NorDion2", fraction=1 / 4),
        ADAMW: _adamw,
        LION: _lion,
        **TABLE,
    }
    return [entry for entry in table[family]() if compiled or not entry.compiled]


def _groups(tensors: Tensors, **matrix_settings: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = (
        [{"params": tensors.matrices, **matrix_settings}] if tensors.matrices else []
    )
    if tensors.others:
        groups.append({"params": tensors.others, "algorithm": "adamw"})
    return groups


def _muon() -> list[Contender]:
    def ours(**settings: Any) -> Build:
        def build(tensors: Tensors) -> list[Optimizer]:
            import oxidion

            return [oxidion.Muon(_groups(tensors), lr=LR, weight_decay=WD, nesterov=True, **settings)]

        return build

    def torch_muon(tensors: Tensors) -> list[Optimizer]:
        made: list[Optimizer] = [torch.optim.Muon(tensors.matrices, lr=LR, weight_decay=WD, nesterov=True)]
        if tensors.others:
            made.append(torch.optim.AdamW(tensors.others, lr=LR, weight_decay=WD, fused=True))
        return made

    def dion_muon(tensors: Tensors) -> list[Optimizer]:
        import dion

        return [dion.Muon(_groups(tensors), lr=LR, weight_decay=WD, nesterov=True)]

    def po_muon(tensors: Tensors) -> list[Optimizer]:
        import pytorch_optimizer

        groups: list[dict[str, Any]] = [
            {"params": tensors.matrices, "use_muon": True, "lr": LR, "weight_decay": WD}
        ]
        if tensors.others:
            groups.append({"params": tensors.others, "use_muon": False, "lr": LR, "weight_decay": WD})
        return [pytorch_optimizer.Muon(groups)]

    def heavyball_muon(tensors: Tensors) -> list[Optimizer]:
        import heavyball

        settings = {"lr": LR, "weight_decay": WD, "consume_grad": False}
        made: list[Optimizer] = [heavyball.Muon(tensors.matrices, nesterov=True, **settings)]
        return [*made, heavyball.AdamW(tensors.others, **settings)] if tensors.others else made

    polar = "Polar Express, 5 iterations, bfloat16 eager rounding"
    return [
        Contender("oxidion.Muon", OURS, MUON, ours(), "exact-5: Polar Express, 5 iterations"),
        Contender(FAST, OURS, MUON, ours(orth_preset="fast"), "fast-4: Schatten-8 norm, 4 iterations"),
        Contender("torch.optim.Muon", "torch", MUON, torch_muon, "fixed quintic, 5 iterations, bfloat16"),
        Contender("dion.Muon eager", "microsoft/dion", MUON, dion_muon, polar),
        Contender(
            "dion.Muon compiled", "microsoft/dion", MUON, dion_muon, polar, compiled=True, max_tensors=200
        ),
        Contender(
            "pytorch_optimizer.Muon",
            "pytorch_optimizer",
            MUON,
            po_muon,
            "fixed quintic, 5 iterations",
            max_tensors=50,
        ),
        Contender(
            "heavyball.Muon compiled",
            "heavyball",
            MUON,
            heavyball_muon,
            "five different quintics, bfloat16",
            compiled=True,
            max_tensors=10,
        ),
    ]


def _dion(family: str, fraction: float) -> list[Contender]:
    def ours(**settings: Any) -> Build:
        def build(tensors: Tensors) -> list[Optimizer]:
            import oxidion

            return [
                oxidion.Dion(_groups(tensors), lr=LR, weight_decay=WD, rank_fraction=fraction, **settings)
            ]

        return build

    def peer(tensors: Tensors) -> list[Optimizer]:
        import dion

        return [dion.Dion(_groups(tensors), lr=LR, weight_decay=WD, rank_fraction=fraction)]

    return [
        Contender("oxidion.Dion", OURS, family, ours()),
        Contender(HALF, OURS, family, ours(orth_dtype="bfloat16"), "products in bfloat16"),
        Contender("dion.Dion eager", "microsoft/dion", family, peer),
        Contender("dion.Dion compiled", "microsoft/dion", family, peer, compiled=True, max_tensors=200),
    ]


def relative(family: str, name: str, **settings: Any) -> list[Contender]:
    """A class of ours and the one of the same name in microsoft/dion."""
    ours, theirs = (of_class(package, name, **settings) for package in ("oxidion", "dion"))
    return [
        Contender(f"oxidion.{name}", OURS, family, ours),
        Contender(f"dion.{name} eager", "microsoft/dion", family, theirs),
        Contender(f"dion.{name} compiled", "microsoft/dion", family, theirs, compiled=True, max_tensors=200),
    ]


def of_class(package: str, name: str, **settings: Any) -> Build:
    """A class for matrices, with the other parameters in a group for AdamW."""

    def build(tensors: Tensors) -> list[Optimizer]:
        cls = getattr(importlib.import_module(package), name)
        return [cls(_groups(tensors), lr=LR, weight_decay=WD, **settings)]

    return build


def _adamw() -> list[Contender]:
    def ours(tensors: Tensors) -> list[Optimizer]:
        import oxidion

        return [oxidion.AdamW(tensors.everything, lr=LR, weight_decay=WD)]

    def torch_adamw(**implementation: bool) -> Build:
        return lambda tensors: [
            torch.optim.AdamW(tensors.everything, lr=LR, weight_decay=WD, **implementation)
        ]

    return [
        Contender("oxidion.AdamW", OURS, ADAMW, ours),
        Contender("torch.optim.AdamW fused", "torch", ADAMW, torch_adamw(fused=True)),
        Contender("torch.optim.AdamW foreach", "torch", ADAMW, torch_adamw(foreach=True)),
        Contender("torch.optim.AdamW default", "torch", ADAMW, torch_adamw(), "for-loop on CPU"),
        Contender("dion adamw group eager", "microsoft/dion", ADAMW, _dion_scalar("adamw")),
    ]


def _lion() -> list[Contender]:
    def ours(tensors: Tensors) -> list[Optimizer]:
        import oxidion

        return [oxidion.Lion(tensors.everything, lr=LR, weight_decay=WD)]

    def lion_pytorch(tensors: Tensors) -> list[Optimizer]:
        import lion_pytorch

        return [lion_pytorch.Lion(tensors.everything, lr=LR, weight_decay=WD)]

    def po_lion(tensors: Tensors) -> list[Optimizer]:
        import pytorch_optimizer

        return [pytorch_optimizer.Lion(tensors.everything, lr=LR, weight_decay=WD)]

    def fused_adamw(tensors: Tensors) -> list[Optimizer]:
        return [torch.optim.AdamW(tensors.everything, lr=LR, weight_decay=WD, fused=True)]

    return [
        Contender("oxidion.Lion", OURS, LION, ours),
        Contender(
            "torch.optim.AdamW fused", "torch", LION, fused_adamw, "another algorithm: torch has no Lion"
        ),
        Contender("lion_pytorch.Lion", "lion_pytorch", LION, lion_pytorch),
        Contender("pytorch_optimizer.Lion", "pytorch_optimizer", LION, po_lion),
        Contender("dion lion group eager", "microsoft/dion", LION, _dion_scalar("lion")),
    ]


def _dion_scalar(algorithm: str) -> Build:
    def build(tensors: Tensors) -> list[Optimizer]:
        import dion

        group = {"params": tensors.everything, "algorithm": algorithm}
        return [dion.Muon([group], lr=LR, weight_decay=WD)]

    return build
