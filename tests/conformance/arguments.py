"""Constructor arguments of the classes: what they are run with, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import torch

import oxidion
from support import derived

# Every class takes these.
SHARED: tuple[dict[str, Any], ...] = (
    {},
    {"lr": 0.02},
    {"lr": torch.tensor(0.001)},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
    {"weight_decay": torch.tensor(0.1)},
    {"betas": (0.5, 0.75)},
    {"capturable": True},
    {"lr": torch.tensor(0.001), "capturable": True},
    {"state_dtype": torch.float64},
    {"max_batch_bytes": 4096},
    {"workspace_limit": 2**28},
    {"state_bits": 8},
    {"stochastic_rounding": True},
)
MATRIX: tuple[dict[str, Any], ...] = (
    {"mu": 0.5},
    {"epsilon": 1e-4},
    {"orth_dtype": "float32"},
    {"orth_dtype": "float64"},
    {"orth_dtype": "auto"},
)
FAMILY: tuple[dict[str, Any], ...] = (
    *MATRIX[1:],
    {"ns_coefficients": [(1.5, -0.5, 0.0)], "ns_steps": 8},
    {"orth_dtype": "bfloat16"},
    {"cautious_wd": True, "weight_decay": 0.1},
    {"adjust_lr": "rms_norm"},
    {"flatten": True},
    {"use_polar_express": False},
    {"orth_method": "svd"},
    {"orth_preset": "fast"},
)
LOW_RANK: tuple[dict[str, Any], ...] = (
    {"eps": 1e-4},
    {"rank": 2},
    {"rank": 1, "update_proj_gap": 2},
    {"rank": 2, "proj_type": "reverse_std", "scale": 2.0},
    {"rank": 2, "cautious_wd": True, "weight_decay": 0.1},
    {"rank": 2, "decay_order": "torch", "weight_decay": 0.1},
    {"rank": 2, "decay_order": "galore", "weight_decay": 0.1, "maximize": True},
)
OWN: dict[str, tuple[dict[str, Any], ...]] = {
    "Dion": (
        *MATRIX,
        {"rank_fraction": 0.5},
        {"rank_fraction": 0.25, "rank_multiple_of": 2},
        {"rank_fraction": 0.5, "route": "gather"},
        {"power_iters": 2},
        {"right_factor": "orthonormal", "rank_fraction": 0.5},
        {"weight_norm": "floor", "weight_norm_floor": 0.5},
        {"qr_method": "qr"},
        {"qr_method": "cqr", "cqr_warmup_steps": 2},
        {"qr_method": "cqr2"},
        {"rcqr_oversample": 2.0},
        {"seed": 5},
        {"adjust_lr": "rms_norm"},
        {"flatten": True},
        {"cautious_wd": True, "weight_decay": 0.1},
        {"mixed_precision_config": oxidion.DionMixedPrecisionConfig(momentum_dtype=torch.float64)},
    ),
    "Muon": (
        *MATRIX,
        {"orth_dtype": "bfloat16"},
        {"nesterov": True},
        {"cautious_wd": True, "weight_decay": 0.1},
        {"adjust_lr": "rms_norm"},
        {"adjust_lr": None},
        {"flatten": True},
        {"use_polar_express": False},
        {"orth_method": "svd"},
        {"orth_preset": "fast"},
        {"orth_preset": "fast", "ns_steps": 3},
        {"orth_preset": "fast"},
        {"orth_method": "gram", "ns_coefficients": "cans"},
        {"ns_coefficients": [(1.5, -0.5, 0.0)], "ns_steps": 8},
        {"owned_states": True},
        {"weight_norm": "floor", "weight_norm_floor": 0.5},
        {"weight_norm": "row_floor", "weight_norm_floor": 0.5},
    ),
    "NorMuon": (
        *FAMILY,
        {"weight_norm": "floor", "weight_norm_floor": 0.5},
        {"mu": 0.5},
        {"nesterov": True},
        {"muon_beta2": 0.5},
        {"owned_states": True},
        {"norm_scope": "shard"},
    ),
    "Dion2": (
        *FAMILY,
        {"ef_decay": 0.5},
        {"fraction": 1.0},
        {"selection_scope": "global"},
        {"weight_norm": "floor", "weight_norm_floor": 0.5},
    ),
    "NorDion2": (
        *FAMILY,
        {"mu": 0.5},
        {"fraction": 1.0},
        {"muon_beta2": 0.5},
        {"selection_scope": "global"},
        {"norm_scope": "shard"},
        {"weight_norm": "row_floor", "weight_norm_floor": 0.5},
    ),
    "AdamW": (
        {"eps": 1e-4},
        {"amsgrad": True},
        {"amsgrad": True, "weight_decay": 0.1, "maximize": True},
        {"cautious_wd": True, "weight_decay": 0.1},
        {"weight_norm": "floor", "weight_norm_floor": 0.5},
        {"weight_norm": "row_floor", "weight_norm_floor": 0.5},
    ),
    "Lion": (
        {"cautious_wd": True, "weight_decay": 0.1},
        {"weight_norm": "floor", "weight_norm_floor": 0.5},
    ),
    "Lamb": (
        {"eps": 1e-4},
        {"debias": "step", "weight_decay": 0.1},
        {"debias": "none", "always_adapt": True},
        {"phi": (0.1, 10.0), "trust_clip": 5.0, "always_adapt": True},
        {"max_grad_norm": 0.5},
        {"grad_averaging": False},
        {"cautious_wd": True, "weight_decay": 0.1},
    ),
    "Adafactor": (
        {"beta1": 0.9},
        {"eps": (1e-20, 1e-2)},
        {"scale_parameter": True},
        {"clip_threshold": 0.5},
        {"decay_rate": -0.5},
        {"cautious_wd": True, "weight_decay": 0.1},
    ),
    "CAME": (
        {"betas": (0.5, 0.75, 0.875)},
        {"eps": (1e-20, 1e-10)},
        {"clip_threshold": 0.5},
        {"cautious_wd": True, "weight_decay": 0.1},
    ),
    "GaLoreAdamW": (
        *LOW_RANK,
        # The framework takes norms of states, and the norm of a quantized state has no meaning.
        {"rank": 2, "svd": "exact", "block_size": 64, "min_quant_numel": 8192},
        {"rank": 2, "seed": 5},
        {"rank": 2, "svd": "random", "seed": 5},
        {"rank": 2, "proj_type": "full"},
        {"rank": 2, "rotate_moments": True, "update_proj_gap": 2},
        {"rank": 2, "stagger": True, "update_proj_gap": 3},
        {"rank": 2, "owned_states": True},
    ),
    "APOLLOAdamW": (
        *LOW_RANK,
        {"rank": 2, "scale_type": "tensor"},
        {"rank": 2, "seed": 5},
        {"rank": 2, "owned_states": True},
    ),
    "SOAP": (
        {"eps": 1e-4},
        {"precondition_frequency": 1},
        {"sides": "short", "precondition_frequency": 2, "shampoo_beta": 0.5},
        {"sides": "unsharded", "cautious_wd": True, "weight_decay": 0.1},
        {"max_precondition_dim": 4},
        {"correct_bias": False, "normalize_grads": True},
        {"decay_order": "torch", "weight_decay": 0.1, "maximize": True},
        {"seed": 5, "flatten": True},
        {"merge_dims": True, "precondition_frequency": 2},
        {"owned_states": True, "precondition_frequency": 2},
        {"weight_norm": "row_floor", "weight_norm_floor": 0.5},
    ),
    "SOAPMuon": (
        *FAMILY,
        {"mu": 0.5, "weight_norm": "row_floor", "weight_norm_floor": 0.5},
        {"beta2": 0.5, "eps": 1e-4},
        {"precondition_frequency": 1, "sides": "short"},
        {"denom_power": 0.25, "orth_norm": "schatten4", "seed": 5},
        {"max_precondition_dim": 4, "shampoo_beta": 0.5, "betas": (0.5, 0.9)},
        {"owned_states": True},
    ),
    "APOLLOMini": (
        {"scale": 4.0},
        {"update_proj_gap": 2, "owned_states": True},
        {"scale": 1.0, "eps": 1e-4, "rank": 1, "proj_type": "left", "scale_type": "tensor", "seed": 5},
        {"scale": 1.0, "cautious_wd": True, "weight_decay": 0.1, "decay_order": "torch"},
    ),
}
LEAST: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Lion": {},
    "Lamb": {},
    "GaLoreAdamW": {},
    "APOLLOAdamW": {},
    "APOLLOMini": {},
    "SOAP": {},
    # These have no default number for lr, which the framework writes into groups and multiplies.
    "Adafactor": {"lr": 0.01, "relative_step": False, "scale_parameter": False},
    "CAME": {"lr": 0.001},
}
"""Arguments of every input of a class; those of the classes for matrices are `STRICT`."""
STRICT = {"strict": False}
IDLE = {"SOAP": 1}
"""Number of first gradients of a parameter that leave it where it is, by class."""
TWO_BETAS = (
    *("AdamW", "Lion", "Lamb", "GaLoreAdamW", "APOLLOAdamW", "APOLLOMini", "SOAP"),
    *("Dion", "Muon", "NorMuon", "Dion2", "NorDion2"),
)
BAD: dict[str, tuple[tuple[str, object], ...]] = {
    "Dion": (
        ("mu", -1.0),
        ("epsilon", math.nan),
        ("rank_fraction", 0.0),
        ("rank_fraction", 1.5),
        ("rank_multiple_of", 0),
        ("power_iters", 0),
        ("qr_method", "svd"),
        ("orth_dtype", "int8"),
    ),
    "GaLoreAdamW": (("rank", 0), ("svd", "qr"), ("update_proj_gap", 0), ("proj_type", "up")),
    "APOLLOAdamW": (("rank", 0), ("scale_type", "row"), ("proj_type", "full")),
    "APOLLOMini": (("rank", 0), ("scale", -1.0)),
    "SOAPMuon": (("mu", -1.0), ("denom_power", -1.0), ("orth_norm", "nuclear"), ("sides", "left")),
    "SOAP": (("eps", -1.0), ("precondition_frequency", 0), ("sides", "left")),
    "Muon": (("mu", -1.0), ("epsilon", math.nan), ("adjust_lr", "arbitrary"), ("orth_dtype", "int8")),
    "NorMuon": (("muon_beta2", 1.0), ("norm_scope", "local")),
    "Dion2": (("fraction", 0.0), ("fraction", 7.5), ("ef_decay", -1.0), ("selection_scope", "shard")),
    "NorDion2": (("fraction", 0.0), ("muon_beta2", -0.5), ("mu", -1.0)),
    "AdamW": (("eps", -1.0), ("betas", (1.0, 0.0)), ("weight_norm", "sphere")),
    "Lion": (),
    "Lamb": (("eps", -1.0), ("debias", "lr"), ("phi", (2.0, 1.0)), ("trust_clip", 0.0)),
    "Adafactor": (("eps", (-1.0, 0.0)), ("clip_threshold", 0.0), ("decay_rate", 0.8), ("beta1", 1.0)),
    "CAME": (("eps", 1e-30), ("clip_threshold", -1.0), ("betas", (0.9, 0.999)), ("betas", (0.9, 1.0, 0.9))),
}
for _cls in derived.classes_without({getattr(oxidion, name)._ALGORITHM for name in OWN}):
    _name = _cls.__name__
    OWN[_name] = (
        {"cautious_wd": True, "weight_decay": 0.1},
        *({"weight_norm": rule, "weight_norm_floor": 0.5} for rule in ("floor",) if _cls._LEAVES_UPDATE),
        *(keys for _, keys in derived.settings(_cls)),
    )
    LEAST[_name], BAD[_name] = {}, derived.bad(_cls)
BAD_ANYWHERE: tuple[tuple[str, object], ...] = (
    ("lr", -1.0),
    ("lr", math.inf),
    ("weight_decay", -1.0),
    ("weight_decay", math.nan),
    ("betas", (-0.1, 0.9)),
    ("betas", (0.9, math.nan)),
)


def least(name: str) -> dict[str, Any]:
    """Arguments without which a class does not take the framework's parameters."""
    return LEAST.get(name, STRICT)
