"""Which cases meet which layouts: all that may differ, and few of them that have every pair of features."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from oxidion import Muon
from support.cases import (
    ALL_CASES,
    BASE,
    BASIS_ALGORITHMS,
    LOW_RANK_ALGORITHMS,
    MATRIX_ALGORITHMS,
    Case,
    Group,
    case_named,
)
from support.layouts import SETTINGS, WIDE, Setting
from support.pairwise import covering

TRAILING = tuple(case.name for case in ALL_CASES if "flatten" in case.name)
LOCAL = (
    *("always", "betas", "cautious", "eps", "maximize", "mu", "newton-schulz", "no-decay", "none", "phi"),
    *("rms", "step", "sums", "unadapted", "unadjusted", "warmup"),
)
"""Settings that change nothing but elementwise arithmetic, or what is done to whole matrices."""
FEW = ("fsdp4-dim0", "fsdp2-tp3", "hsdp-compressed", "dp2-fsdp2-tp2")

Row = tuple[Case, Setting, str]
"""A case on a layout, and the dtype of its parameters."""


def too_deep(case: Case, setting: Setting) -> bool:
    """Whether a flattened kernel would be cut beyond its second dimension, which is refused."""
    if "middle" in case.name or case.name == "soap-interleaved":
        # Where a dimension counts the matrices whose rows alternate, it cannot be cut.
        middle = [(shape, len(shape) - 2) for shape in case.shapes if len(shape) > 2 and shape[-2] == 2]
        return any(
            kind != "R" and dim == own for shape, own in middle for kind, dim in setting.place(shape).values()
        )
    if "merged-rows" in case.name:
        # Dimensions behind the first are rows too, of some shapes.
        return any(
            dim > 0 for shape in case.shapes for kind, dim in setting.place(shape).values() if kind != "R"
        )
    return (case.name in TRAILING or "merged" in case.name) and any(
        dim > 1 for shape in case.shapes for _, dim in setting.place(shape).values()
    )


def worth(case: Case, setting: Setting) -> bool:
    """Whether a case may behave otherwise on this layout than on a few others."""
    return setting.name in FEW or case.name.split("-", 1)[1] not in LOCAL


DEFAULTS = (
    *("muon", "normuon", "dion2", "nordion2", "adamw", "lion", "lamb", "adafactor", "came", "galore"),
    "apollo",
    "soap",
    "soap_muon",
)
OTHERS = (
    "dion-quarter dion-cqr dion-orthonormal-half muon-nesterov galore-rotate galore-left apollo-tensor"
    " adafactor-scaled"
)
FLOAT32_CASES = (*OTHERS.split(), *(f"{name}-default" for name in DEFAULTS))

PAIRS = [
    (case, setting)
    for case in ALL_CASES
    for setting in SETTINGS
    if worth(case, setting) and not too_deep(case, setting)
]
ROWS: list[Row] = [
    *((case, setting, "float64") for case, setting in PAIRS),
    *((case_named(n), s, "float32") for n in FLOAT32_CASES for s in SETTINGS if s.outer is None),
]
"""All that is worth a comparison with one process."""


def options(case: Case) -> set[str]:
    """Settings of a case and the shapes of its parameters, each as a feature."""
    keys = [case.kwargs, *(group.keys for group in case.groups)]
    settings = {f"{key}={value}" for own in keys for key, value in own.items() if BASE.get(key) != value}
    return {*settings, f"shapes={case.shapes}"}


def traits(setting: Setting) -> set[str]:
    """Shards of a stack of matrices on a layout, numbers of ranks and axes, and the named meshes."""
    places = setting.place((3, 6, 4))
    cuts = "+".join(sorted(f"{kind}{dim}" for kind, dim in places.values() if kind != "R"))
    copies = any(kind == "R" for kind, _ in places.values())
    pending = not all(setting.extra.values())
    sizes = setting.axes.values()
    return {
        f"cuts={cuts}",
        f"replicas={'compressed' if pending else 'averaged' if copies else 'none'}",
        f"named={setting.outer},{setting.inner}",
        f"shards={'empty' if max(sizes) > 8 else 'uneven' if any(n % 2 for n in sizes) else 'even'}",
        f"axes={len(sizes)}",
    }


def features(row: Row) -> set[Hashable]:
    """What a row has: its case, and pairs.

    An algorithm meets every layout, a setting or shape every trait of layouts, and a dtype all of them.
    """
    case, setting, dtype = row
    meets_dtype = (case.algorithm, setting.name, *options(case))
    return {
        case.name,
        (case.algorithm, setting.name),
        *((option, trait) for option in options(case) for trait in traits(setting)),
        *((dtype, other) for other in meets_dtype),
    }


CHOSEN = covering(ROWS, features)
"""Rows that have every pair of features that any row has."""


def kind(algorithm: str) -> str:
    """Algorithms that lay out their work alike."""
    if algorithm in MATRIX_ALGORITHMS:
        return "matrix"
    if algorithm in LOW_RANK_ALGORITHMS:
        return "low rank"
    if algorithm in BASIS_ALGORITHMS:
        return "basis"
    return "elementwise" if algorithm in ("adamw", "lion") else "sums"


WIDE_ROWS = [
    (case_named(name), setting)
    for name in ("dion-quarter", "dion-orthonormal-half", *(f"{name}-default" for name in DEFAULTS))
    for setting in WIDE
]
WIDE_CHOSEN = covering(WIDE_ROWS, lambda row: {row[0].name, (kind(row[0].algorithm), row[1].name)})
"""Every case, and every kind of algorithm on every wide layout."""

LONGER = (
    "soap-default soap-short soap-merged-columns soap-merged-rows soap-hyperball soap-row-floor"
    " soap_muon-default muon-hyperball muon-row-floor galore-owned apollo-owned dion-orthonormal"
)
FEW_SHAPES = Group(((12, 8), (5, 17), (8, 8), (2, 6, 5)))
LONGER_CASES = (
    *(
        case if "merged" in case.name else replace(case, groups=(FEW_SHAPES,))
        for case in map(case_named, LONGER.split())
    ),
    Case("muon-schedule-free", Muon, "muon", BASE, (Group(FEW_SHAPES.shapes, {"average": "schedule_free"}),)),
)
LONGER_ROWS = [(case, setting) for case in LONGER_CASES for setting in WIDE if not too_deep(case, setting)]
LONGER_CHOSEN = covering(LONGER_ROWS, lambda row: {row[0].name, (kind(row[0].algorithm), row[1].name)})
"""Likewise for work of every few steps, and for states and sums that the defaults lack."""
