"""``selection_scope="local"`` on a simulated mesh, compared with naive float64 steps on the same shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import oxidion
from oxidion._reference.orthogonalize import lr_factor, orthogonalize
from support.cases import EXPERTS, KERNELS, LR, MATRICES, STACKED, WEIGHT_DECAY, Case, Group, case_named
from support.inputs import Shape, gaussian, gradients
from support.layouts import SETTINGS, Setting, fsdp, setting_named
from support.sim_mesh import SimMesh, cut, layouts_for

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

    def __init__(
        self, mesh: SimMesh, index: int, start: Tensor, settings: Mapping[str, Any], normal: bool
    ) -> None:
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
            sorted({(at * f, n * f) for at, n in span if n})
            for span, f in zip(spans, (1, scale), strict=True)
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
            # What is sent: for each chunk its slices, padded with zeros to the same number.
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
    keys = {} if kwargs.get("flatten") else STACKED
    return Case(algorithm, cls, algorithm, settings, (Group(tuple(shapes), keys),))


def simulated(case: Case, setting: Setting) -> tuple[SimMesh, list[Tensor]]:
    """The mesh with its parameters, and these whole."""
    mesh = SimMesh(setting.axes, case.build, layouts_for(case, setting.place), extra=setting.extra)
    full = [p.detach() for p in case.parameters()]
    mesh.build(full)
    return mesh, full


def assert_ranks_hold(mesh: SimMesh, naive: Sequence[Naive], normal: bool) -> None:
    """Assert that every rank has its part of parameters and states."""
    for rank in mesh.ranks:
        for i, (param, one) in enumerate(zip(rank.params, naive, strict=True)):
            spans, state = rank.spans(i, one.param.shape), rank.optimizer.state[param]
            pairs = [(param.detach(), cut(one.param, spans)), (state["momentum"], cut(one.momentum, spans))]
            if normal:
                pairs.append((state["variance_neuron"], cut(one.variance, [*spans[:-1], (0, 1)])))
            for got, wanted in pairs:
                torch.testing.assert_close(
                    got, wanted, rtol=1e-9, atol=1e-11, msg=lambda m, i=i: f"parameter {i}: {m}"
                )


def too_deep(setting: Setting, shapes: Sequence[Shape]) -> bool:
    """Whether a dimension behind the second is cut, which no flattened parameter may be."""
    return any(dim > 1 for shape in shapes for _, dim in setting.place(shape).values())


PAIRS = [
    (algorithm, kwargs, shapes, setting)
    for algorithm in ALGORITHMS
    for _, kwargs, shapes in ROWS
    for setting in SETTINGS
    if not (kwargs.get("flatten") and too_deep(setting, shapes))
]


@pytest.mark.parametrize(
    ("algorithm", "kwargs", "shapes", "setting"),
    PAIRS,
    ids=[f"{a}-{k['fraction']}{'-flatten' * bool(k.get('flatten'))}-{s}" for a, k, _, s in PAIRS],
)
def test_local_selection_equals_the_naive_one(
    algorithm: str, kwargs: dict[str, Any], shapes: tuple[Shape, ...], setting: Setting
) -> None:
    case, normal = case_of(algorithm, kwargs, shapes), algorithm == "nordion2"
    mesh, full = simulated(case, setting)
    naive = [Naive(mesh, i, p, case.kwargs, normal) for i, p in enumerate(full)]
    for grads in gradients(case.shapes, STEPS, 0, flatten=bool(kwargs.get("flatten"))):
        mesh.step(lambda _, g=grads: g)  # type: ignore[misc]
        for one, grad in zip(naive, grads, strict=True):
            one.step(grad)
    assert_ranks_hold(mesh, naive, normal)


def ends(case: Case, setting: Setting) -> list[list[Tensor]]:
    """Parameters of all ranks after some steps."""
    mesh, _ = simulated(case, setting)
    for grads in gradients(case.shapes, STEPS, 0):
        mesh.step(lambda _, g=grads: g)  # type: ignore[misc]
    return [[p.detach() for p in rank.params] for rank in mesh.ranks]


def largest_difference(one: list[list[Tensor]], other: list[list[Tensor]]) -> float:
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("setting", ["alone", "ddp4", "hsdp"])
def test_local_and_global_differ_only_on_a_cut_selected_side(algorithm: str, setting: str) -> None:
    chosen = Setting("", {"fs": 1}, fsdp(0)) if setting == "alone" else setting_named(setting)
    found = [
        ends(case_of(algorithm, {"fraction": 0.25, "selection_scope": scope}, MATRICES), chosen)
        for scope in ("local", "global")
    ]
    difference = largest_difference(*found)
    assert (difference > 1e-3) == (setting == "hsdp")
    if setting != "hsdp":
        assert difference == 0.0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_whole_fraction_is_the_same_in_both_scopes(algorithm: str, setting: Setting) -> None:
    found = [
        ends(case_of(algorithm, {"fraction": 1.0, "selection_scope": scope}, MATRICES), setting)
        for scope in ("local", "global")
    ]
    assert largest_difference(*found) < 1e-11


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_global_count_is_that_of_the_true_size(algorithm: str) -> None:
    # Of five rows on each of four ranks, 20 in all, 7 would be chosen. There are 17 rows: 6 are chosen.
    case = case_of(
        algorithm,
        {"fraction": 0.35, "selection_scope": "global", "weight_decay": 0.0},
        ((17, 19),),
    )
    mesh, full = simulated(case, setting_named("fsdp4-dim0"))
    mesh.step(lambda _: [gaussian((17, 19), 1)])
    moved = torch.cat([rank.params[0].detach() for rank in mesh.ranks]) != full[0]
    assert int(moved.any(dim=1).sum()) == math.ceil(0.35 * 17) == 6
    assert bool(moved.any(dim=1).eq(moved.all(dim=1)).all())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["heads", "split", "column-heads", "column-split"])
def test_blocks_of_a_parameter_are_selected_from_globally(algorithm: str, name: str) -> None:
    # They lie in unequal parts on the processes, or on one process alone.
    case = case_named(f"{algorithm}-{name}")
    kwargs = {**case.kwargs, "orth_dtype": "float64"}
    found = [
        ends(Case("", case.cls, algorithm, {**kwargs, "selection_scope": scope}, case.groups), setting)
        for scope in ("local", "global")
        for setting in [setting_named("fsdp2-tp3")]
    ]
    assert largest_difference(*found) == 0.0
