"""What races on a CUDA device: the contenders of every family, and those that only a device has.

Those are steps as CUDA graphs, ours and microsoft/dion's, and its Triton kernels for symmetric products.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

import contenders as everywhere
from contender import LR, OURS, WD, Build, Contender
from workloads import ADAMW, DION2, DION_4, DION_16, LION, MUON, NORDION2, NORMUON, Tensors

PEER = "microsoft/dion"
#: Longest list that a peer is compiled for: its kernels are tuned for every shape, its loops unrolled.
MOST_COMPILED = 200

#: Class of a family in microsoft/dion, and what it is told beside rate and decay.
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    MUON: ("Muon", {"nesterov": True}),
    NORMUON: ("NorMuon", {}),
    DION2: ("Dion2", {"fraction": 1 / 4}),
    NORDION2: ("NorDion2", {"fraction": 1 / 4}),
}
#: Families whose default contender of ours is run as a graph too.
GRAPHS = (MUON, NORMUON, DION_4, DION_16, DION2, NORDION2, ADAMW, LION)


def contenders(family: str, *, compiled: bool, device: str) -> list[Contender]:
    """Contenders of a family on a kind of device, ours first; compiled ones only when asked."""
    found = everywhere.contenders(family, compiled=compiled)
    if device != "cuda":
        return found
    found += [entry for entry in _of_devices(family, found[0]) if compiled or not entry.compiled]
    return sorted(found, key=lambda entry: entry.source != OURS)


def _of_devices(family: str, ours: Contender) -> list[Contender]:
    made = []
    if family in GRAPHS:
        graph = as_graph("oxidion.graph", ours.build)
        made.append(replace(ours, name=f"{ours.name} graph", build=graph, note="replays of a CUDA graph"))
    if family not in PEERS:
        return made
    name, settings = PEERS[family]

    def peer(label: str, note: str, build: Build, **keys: Any) -> Contender:
        return Contender(f"dion.{name} {label}", PEER, family, build, note, **keys)

    plain, triton = _peer(name, **settings), _peer(name, use_triton=True, **settings)
    theirs = "replays of a CUDA graph of microsoft/dion"
    made += [
        peer("graph", theirs, as_graph("dion.cuda_graph", plain)),
        peer("triton eager", "its Triton kernels", triton),
        peer("triton graph", theirs, as_graph("dion.cuda_graph", triton)),
        peer("triton compiled", "its Triton kernels", triton, compiled=True, max_tensors=MOST_COMPILED),
    ]
    if family == MUON:
        gram = _peer(name, use_gram_newton_schulz=True, **settings)
        made.append(peer("gram eager", "Gram form, kernels of gram-newton-schulz", gram))
    return made


def _peer(name: str, **settings: Any) -> Build:
    def build(tensors: Tensors) -> list[Optimizer]:
        cls = getattr(importlib.import_module("dion"), name)
        groups: list[dict[str, Any]] = [{"params": tensors.matrices}]
        if tensors.others:
            groups.append({"params": tensors.others, "algorithm": "adamw"})
        return [cls(groups, lr=LR, weight_decay=WD, **settings)]

    return build


def as_graph(module: str, build: Build) -> Callable[[Tensors], Sequence[Optimizer]]:
    """A contender's optimizers in the ``CudaGraphOptimizer`` of a module: the second step is captured."""

    def wrapped(tensors: Tensors) -> list[Optimizer]:
        wrapper = importlib.import_module(module).CudaGraphOptimizer
        return [wrapper(optimizer, warmup_steps=1) for optimizer in build(tensors)]

    return wrapped
