"""Optional features, and one class of each kind that has them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Lamb": {"weight_decay": 0.0},
    "Adafactor": {"relative_step": False},
    "Muon": {"orth_dtype": "float64"},
    "Dion": {"rank_fraction": 0.5},
    "GaLoreAdamW": {"rank": 3, "update_proj_gap": 2, "state_bits": 32},
    "SOAP": {"precondition_frequency": 2},
}
"""One class of each kind, with arguments that make a short run show what they do."""
NORMED = ("AdamW", "Muon", "Dion", "SOAP")
QUANTIZED = ("AdamW", "Lamb", "Muon", "GaLoreAdamW", "SOAP")


class Feature(NamedTuple):
    """An optional feature.

    Attributes:
        keys: of the group.
        classes: that have it.
        dtype: of the parameters.
        copies: states that are made of the weights: they restart where these are 0.
    """

    keys: dict[str, Any]
    classes: tuple[str, ...] = tuple(KINDS)
    dtype: torch.dtype = torch.float64
    copies: tuple[str, ...] = ()


EMA = {"average": "ema", "average_decay": 0.75}
FEATURES = {
    "none": Feature({}),
    "ema": Feature(EMA, copies=("average_step",)),
    "late-ema": Feature({**EMA, "average_start": 2}, copies=("average_step",)),
    "narrow-ema": Feature({**EMA, "average_dtype": "bfloat16"}, copies=("average_step",)),
    "schedule-free": Feature({"average": "schedule_free"}, copies=("average_step",)),
    "hyperball": Feature({"weight_norm": "hyperball", "weight_decay": 0.0}, NORMED, copies=("radius",)),
    "row-floor": Feature({"weight_norm": "row_floor"}, NORMED),
    "both": Feature(
        {"weight_norm": "hyperball", "weight_decay": 0.0, "average": "schedule_free"},
        NORMED,
        copies=("radius", "average_step"),
    ),
    "cautious": Feature({"cautious_wd": True, "weight_decay": 0.1}, ("AdamW", "Muon", "Dion", "SOAP")),
    "amsgrad": Feature({"amsgrad": True}, ("AdamW",)),
    "quantized": Feature({"state_bits": 8, "min_quant_numel": 0, "block_size": 8}, QUANTIZED, torch.float32),
    "narrow-states": Feature({"state_dtype": "bfloat16"}, dtype=torch.float32),
    "rounded": Feature({"stochastic_rounding": True}, dtype=torch.bfloat16),
    "masters": Feature({"master_weights": True}, dtype=torch.bfloat16),
    "masters-ema": Feature({"master_weights": True, **EMA}, dtype=torch.bfloat16, copies=("average_step",)),
    "ascending": Feature({"maximize": True}),
}
