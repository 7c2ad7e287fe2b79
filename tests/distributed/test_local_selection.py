"""``selection_scope="local"`` and ``norm_scope="shard"`` on a simulated mesh, against naive steps in float64 that cut
the momentum as the layout does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import oxidion
from oxidion._orthogonalize import orthogonalize
from oxidion._reference import lr_factor, normuon_step
from support.cases import EXPERTS, KERNELS, LR, MATRICES, WEIGHT_DECAY, Case, Group, case_named
from support.inputs import Shape, gaussian, gradients
from support.layouts import SETTINGS, Setting, fsdp, setting_named
from support.sim_mesh import R, S, SimMesh, cut, layouts_for

Chunks = list[tuple[int, int]]
BASE: dict[str, Any] = {"lr": LR, "weight_decay": WEIGHT_DECAY}
STEPS = 3


def matrices_of(x: Tensor, flatten: bool) -> list[Tensor]:
    """Views of the matrices."""
    if flatten:
        return [x.view(x.shape[0], -1)]
    return list(x.view(-1, *x.shape[-2:]))


class Naive:
    """One parameter on a layout, stepped by equations on whole tensors."""

    def __init__(self, mesh: SimMesh, index: int, start: Tensor, settings: Mapping[str, Any], normal: bool):
        self.param, self.settings, self.normal = start.clone(), settings, normal
        self.momentum, self.variance = torch.zeros_like(start), torch.zeros_like(start[..., :1])
        self.flatten = bool(settings.get("flatten"))
        first = 0 if self.flatten else start.ndim - 2
        layout = mesh.layouts[index]
        self.ways = [
            math.prod(mesh.axes[a] for a, (kind, dim) in layout.items() if kind != "R" and dim == first + d)
            for d in (0, 1)
        ]
        scale = math.prod(start.shape[2:]) if self.flatten else 1
        spans = [[rank.spans(index, start.shape)[first + d] for rank in mesh.ranks] for d in (0, 1)]
        self.chunks: list[Chunks] = [
            sorted({(at * f, n * f) for at, n in span if n}) for span, f in zip(spans, (1, scale), strict=True)
        ]

    def side(self, rows: int, cols: int) -> int:
        """The dimension that is selected along."""
        cuts = [ways > 1 for ways in self.ways]
        if self.normal or cuts == [True, False]:
            return 0
        return 1 if cuts == [False, True] or rows > cols else 0

    def chosen(self, m: Tensor, dim: int) -> list[list[int]]:
        """The slices that each chunk contributes."""
        scores = m.abs().sum(dim=1 - dim).float().tolist()
        count = max(1, math.ceil(self.settings["fraction"] * math.ceil(m.shape[dim] / self.ways[dim])))
        found = []
        for start, length in self.chunks[dim]:
            order = sorted(range(start, start + length), key=lambda i: (-scores[i], i))
            found.append(order[:count])
        return found

    def step(self, grad: Tensor) -> None:
        """One step."""
        group, keep = self.settings, self.settings["mu" if self.normal else "ef_decay"]
        self.momentum += grad
        self.param *= 1 - group["lr"] * group["weight_decay"]
        for at, (x, m) in enumerate(
            zip(matrices_of(self.param, self.flatten), matrices_of(self.momentum, self.flatten), strict=True)
        ):
            dim = self.side(*m.shape)
            parts = self.chosen(m, dim)
            pad = max(len(part) for part in parts)
            blank = torch.zeros(pad, m.shape[1 - dim], dtype=m.dtype)
            # What travels: for each chunk its slices and zeros up to the same number.
            sent = torch.cat(
                [torch.cat([m.movedim(dim, 0)[part], blank[len(part) :]]) for part in parts]
            ).movedim(0, dim)
            u = orthogonalize(sent, group).movedim(dim, 0)
            real = [i * pad + j for i, part in enumerate(parts) for j in range(len(part))]
            rows = [i for part in parts for i in part]
            update = u[real]
            if self.normal:
                update = self.normalized(update, at, rows)
            factor = group["lr"] * lr_factor("spectral_norm", *m.shape)
            x.movedim(dim, 0)[rows] -= factor * update
            m.movedim(dim, 0)[rows] *= keep

    def normalized(self, update: Tensor, at: int, rows: list[int]) -> Tensor:
        """Neurons of equal strength; those of a flattened parameter in its own shape."""
        inner = self.param.shape[1:] if self.flatten else (self.param.shape[-1],)
        u = update.reshape(len(rows), *inner)
        variance = self.variance if self.flatten else self.variance.view(-1, *self.variance.shape[-2:])[at]
        v = variance[rows]
        v += (1 - self.settings["muon_beta2"]) * (u.square().mean(dim=-1, keepdim=True) - v)
        variance[rows] = v
        axes = (-2, -1)
        normal = u / (v.sqrt() + 1e-8)
        size = u.norm(dim=axes, keepdim=True) / normal.norm(dim=axes, keepdim=True).clamp(min=1e-8)
        return (normal * size).reshape(update.shape)


ROWS: tuple[tuple[str, dict[str, Any], tuple[Shape, ...]], ...] = (
    ("quarter", {"fraction": 0.25}, (*MATRICES, *EXPERTS)),
    ("few", {"fraction": 0.01}, MATRICES),
    ("most", {"fraction": 0.7}, MATRICES),
    ("flatten", {"fraction": 0.4, "flatten": True}, KERNELS),
)
ALGORITHMS: dict[str, tuple[type, dict[str, Any]]] = {
    "dion2": (oxidion.Dion2, {"ef_decay": 0.5}),
    "nordion2": (oxidion.NorDion2, {"mu": 0.5, "muon_beta2": 0.5}),
}


def case_of(algorithm: str, kwargs: Mapping[str, Any], shapes: Sequence[Shape]) -> Case:
    """Local selection over these shapes."""
    cls, own = ALGORITHMS[algorithm]
    settings = {**BASE, **own, "orth_dtype": "float64", "selection_scope": "local", **kwargs}
    return Case(algorithm, cls, algorithm, settings, (Group(tuple(shapes)),))


def simulated(case: Case, setting: Setting) -> tuple[SimMesh, list[Tensor]]:
    """The mesh with its parameters, and these whole."""
    mesh = SimMesh(setting.axes, case.build, layouts_for(case, setting.place), extra=setting.extra)
    full = [p.detach() for p in case.parameters()]
    mesh.build(full)
    return mesh, full


def assert_ranks_hold(mesh: SimMesh, key: str | None, expected: Sequence[Tensor], what: str) -> None:
    """Assert that every rank has its part of the parameters, or of a state."""
    for rank in mesh.ranks:
        for i, whole in enumerate(expected):
            param = rank.params[i]
            got = param.detach() if key is None else rank.optimizer.state[param][key]
            parts = rank.spans(i, mesh.layouts_of[i]) if key != "variance_neuron" else None
            wanted = cut(whole, parts or [*rank.spans(i, mesh.layouts_of[i])[:-1], (0, 1)])
            torch.testing.assert_close(
                got, wanted, rtol=1e-9, atol=1e-12, msg=lambda m, i=i, r=rank: f"{what} {i} {r.number}: {m}"
            )
