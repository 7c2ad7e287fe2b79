"""Optimizers that the benchmarks race, by family, and whether each is installed.

Within a family every contender does the same job at the same settings (learning rate, momentum, weight decay,
nesterov); what differs on purpose, such as the polynomial of the orthonormalization, is named in ``note``. On
a CUDA device steps race as CUDA graphs too, and microsoft/dion with its Triton kernels.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from workloads import Tensors, Workload

Build = Callable[[Tensors], Sequence[Optimizer]]

LR, WD = 1e-4, 0.01
OURS, PEER = "oxidion", "microsoft/dion"
#: Contenders of ours at other settings than the default.
FAST, HALF = "oxidion.Muon fast", "oxidion.Dion bf16"
NOT_INSTALLED = "not installed"
#: Longest list that a peer is compiled for: its kernels are tuned for every shape, its loops unrolled.
MOST_COMPILED = 200

#: Import name of each source and the distribution that holds its version.
SOURCES = {
    OURS: ("oxidion", "oxidion"),
    "torch": ("torch", "torch"),
    PEER: ("dion", ""),
    "pytorch_optimizer": ("pytorch_optimizer", "pytorch_optimizer"),
    "lion_pytorch": ("lion_pytorch", "lion-pytorch"),
    "came-pytorch": ("came_pytorch", "came-pytorch"),
    "torchao": ("torchao", "torchao"),
    "galore-torch": ("galore_torch", "galore-torch"),
    "heavyball": ("heavyball", "heavyball"),
    "bitsandbytes": ("bitsandbytes", "bitsandbytes"),
}


@dataclass(frozen=True)
class Contender:
    """One optimizer at one setting.

    Attributes:
        name: Row label.
        source: Key of `SOURCES`.
        family: The family it belongs to.
        build: Makes its optimizers for a parameter list; all of them are stepped in order.
        note: Difference from the others of its family.
        compiled: Whether the source's own ``torch.compile`` decorators act; otherwise they are run eagerly.
        max_tensors: Longest parameter list it is run on.
    """

    name: str
    source: str
    family: str
    build: Build
    note: str = ""
    compiled: bool = False
    max_tensors: int = 100_000


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
        command = ["git", "-C", str(Path(str(module.__file__)).parent), "describe", "--always", "--dirty"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        unknown = str(getattr(module, "__version__", "unknown version"))
        return f"commit {answer.stdout.strip()}" if answer.returncode == 0 else unknown


def missing(version: str) -> bool:
    """Whether the version of a source says that there is none."""
    return version == NOT_INSTALLED or version.startswith("import failed")


def absent(entry: Contender, version: str, workload: Workload) -> str:
    """Reason for which a contender does not run on a list on any device, empty where it does."""
    if missing(version):
        return version
    if len(workload.matrices) + len(workload.others) > entry.max_tensors:
        return f"not run: more than {entry.max_tensors} tensors"
    return ""


def _class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _groups(tensors: Tensors, others: dict[str, Any], **of_matrices: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [{"params": tensors.matrices, **of_matrices}] if tensors.matrices else []
    return [*groups, {"params": tensors.others, **others}] if tensors.others else groups


def of_class(module: str, name: str, **settings: Any) -> Build:
    """A class for matrices, with the other parameters in a group for AdamW."""
    return lambda tensors: [
        _class(module, name)(_groups(tensors, {"algorithm": "adamw"}), lr=LR, weight_decay=WD, **settings)
    ]


def flat(module: str, name: str, **settings: Any) -> Build:
    """All parameters in one group of a class."""
    return lambda tensors: [_class(module, name)(tensors.everything, lr=LR, weight_decay=WD, **settings)]


def as_graph(module: str, build: Build) -> Build:
    """A contender's optimizers in the ``CudaGraphOptimizer`` of a module: the second step is captured."""
    return lambda tensors: [
        _class(module, "CudaGraphOptimizer")(optimizer, warmup_steps=1) for optimizer in build(tensors)
    ]


def _two(matrices: tuple[str, str], others: tuple[str, str], settings: dict[str, Any], **more: Any) -> Build:
    """A class for matrices and another one for the rest; ``more`` goes to the last."""

    def build(tensors: Tensors) -> list[Optimizer]:
        made = [_class(*matrices)(tensors.matrices, lr=LR, weight_decay=WD, nesterov=True, **settings)]
        own = {"lr": LR, "weight_decay": WD, **more}
        return [*made, _class(*others)(tensors.others, **own)] if tensors.others else made

    return build


def _po_muon(tensors: Tensors) -> list[Optimizer]:
    common = {"lr": LR, "weight_decay": WD}
    others = {"use_muon": False, **common}
    return [_class("pytorch_optimizer", "Muon")(_groups(tensors, others, use_muon=True, **common))]


def _scalar(algorithm: str) -> Build:
    """An element-wise algorithm of microsoft/dion, which it has as a group of its classes for matrices."""
    return lambda tensors: [
        _class("dion", "Muon")(
            [{"params": tensors.everything, "algorithm": algorithm}], lr=LR, weight_decay=WD
        )
    ]


def _galore(module: str, gap: int, **settings: Any) -> Build:
    keys = {"rank": 128, "update_proj_gap": gap, "scale": 0.25, "proj_type": "std"}
    return lambda tensors: [
        _class(module, "GaLoreAdamW")(_groups(tensors, {}, **keys), lr=LR, weight_decay=WD, **settings)
    ]


def ours(name: str, build: Build, note: str = "", **limits: int) -> Contender:
    """A contender of this package."""
    return Contender(f"oxidion.{name}", OURS, "", build, note, **limits)


def relative(family: str, name: str, note: str = "", **settings: Any) -> list[Contender]:
    """A class of ours and the one of the same name in microsoft/dion."""
    theirs = of_class("dion", name, **settings)
    return [
        Contender(f"oxidion.{name}", OURS, family, of_class(OURS, name, **settings)),
        Contender(f"dion.{name} eager", PEER, family, theirs, note),
        Contender(f"dion.{name} compiled", PEER, family, theirs, note, True, MOST_COMPILED),
    ]


def _torch_adamw(label: str, note: str = "", **how: bool) -> Contender:
    return Contender(f"torch.optim.AdamW {label}", "torch", "", flat("torch.optim", "AdamW", **how), note)


def _of_pytorch_optimizer(name: str, note: str = "") -> Contender:
    package = "pytorch_optimizer"
    return Contender(f"{package}.{name}", package, "", flat(package, name), note)


def _of_bitsandbytes(name: str) -> Contender:
    return Contender(f"bitsandbytes.{name}", "bitsandbytes", "", flat("bitsandbytes.optim", name))


def _muon() -> list[Contender]:
    first, *theirs = relative(
        "", "Muon", "Polar Express, 5 iterations, bfloat16 eager rounding", nesterov=True
    )
    fast = of_class(OURS, "Muon", nesterov=True, orth_preset="fast")
    torchs = _two(("torch.optim", "Muon"), ("torch.optim", "AdamW"), {}, fused=True)
    kept = {"consume_grad": False}
    ball = _two(("heavyball", "Muon"), ("heavyball", "AdamW"), kept, **kept)
    five = "fixed quintic, 5 iterations"
    others = "five different quintics, bfloat16"
    return [
        replace(first, note="exact-5: Polar Express, 5 iterations"),
        Contender(FAST, OURS, "", fast, "fast-4: Schatten-8 norm, 4 iterations"),
        Contender("torch.optim.Muon", "torch", "", torchs, f"{five}, bfloat16"),
        *theirs,
        Contender("pytorch_optimizer.Muon", "pytorch_optimizer", "", _po_muon, five, max_tensors=50),
        Contender("heavyball.Muon compiled", "heavyball", "", ball, others, True, 10),
    ]


def _dion(fraction: float) -> list[Contender]:
    first, *theirs = relative("", "Dion", rank_fraction=fraction)
    half = of_class(OURS, "Dion", rank_fraction=fraction, orth_dtype="bfloat16")
    return [first, Contender(HALF, OURS, "", half, "products in bfloat16"), *theirs]


def _low_rank(gap: int) -> list[Contender]:
    """GaLore of rank 128 whose projections are computed every ``gap`` steps."""
    theirs = _galore("galore_torch", gap, eps=1e-8, no_deprecation_warning=True)
    return [
        ours("GaLoreAdamW gram", _galore(OURS, gap, svd="gram")),
        ours("GaLoreAdamW exact", _galore(OURS, gap, svd="exact"), "a whole SVD", max_tensors=10),
        ours("GaLoreAdamW random", _galore(OURS, gap, svd="random"), "of a sketch"),
        Contender("galore_torch.GaLoreAdamW", "galore-torch", "", theirs),
    ]


_ROWS = "eps bounds the mean of the row factor"
_8_BIT = flat("torchao.optim", "AdamW8bit")
FAMILIES: dict[str, list[Contender]] = {
    "muon": _muon(),
    "dion r=1/4": _dion(1 / 4),
    "dion r=1/16": _dion(1 / 16),
    "normuon": relative("", "NorMuon"),
    "dion2 1/4": relative("", "Dion2", fraction=1 / 4),
    "nordion2 1/4": relative("", "NorDion2", fraction=1 / 4),
    "adamw": [
        ours("AdamW", flat(OURS, "AdamW")),
        _torch_adamw("fused", fused=True),
        _torch_adamw("foreach", foreach=True),
        _torch_adamw("default", "for-loop on CPU"),
        Contender("dion adamw group eager", PEER, "", _scalar("adamw")),
        _of_bitsandbytes("AdamW"),
    ],
    "lion": [
        ours("Lion", flat(OURS, "Lion")),
        _torch_adamw("fused", "another algorithm: torch has no Lion", fused=True),
        Contender("lion_pytorch.Lion", "lion_pytorch", "", flat("lion_pytorch", "Lion")),
        _of_pytorch_optimizer("Lion"),
        Contender("dion lion group eager", PEER, "", _scalar("lion")),
        _of_bitsandbytes("Lion"),
    ],
    "lamb": [
        ours("Lamb", flat(OURS, "Lamb")),
        _of_pytorch_optimizer("Lamb", "norm of the weight at most 10, decay outside the ratio"),
    ],
    "adafactor": [
        ours("Adafactor", flat(OURS, "Adafactor", relative_step=False)),
        Contender("torch.optim.Adafactor default", "torch", "", flat("torch.optim", "Adafactor"), _ROWS),
        Contender(
            "torch.optim.Adafactor foreach",
            "torch",
            "",
            flat("torch.optim", "Adafactor", foreach=True),
            _ROWS,
        ),
    ],
    "came": [
        ours("CAME", flat(OURS, "CAME")),
        Contender("came_pytorch.CAME", "came-pytorch", "", flat("came_pytorch", "CAME")),
        _of_pytorch_optimizer("CAME"),
    ],
    "adamw 8-bit": [
        ours("AdamW 8-bit", flat(OURS, "AdamW", state_bits=8)),
        ours("AdamW 32-bit", flat(OURS, "AdamW"), "states in float32"),
        _of_bitsandbytes("AdamW8bit"),
        Contender("torchao AdamW8bit eager", "torchao", "", _8_BIT, max_tensors=MOST_COMPILED),
        Contender("torchao AdamW8bit compiled", "torchao", "", _8_BIT, "", True, MOST_COMPILED),
    ],
    "galore r=128": _low_rank(1_000_000),
    "galore r=128 refresh": _low_rank(1),
}
"""The contenders of every family, ours first."""
GRAPHS = ("muon", "normuon", "dion r=1/4", "dion r=1/16", "dion2 1/4", "nordion2 1/4", "adamw", "lion")
"""Families whose default contender of ours is run as a graph too."""
TRITON: dict[str, tuple[str, dict[str, Any]]] = {
    "muon": ("Muon", {"nesterov": True}),
    "normuon": ("NorMuon", {}),
    "dion2 1/4": ("Dion2", {"fraction": 1 / 4}),
    "nordion2 1/4": ("NorDion2", {"fraction": 1 / 4}),
}
"""Classes of microsoft/dion that have Triton kernels, and their settings in addition to rate and decay."""


def contenders(family: str, *, compiled: bool, device: str = "cpu") -> list[Contender]:
    """Contenders of a family on a kind of device, ours first.

    Compiled ones only come when they are asked for: they take minutes to compile.
    """
    found = [replace(entry, family=family) for entry in FAMILIES[family]]
    if device == "cuda":
        found = sorted([*found, *_of_devices(family, found[0])], key=lambda entry: entry.source != OURS)
    return [entry for entry in found if compiled or not entry.compiled]


def _of_devices(family: str, ours: Contender) -> list[Contender]:
    made = []
    if family in GRAPHS:
        graph = as_graph("oxidion.graph", ours.build)
        made.append(replace(ours, name=f"{ours.name} graph", build=graph, note="replays of a CUDA graph"))
    if family not in TRITON:
        return made
    name, settings = TRITON[family]

    def peer(label: str, note: str, build: Build, *more: Any) -> Contender:
        return Contender(f"dion.{name} {label}", PEER, family, build, note, *more)

    plain, triton = (of_class("dion", name, **own, **settings) for own in ({}, {"use_triton": True}))
    theirs, kernels = "replays of a CUDA graph of microsoft/dion", "its Triton kernels"
    made += [
        peer("graph", theirs, as_graph("dion.cuda_graph", plain)),
        peer("triton eager", kernels, triton),
        peer("triton graph", theirs, as_graph("dion.cuda_graph", triton)),
        peer("triton compiled", kernels, triton, True, MOST_COMPILED),
    ]
    if family == "muon":
        gram = of_class("dion", name, use_gram_newton_schulz=True, **settings)
        made.append(peer("gram eager", "Gram form, kernels of gram-newton-schulz", gram))
    return made
