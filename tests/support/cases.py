"""The table of optimizers: every class with several settings and the shapes that suit it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

import oxidion
from oxidion._core.base import OxOptimizer

from . import derived
from .case import (
    BASE,
    BASIS_ALGORITHMS,
    EMULATED,
    LOW_RANK_ALGORITHMS,
    LR,
    MATRIX_ALGORITHMS,
    ONLY_OF_MATRICES,
    WEIGHT_DECAY,
    Case,
    Group,
    defaults_of,
)
from .inputs import Shape
from .low_rank_cases import APOLLO_CASES, GALORE_CASES
from .normed_cases import NORMED_CASES
from .soap_cases import SOAP_CASES, SOAP_MUON_CASES, SPHERE

__all__ = [
    "ALL_CASES",
    "BASE",
    "BASIS_ALGORITHMS",
    "EMPTY",
    "EMULATED",
    "LOW_RANK_ALGORITHMS",
    "LR",
    "MATRIX_ALGORITHMS",
    "ONLY_OF_MATRICES",
    "SMALL_CASES",
    "WEIGHT_DECAY",
    "Case",
    "Group",
    "case_named",
    "cases_of",
    "defaults_of",
    "optimizer_classes",
]

MATRICES: tuple[Shape, ...] = ((12, 8), (8, 12), (8, 8), (12, 8), (1, 7), (7, 1), (17, 5), (1, 1))
VECTORS: tuple[Shape, ...] = ((5,), (), (3, 4), (2, 3, 4), (1,))
EXPERTS: tuple[Shape, ...] = ((3, 6, 4), (2, 4, 6), (3, 5, 5), (2, 3, 4, 6))
KERNELS: tuple[Shape, ...] = ((6, 4, 3, 3), (16, 2, 2, 2), (4, 3, 5), (6, 6), (6, 4, 3, 3))
STACKED = {"interleaved": 1}
"""Four dimensions are a stack of matrices."""
INTERLEAVED: tuple[Shape, ...] = ((12, 8), (18, 3), (2, 12, 5), (12, 8))
MIDDLE: tuple[Shape, ...] = ((7, 2, 8), (3, 5, 2, 4))
"""Rows of two matrices alternate: in a dimension of their own."""
HEADS: tuple[Shape, ...] = ((12, 8), (12, 3), (12, 8))
COLUMN_HEADS: tuple[Shape, ...] = ((8, 12), (3, 12), (8, 12))
EMPTY: tuple[Shape, ...] = ((0, 5), (5, 0))


def optimizer_classes() -> list[type[Optimizer]]:
    """The optimizer classes that the package exports, but MuonH: it is Muon with other defaults."""
    exported = (getattr(oxidion, name) for name in oxidion.__all__)
    return [
        cls
        for cls in exported
        if isinstance(cls, type)
        and issubclass(cls, Optimizer)
        and cls is not oxidion.MuonH
        and "params" in inspect.signature(cls).parameters
    ]


CLASSES: dict[str, type[Optimizer]] = {
    "dion": oxidion.Dion,
    "dion2": oxidion.Dion2,
    "muon": oxidion.Muon,
    "nordion2": oxidion.NorDion2,
    "normuon": oxidion.NorMuon,
}


def _matrix(algorithm: str) -> Callable[..., Case]:
    def row(name: str, *groups: Group, keys: Mapping[str, Any] | None = None, **kwargs: Any) -> Case:
        return Case(
            f"{algorithm}-{name}",
            CLASSES[algorithm],
            algorithm,
            {**BASE, **kwargs},
            groups or (Group(MATRICES, keys or {}),),
        )

    return row


_dion, _dion2, _muon, _nordion2, _normuon = map(_matrix, CLASSES)


def _adamw(name: str, *groups: Group, **kwargs: Any) -> Case:
    return Case(f"adamw-{name}", oxidion.AdamW, "adamw", {**BASE, **kwargs}, groups or (Group(VECTORS),))


def _lion(name: str, *groups: Group, **kwargs: Any) -> Case:
    return Case(f"lion-{name}", oxidion.Lion, "lion", {**BASE, **kwargs}, groups or (Group(VECTORS),))


def _family(make: Callable[..., Case]) -> list[Case]:
    """Rows that every class with an orthonormalized update has; no selection depends on the layout."""
    scope = {} if make is _normuon else {"selection_scope": "global"}

    def row(name: str, *groups: Group, **kwargs: Any) -> Case:
        return make(name, *groups, **{**scope, **kwargs})

    return [
        row("default"),
        row("newton-schulz", use_polar_express=False, adjust_lr="rms_norm"),
        row("cautious", cautious_wd=True),
        row("maximize", maximize=True),
        row("experts", Group(EXPERTS, STACKED)),
        row("flatten", Group(KERNELS), flatten=True),
        row("heads", Group(HEADS, {"num_heads": 3}), adjust_lr="rms_norm"),
        row("split", Group(((12, 6), (12, 9)), {"split_sizes": (6, 4, 2)})),
        row("column-heads", Group(COLUMN_HEADS, {"num_heads": 3, "split_dim": 1})),
        row("column-split", Group(((6, 12), (9, 12)), {"split_sizes": (6, 4, 2), "split_dim": 1})),
        row("split-experts", Group(SPLIT_EXPERTS, {"split_sizes": (6, 4, 2)})),
        row("turned-experts", Group(TURNED_EXPERTS, TURNED)),
        row("interleaved", Group(INTERLEAVED, {"interleaved": 3})),
        row("interleaved-split", Group(((12, 8), (12, 3)), {"interleaved": 2, "split_sizes": (4, 2)})),
        row("interleaved-middle", Group(MIDDLE, {"interleaved": 2})),
        row("mixed", *MIXED),
    ]


def _held(make: Callable[..., Case]) -> list[Case]:
    """Rows of weights whose norm is held, or whose updates follow it."""
    scope = {"selection_scope": "global"} if make in (_dion2, _nordion2) else {}
    sphere = {"weight_norm": "hyperball", "weight_decay": 0.0, **scope}
    rows = {"weight_norm": "row_floor", "weight_norm_floor": 2.0, "adjust_lr": "rms_norm", **scope}
    return [
        make("hyperball", **sphere),
        make("hyperball-experts", Group(EXPERTS, STACKED), **sphere),
        make("hyperball-heads", Group(HEADS, {"num_heads": 3}), **sphere),
        make("hyperball-column-heads", Group(COLUMN_HEADS, {"num_heads": 3, "split_dim": 1}), **sphere),
        make("floor", weight_norm="floor", weight_norm_floor=2.0, cautious_wd=True, **scope),
        make("row-floor", **rows),
        make("row-floor-column-heads", Group(COLUMN_HEADS, {"num_heads": 3, "split_dim": 1}), **rows),
        make("row-floor-flatten", Group(KERNELS), flatten=True, **rows),
    ]


SPLIT_EXPERTS = ((3, 12, 6), (2, 12, 9))
TURNED_EXPERTS = ((3, 6, 12), (2, 9, 12))
TURNED = {"split_sizes": (6, 4, 2), "split_dim": 1, "fan_in_fan_out": True}
"""Experts that are stored ``[in, out]`` and cut along their outputs."""

MIXED = (
    Group(MATRICES[:3]),
    Group(VECTORS, {"algorithm": "adamw", "lr": 2 * LR, "betas": (0.8, 0.9)}),
    Group(((5, 3), (4,)), {"algorithm": "lion", "weight_decay": 0.0}),
)
OTHER_WAY = (
    Group(VECTORS),
    Group(MATRICES[:3], {"algorithm": "muon", "mu": 0.9, "nesterov": True}),
    Group(MATRICES[:3], {"algorithm": "dion", "mu": 0.9, "rank_fraction": 0.5}),
)

BY_HAND: tuple[Case, ...] = (
    _dion("default"),
    _dion("quarter", rank_fraction=0.25),
    _dion("tall", Group(((12, 8), (17, 5), (8, 12), (7, 1))), rank_fraction=0.5),
    _dion("half-multiple4", rank_fraction=0.5, rank_multiple_of=4),
    _dion("qr", qr_method="qr", rank_fraction=0.5),
    _dion("cqr", qr_method="cqr", cqr_warmup_steps=0, rank_fraction=0.5),
    _dion("cqr2", qr_method="cqr2", rank_fraction=0.5),
    _dion("cqr-warmup", qr_method="cqr", cqr_warmup_steps=2, rank_fraction=0.5),
    _dion("power2", power_iters=2, rank_fraction=0.5),
    _dion("power3", power_iters=3),
    _dion("oversample4", rcqr_oversample=4.0, rank_fraction=0.25),
    _dion("mu", mu=0.5, epsilon=0.25),
    _dion("no-decay", weight_decay=0.0),
    _dion("cautious", keys={"cautious_wd": True}),
    _dion("maximize", maximize=True, rank_fraction=0.5),
    _dion("group-rank", Group(MATRICES[:3]), Group(MATRICES[:3], {"rank_fraction": 0.25, "mu": 0.8})),
    _dion("experts", Group(EXPERTS, STACKED), rank_fraction=0.5),
    _dion("mixed", *MIXED, rank_fraction=0.5),
    _dion("orthonormal", right_factor="orthonormal"),
    _dion("orthonormal-half", right_factor="orthonormal", rank_fraction=0.5),
    _dion("orthonormal-power2", right_factor="orthonormal", power_iters=2, rank_fraction=0.5),
    _dion("orthonormal-cautious", right_factor="orthonormal", keys={"cautious_wd": True}),
    _dion("orthonormal-experts", Group(EXPERTS, STACKED), right_factor="orthonormal", rank_fraction=0.5),
    _muon("default"),
    _muon("nesterov", nesterov=True),
    _muon("rms", adjust_lr="rms_norm"),
    _muon("unadjusted", adjust_lr=None),
    _muon("newton-schulz", use_polar_express=False),
    _muon("gram", use_gram_newton_schulz=True),
    _muon("svd", orth_method="svd"),
    _muon("fast", orth_preset="fast"),
    _muon("fast-gram", orth_preset="fast", orth_method="gram", ns_steps=5),
    _muon("cans", ns_coefficients="cans", ns_steps=6),
    _muon("triples", ns_coefficients=[(1.5, -0.5, 0.0)] * 3, ns_steps=5, orth_method="gram"),
    _muon("mu", mu=0.5, epsilon=0.25),
    _muon("no-decay", weight_decay=0.0),
    _muon("cautious", cautious_wd=True, nesterov=True, adjust_lr="rms_norm"),
    _muon("maximize", maximize=True),
    _muon("experts", Group(EXPERTS, STACKED)),
    _muon("flatten", Group(KERNELS), flatten=True),
    _muon("flatten-rms", Group(KERNELS), flatten=True, adjust_lr="rms_norm"),
    _muon("heads", Group(((12, 8), (12, 3), (12, 8)), {"num_heads": 3}), adjust_lr="rms_norm"),
    _muon("split", Group(((12, 6), (12, 9)), {"split_sizes": (6, 3, 3)})),
    _muon("mixed", *MIXED),
    _muon("split-experts", Group(SPLIT_EXPERTS, {"split_sizes": (6, 3, 3)})),
    _muon("turned-experts", Group(TURNED_EXPERTS, {**TURNED, "split_sizes": (6, 3, 3)})),
    _muon("interleaved", Group(INTERLEAVED, {"interleaved": 3}), cautious_wd=True),
    _muon("interleaved-heads", Group(((12, 8), (12, 3)), {"interleaved": 2, "num_heads": 3})),
    _muon("interleaved-middle", Group(MIDDLE, {"interleaved": 2}), nesterov=True),
    _muon("owned", owned_states=True, nesterov=True, cautious_wd=True),
    _muon("owned-experts", Group(EXPERTS, STACKED), owned_states=True),
    _muon("owned-heads", Group(((12, 8), (12, 3), (12, 8)), {"num_heads": 3}), owned_states=True),
    _muon("owned-mixed", *MIXED, owned_states=True, maximize=True),
    _muon("owned-hyperball", owned_states=True, **SPHERE),
    _muon("hyperball-interleaved", Group(INTERLEAVED, {"interleaved": 2}), **SPHERE),
    _muon("turned", Group(MATRICES, {"fan_in_fan_out": True}), adjust_lr="original"),
    _muon("column-heads", Group(((8, 12), (3, 12), (8, 12)), {"num_heads": 3, "split_dim": 1})),
    _muon(
        "column-split",
        Group(((6, 12), (9, 12)), {"split_sizes": (6, 3, 3), "split_dim": 1}),
        adjust_lr="rms_norm",
        cautious_wd=True,
    ),
    _dion("hyperball-half", rank_fraction=0.5, weight_norm="hyperball", weight_decay=0.0),
    _dion("hyperball-orthonormal", right_factor="orthonormal", weight_norm="hyperball", weight_decay=0.0),
    _dion("floor-half", rank_fraction=0.5, weight_norm="floor", weight_norm_floor=2.0),
    _dion("rms", adjust_lr="rms_norm", rank_fraction=0.5),
    _dion("flatten", Group(KERNELS), flatten=True, rank_fraction=0.5),
    _dion("heads", Group(HEADS, {"num_heads": 3}), rank_fraction=0.5),
    _dion("split-experts", Group(SPLIT_EXPERTS, {"split_sizes": (6, 4, 2)}), rank_fraction=0.5),
    _dion("interleaved", Group(INTERLEAVED, {"interleaved": 3}), rank_fraction=0.5),
    _dion(
        "interleaved-split",
        Group(((12, 3), (12, 9)), {"interleaved": 2, "split_sizes": (4, 2)}),
        rank_fraction=0.5,
    ),
    _dion("interleaved-middle", Group(MIDDLE, {"interleaved": 2}), rank_fraction=0.5),
    _dion("split-short", Group(((3, 12, 20),), {"num_heads": 3}), rank_fraction=0.5),
    _dion("turned-experts", Group(TURNED_EXPERTS, TURNED), rank_fraction=0.5),
    _dion("split", Group(((12, 6), (12, 9)), {"split_sizes": (6, 4, 2)}), rank_fraction=0.5),
    _dion("column-heads", Group(COLUMN_HEADS, {"num_heads": 3, "split_dim": 1}), rank_fraction=0.5),
    _dion(
        "column-split",
        Group(((6, 12), (9, 12)), {"split_sizes": (6, 4, 2), "split_dim": 1}),
        rank_fraction=0.5,
    ),
    *(
        _dion(f"orthonormal-{name}", group, right_factor="orthonormal", rank_fraction=0.5)
        for name, group in (
            ("heads", Group(HEADS, {"num_heads": 3})),
            ("column-heads", Group(COLUMN_HEADS, {"num_heads": 3, "split_dim": 1})),
            ("split", Group(((12, 6), (12, 9)), {"split_sizes": (6, 4, 2)})),
        )
    ),
    *(row for make in (_normuon, _dion2, _nordion2) for row in _family(make)),
    *(row for make in (_muon, _normuon, _dion, _dion2, _nordion2) for row in _held(make)),
    _normuon("nesterov", nesterov=True, adjust_lr=None),
    _normuon("mu", mu=0.5, epsilon=0.25, muon_beta2=0.5),
    _normuon("owned", owned_states=True, nesterov=True),
    _normuon("owned-flatten", Group(KERNELS), owned_states=True, flatten=True),
    _dion2("half", fraction=0.5, ef_decay=0.5, selection_scope="global"),
    _dion2("all", fraction=1.0, selection_scope="global"),
    _dion2("few", fraction=0.05, selection_scope="global"),
    _nordion2("half", fraction=0.5, mu=0.5, muon_beta2=0.75, selection_scope="global"),
    _nordion2("all", fraction=1.0, selection_scope="global"),
    _adamw("default"),
    _adamw("amsgrad", amsgrad=True, betas=(0.9, 0.5)),
    _adamw("cautious", cautious_wd=True),
    _adamw("maximize", maximize=True),
    _adamw("eps", eps=0.25, betas=(0.5, 0.75)),
    _adamw("no-decay", weight_decay=0.0),
    _adamw("no-momentum", betas=(0.0, 0.9)),
    _adamw("mixed", *OTHER_WAY),
    _adamw("hyperball", Group((*MATRICES, *VECTORS)), **SPHERE),
    _adamw("hyperball-experts", Group(EXPERTS), **SPHERE),
    _adamw("hyperball-amsgrad", Group(MATRICES), amsgrad=True, **SPHERE),
    _adamw("floor", Group((*MATRICES[:4], *VECTORS)), weight_norm="floor", weight_norm_floor=2.0),
    _adamw("floor-cautious", Group(MATRICES), weight_norm="floor", weight_norm_floor=2.0, cautious_wd=True),
    _adamw("row-floor", Group(MATRICES), weight_norm="row_floor", weight_norm_floor=2.0),
    _lion("default"),
    _lion("no-decay", weight_decay=0.0),
    _lion("cautious", cautious_wd=True),
    _lion("maximize", maximize=True),
    _lion("betas", betas=(0.9, 0.1)),
    _lion("hyperball", Group((*MATRICES, *VECTORS)), **SPHERE),
    _lion("row-floor-cautious", Group(MATRICES), weight_norm="row_floor", cautious_wd=True),
    *NORMED_CASES,
    *GALORE_CASES,
    *APOLLO_CASES,
    *SOAP_CASES,
    *SOAP_MUON_CASES,
)
DERIVED = derived.classes_without({case.algorithm for case in BY_HAND})
"""Classes without a handwritten row."""


def _derived(cls: type[OxOptimizer]) -> list[Case]:
    """Rows of a class by its schema."""
    shared = {"default": {}, "cautious": {"cautious_wd": True}, "maximize": {"maximize": True}}
    shared["no-decay"] = {"weight_decay": 0.0}
    norms = {"hyperball": SPHERE, "floor": {"weight_norm": "floor", "weight_norm_floor": 2.0}}
    rows = [(name, kwargs, VECTORS) for name, kwargs in (*shared.items(), *derived.settings(cls))]
    if cls._LEAVES_UPDATE:
        rows += [(name, kwargs, (*MATRICES[:4], *VECTORS)) for name, kwargs in norms.items()]
    return [
        Case(f"{cls._ALGORITHM}-{name}", cls, cls._ALGORITHM, {**BASE, **kwargs}, (Group(shapes),))
        for name, kwargs, shapes in rows
    ]


ALL_CASES: tuple[Case, ...] = (*BY_HAND, *(case for cls in DERIVED for case in _derived(cls)))


def cases_of(algorithm: str) -> list[Case]:
    """The rows whose own algorithm is ``algorithm``."""
    return [case for case in ALL_CASES if case.algorithm == algorithm]


def case_named(name: str) -> Case:
    """The row with this name."""
    (case,) = (case for case in ALL_CASES if case.name == name)
    return case


SMALL_CASES = tuple(
    Case(
        f"{algorithm}-{label}",
        case.cls,
        algorithm,
        {**case.kwargs, **kwargs},
        (Group(((12, 8), (12, 8), (8, 12), (8, 8))),),
    )
    for algorithm, label, kwargs in (
        ("dion", "full", {}),
        ("dion", "quarter", {"rank_fraction": 0.25}),
        ("dion", "cqr", {"qr_method": "cqr", "cqr_warmup_steps": 0, "rank_fraction": 0.5}),
        ("dion", "qr", {"qr_method": "qr", "rank_fraction": 0.5}),
        ("dion", "orthonormal", {"right_factor": "orthonormal", "rank_fraction": 0.5}),
        ("muon", "polar", {}),
        ("muon", "schulz", {"use_polar_express": False, "nesterov": True}),
        ("normuon", "polar", {}),
        ("dion2", "half", {"fraction": 0.5, "selection_scope": "global"}),
        ("nordion2", "half", {"fraction": 0.5, "selection_scope": "global"}),
        ("adamw", "default", {}),
        ("lion", "default", {}),
        ("lamb", "default", {}),
        ("adafactor", "beta1", {"beta1": 0.75}),
        ("came", "default", {}),
        ("galore_adamw", "rotate", {"rotate_moments": True}),
        ("apollo_adamw", "tensor", {"scale_type": "tensor"}),
        ("soap", "default", {}),
        ("soap_muon", "default", {}),
        *((cls._ALGORITHM, "default", {}) for cls in DERIVED),
    )
    for case in cases_of(algorithm)[:1]
)
"""Four matrices, two of them alike, under a few settings of every algorithm."""
