"""Rows of the table of optimizers for those whose moments are of a projected gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import oxidion

from .case import Case, Group
from .inputs import Shape

BASE = {"lr": 2.0**-6, "weight_decay": 2.0**-3}

SHAPES: tuple[Shape, ...] = ((12, 8), (8, 12), (8, 8), (12, 8), (17, 5), (5, 17))
EXPERTS: tuple[Shape, ...] = ((3, 6, 7), (2, 7, 6), (2, 2, 6, 5), (3, 5, 5))
SKETCHED: tuple[Shape, ...] = ((40, 48), (48, 40), (44, 44), (2, 40, 43))
LONG: tuple[Shape, ...] = ((64, 8), (8, 72), (60, 5), (2, 48, 6))
"""So long that sums over the long side are fewer than the elements of a shard on a few processes."""
OTHERS: tuple[Shape, ...] = ((5,), (), (12, 8), (3, 4), (8, 12))


def _galore(name: str, *groups: Group, keys: Mapping[str, Any] | None = None, **kwargs: Any) -> Case:
    settings = {**BASE, "rank": 4, "update_proj_gap": 2, **kwargs}
    return Case(
        f"galore-{name}",
        oxidion.GaLoreAdamW,
        "galore_adamw",
        settings,
        groups or (Group(SHAPES, keys or {}),),
    )


# Between both bases of one gradient its projection is diagonal. Adam would make rounding noise of the rest as
# large as the diagonal, unless epsilon is above the noise.
FULL = {"proj_type": "full", "eps": 0.25, "scale": 1.0}
# Owners keep moments of 32 bits.
OWNED = {"owned_states": True, "state_bits": 32}

GALORE_CASES: tuple[Case, ...] = (
    _galore("default"),
    _galore("reverse", proj_type="reverse_std"),
    _galore("left", proj_type="left"),
    _galore("right", proj_type="right", update_proj_gap=3),
    _galore("full", **FULL),
    _galore("exact", svd="exact"),
    _galore("exact-full", svd="exact", update_proj_gap=3, **FULL),
    _galore("random", svd="random", update_proj_gap=3),
    _galore("random-full", svd="random", rank=2, **FULL),
    _galore("sketch", Group(SKETCHED), svd="random", rank=3, update_proj_gap=3),
    _galore("sketch-full", Group(SKETCHED), svd="random", rank=2, **FULL),
    _galore("long", Group(LONG)),
    _galore("long-sketch", Group(LONG), svd="random", rank=3, update_proj_gap=3),
    _galore("rank1", rank=1),
    _galore("every-step", update_proj_gap=1),
    _galore("rotate", rotate_moments=True),
    _galore("rotate-full", rotate_moments=True, **FULL),
    _galore("stagger", stagger=True, update_proj_gap=3),
    _galore("experts", Group(EXPERTS)),
    _galore("experts-full", Group(EXPERTS), rank=3, **FULL),
    _galore("late", decay_order="galore"),
    _galore("cautious", cautious_wd=True),
    _galore("cautious-late", cautious_wd=True, decay_order="galore"),
    _galore("maximize", maximize=True),
    _galore("eps", eps=0.25, betas=(0.5, 0.75), scale=1.0),
    _galore("no-decay", weight_decay=0.0),
    _galore("fallback", Group(OTHERS), Group(OTHERS, {"rank": None}), Group(OTHERS, {"rank": 8})),
    _galore("fallback-late", Group(OTHERS, {"rank": None}), decay_order="galore"),
    _galore("fallback-cautious-late", Group(OTHERS, {"rank": None}), cautious_wd=True, decay_order="galore"),
    _galore("owned", **OWNED),
    _galore("owned-right", proj_type="right", update_proj_gap=3, **OWNED),
    _galore("owned-left", proj_type="left", decay_order="galore", **OWNED),
    _galore("owned-full", **FULL, **OWNED),
    _galore("owned-long", Group(LONG), **OWNED),
    _galore("owned-sketch", Group(SKETCHED), svd="random", rank=3, update_proj_gap=3, **OWNED),
    _galore("owned-rotate", rotate_moments=True, stagger=True, **OWNED),
    _galore("owned-rotate-full", rotate_moments=True, **FULL, **OWNED),
    _galore("owned-experts", Group(EXPERTS), cautious_wd=True, **OWNED),
    _galore("owned-fallback", Group(OTHERS), Group(OTHERS, {"rank": None}), **OWNED),
    _galore(
        "mixed",
        Group(SHAPES[:3]),
        Group(OTHERS, {"algorithm": "adamw", "lr": 2.0**-5}),
        Group(SHAPES[:2], {"algorithm": "muon", "mu": 0.9}),
    ),
)


def _apollo(name: str, *groups: Group, cls: type = oxidion.APOLLOAdamW, **kwargs: Any) -> Case:
    settings = {**BASE, "rank": 4, "update_proj_gap": 2, **kwargs}
    return Case(f"apollo-{name}", cls, "apollo_adamw", settings, groups or (Group(SHAPES),))


APOLLO_CASES: tuple[Case, ...] = (
    _apollo("default"),
    _apollo("tensor", scale_type="tensor", scale=4.0),
    _apollo("reverse", proj_type="reverse_std", update_proj_gap=3),
    _apollo("left", proj_type="left"),
    _apollo("right", proj_type="right", rank=3, scale_type="tensor"),
    _apollo("experts", Group(EXPERTS)),
    _apollo("experts-tensor", Group(EXPERTS), scale_type="tensor"),
    _apollo("early", decay_order="torch"),
    _apollo("cautious", cautious_wd=True),
    _apollo("maximize", maximize=True),
    _apollo("eps", eps=0.25, betas=(0.5, 0.75)),
    _apollo("seed", seed=7),
    _apollo("owned", owned_states=True),
    _apollo("owned-tensor", scale_type="tensor", scale=4.0, owned_states=True),
    _apollo("owned-reverse", proj_type="reverse_std", update_proj_gap=3, owned_states=True),
    _apollo("owned-experts", Group(EXPERTS), cautious_wd=True, owned_states=True),
    _apollo("owned-fallback", Group(OTHERS), Group(OTHERS, {"rank": None}), owned_states=True),
    _apollo("fallback", Group(OTHERS), Group(OTHERS, {"rank": None})),
    _apollo("mini", cls=oxidion.APOLLOMini, rank=1, scale=128.0, scale_type="tensor"),
)
