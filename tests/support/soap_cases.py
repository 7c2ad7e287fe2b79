"""Rows of the table of optimizers for those that work in an eigenbasis."""

from __future__ import annotations

from typing import Any

import oxidion

from .case import Case, Group
from .inputs import Shape

BASE = {"lr": 2.0**-6, "weight_decay": 2.0**-3, "precondition_frequency": 2}

SHAPES: tuple[Shape, ...] = ((12, 8), (8, 12), (8, 8), (12, 8), (17, 5), (5, 17), (1, 7), (7, 1))
EXPERTS: tuple[Shape, ...] = ((3, 6, 4), (2, 4, 6), (3, 5, 5), (2, 2, 6, 5))
KERNELS: tuple[Shape, ...] = ((6, 4, 3, 3), (16, 2, 2, 2), (6, 6))
HEADS: tuple[Shape, ...] = ((12, 8), (12, 3), (12, 8))
COLUMN_HEADS: tuple[Shape, ...] = ((8, 12), (3, 12), (8, 12))
MERGED_ROWS: tuple[Shape, ...] = ((4, 3, 4, 3), (6, 2, 10), (2, 3), (5, 2, 4))
MERGED_COLUMNS: tuple[Shape, ...] = ((8, 3, 3), (12, 6, 2), (9, 8), (7, 2, 2, 3))
SPHERE: dict[str, Any] = {"weight_norm": "hyperball", "weight_decay": 0.0}
VECTORS: tuple[Shape, ...] = ((5,), (), (1,), (8, 6), (13,))


def _soap(name: str, *groups: Group, **kwargs: Any) -> Case:
    settings = {**BASE, **kwargs}
    return Case(f"soap-{name}", oxidion.SOAP, "soap", settings, groups or (Group(SHAPES),))


SOAP_CASES: tuple[Case, ...] = (
    _soap("default"),
    _soap("every-step", precondition_frequency=1),
    _soap("third-step", precondition_frequency=3),
    _soap("short", sides="short"),
    _soap("short-every-step", sides="short", precondition_frequency=1),
    _soap("limit", max_precondition_dim=8),
    _soap("no-basis", max_precondition_dim=0),
    _soap("shampoo-beta", shampoo_beta=0.5),
    _soap("plain-rates", correct_bias=False, normalize_grads=True),
    _soap("normalized-short", normalize_grads=True, sides="short"),
    _soap("experts", Group(EXPERTS, {"interleaved": 1})),
    _soap("experts-short", Group(EXPERTS, {"interleaved": 1}), sides="short"),
    _soap("heads", Group(HEADS, {"num_heads": 3}), Group(COLUMN_HEADS, {"num_heads": 3, "split_dim": 1})),
    _soap("heads-short", Group(HEADS, {"num_heads": 3}), sides="short"),
    _soap(
        "interleaved", Group(((12, 8), (18, 4)), {"interleaved": 2}), Group(((5, 2, 8),), {"interleaved": 2})
    ),
    _soap("interleaved-short", Group(((12, 8), (12, 3)), {"interleaved": 2, "num_heads": 3}), sides="short"),
    _soap("blocks", Group(HEADS, {"split_sizes": (6, 2, 4)})),
    _soap("blocks-short", Group(HEADS, {"split_sizes": (6, 2, 4)}), sides="short"),
    _soap("flatten", Group(KERNELS), flatten=True),
    # Rows of several dimensions, for one matrix of all its dimensions; then columns.
    _soap("merged-rows", Group(MERGED_ROWS), merge_dims=True, max_precondition_dim=12),
    _soap("merged-columns", Group(MERGED_COLUMNS), merge_dims=True, max_precondition_dim=12),
    _soap("merged-short", Group(MERGED_COLUMNS), merge_dims=True, max_precondition_dim=12, sides="short"),
    _soap("normalized", normalize_grads=True),
    _soap("hyperball-normalized-turned", normalize_grads=True, **SPHERE),
    _soap("owned", owned_states=True),
    _soap("owned-short", owned_states=True, sides="short", precondition_frequency=1),
    _soap("owned-experts", Group(EXPERTS, {"interleaved": 1}), owned_states=True),
    _soap("owned-hyperball", normalize_grads=True, owned_states=True, **SPHERE),
    _soap(
        "owned-heads",
        Group(HEADS, {"num_heads": 3}),
        Group(COLUMN_HEADS, {"num_heads": 3, "split_dim": 1}),
        owned_states=True,
    ),
    _soap("vectors", Group(VECTORS)),
    _soap("early", decay_order="torch"),
    _soap("cautious", cautious_wd=True),
    _soap("cautious-early", cautious_wd=True, decay_order="torch"),
    _soap("maximize", maximize=True),
    _soap("eps", eps=0.25, betas=(0.5, 0.75)),
    _soap("no-decay", weight_decay=0.0),
    _soap("seed", seed=7),
    _soap("hyperball", **SPHERE),
    _soap("hyperball-experts", Group(EXPERTS, {"interleaved": 1}), **SPHERE),
    _soap("hyperball-heads", Group(HEADS, {"num_heads": 3}), sides="short", **SPHERE),
    _soap("hyperball-normalized", normalize_grads=True, sides="short", **SPHERE),
    _soap("hyperball-vectors", Group(VECTORS), **SPHERE),
    _soap("hyperball-merged-rows", Group(MERGED_ROWS), merge_dims=True, max_precondition_dim=12, **SPHERE),
    _soap("floor", weight_norm="floor", weight_norm_floor=2.0),
    _soap("floor-early", weight_norm="floor", weight_norm_floor=2.0, decay_order="torch", cautious_wd=True),
    _soap("floor-cautious", weight_norm="floor", weight_norm_floor=2.0, cautious_wd=True),
    _soap("row-floor", weight_norm="row_floor", weight_norm_floor=2.0),
    _soap("row-floor-flatten", Group(KERNELS), flatten=True, weight_norm="row_floor", weight_norm_floor=2.0),
    _soap(
        "mixed",
        Group(SHAPES[:3]),
        Group(VECTORS, {"algorithm": "adamw", "lr": 2.0**-5}),
        Group(SHAPES[:2], {"algorithm": "muon", "mu": 0.9}),
    ),
)


def _soap_muon(name: str, *groups: Group, **kwargs: Any) -> Case:
    settings = {**BASE, **kwargs}
    return Case(f"soap_muon-{name}", oxidion.SOAPMuon, "soap_muon", settings, groups or (Group(SHAPES),))


SOAP_MUON_CASES: tuple[Case, ...] = (
    _soap_muon("default"),
    _soap_muon("every-step", precondition_frequency=1),
    _soap_muon("short", sides="short"),
    _soap_muon("limit", max_precondition_dim=8),
    _soap_muon("no-basis", max_precondition_dim=0),
    _soap_muon("no-power", denom_power=0.0),
    _soap_muon("power", denom_power=0.25, eps=2.0**-10),
    _soap_muon("svd", orth_method="svd"),
    _soap_muon("schatten", orth_norm="schatten4"),
    _soap_muon("shampoo-beta", shampoo_beta=0.5),
    _soap_muon("experts", Group(EXPERTS, {"interleaved": 1})),
    _soap_muon(
        "heads", Group(HEADS, {"num_heads": 3}), Group(COLUMN_HEADS, {"num_heads": 3, "split_dim": 1})
    ),
    _soap_muon("blocks", Group(HEADS, {"split_sizes": (6, 2, 4)})),
    _soap_muon("flatten", Group(KERNELS), flatten=True),
    _soap_muon("owned", owned_states=True),
    _soap_muon("owned-schatten", orth_norm="schatten4", owned_states=True),
    _soap_muon("every-step-short", sides="short", precondition_frequency=1),
    _soap_muon("hyperball-svd", orth_method="svd", **SPHERE),
    _soap_muon("cautious", cautious_wd=True),
    _soap_muon("maximize", maximize=True),
    _soap_muon("no-decay", weight_decay=0.0),
    _soap_muon("hyperball", weight_norm="hyperball", weight_decay=0.0, sides="short"),
    _soap_muon("hyperball-heads", Group(HEADS, {"num_heads": 3}), weight_norm="hyperball", weight_decay=0.0),
    _soap_muon("row-floor", weight_norm="row_floor", weight_norm_floor=2.0),
    _soap_muon(
        "mixed",
        Group(SHAPES[:3]),
        Group(VECTORS, {"algorithm": "adamw", "lr": 2.0**-5}),
        Group(SHAPES[:2], {"algorithm": "soap"}),
    ),
)
