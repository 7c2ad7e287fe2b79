"""The rows of the classes whose moments are of a projected gradient."""

from __future__ import annotations

import math

import oxidion

from .case import Case

NAN, INF = math.nan, math.inf

KEYWORDS = frozenset(
    {
        "weight_norm",
        "weight_norm_floor",
        "rank",
        "update_proj_gap",
        "scale",
        "proj_type",
        "decay_order",
        "owned_states",
        "state_bits",
        "seed",
        "cautious_wd",
        "maximize",
        "foreach",
        "capturable",
        "differentiable",
        "strict",
        "max_batch_bytes",
        "workspace_limit",
        "state_dtype",
        "stochastic_rounding",
        "master_weights",
        "init_state",
        "distributed_mesh",
    }
)
ADAMW = frozenset({"step", "exp_avg", "exp_avg_sq"})
BAD = (
    *((key, value) for key in ("lr", "weight_decay", "eps", "scale") for value in (-1.0, NAN, INF)),
    *(("betas", value) for value in ((-0.1, 0.9), (0.9, 1.0), (NAN, 0.9), (0.9,))),
    *(("rank", value) for value in (0, -1, 2.5, True)),
    ("update_proj_gap", 0),
    ("proj_type", "up"),
    ("decay_order", "first"),
    ("owned_states", "yes"),
    ("state_bits", 16),
    ("seed", -1),
    ("seed", 2**63),
)
OTHER = {"lr": 0.03, "betas": (0.5, 0.6), "weight_decay": 0.3, "eps": 0.1, "scale": 0.5}

CASES = (
    Case(
        cls=oxidion.GaLoreAdamW,
        algorithm="galore_adamw",
        positional=(("lr", 1e-2), ("betas", (0.9, 0.999)), ("eps", 1e-8), ("weight_decay", 1e-2)),
        keyword_only=KEYWORDS | {"svd", "rotate_moments", "stagger", "block_size", "min_quant_numel"},
        state={"galore_adamw": ADAMW | {"proj", "proj_step"}, "adamw": ADAMW},
        bad=(*BAD, ("svd", "qr"), ("rotate_moments", 2), ("stagger", "no")),
        other=OTHER,
        kwargs={"rank": 2, "update_proj_gap": 2},
    ),
    Case(
        cls=oxidion.APOLLOAdamW,
        algorithm="apollo_adamw",
        positional=(("lr", 1e-3), ("betas", (0.9, 0.999)), ("eps", 1e-6), ("weight_decay", 0.0)),
        keyword_only=KEYWORDS | {"scale_type"},
        state={"apollo_adamw": ADAMW | {"update_norm"}, "adamw": ADAMW},
        bad=(*BAD, ("scale_type", "row"), ("proj_type", "full")),
        other=OTHER,
        kwargs={"rank": 2, "update_proj_gap": 2, "decay_order": "torch"},
    ),
    Case(
        cls=oxidion.APOLLOMini,
        algorithm="apollo_adamw",
        positional=(("lr", 1e-3), ("betas", (0.9, 0.999)), ("eps", 1e-6), ("weight_decay", 0.0)),
        keyword_only=KEYWORDS | {"scale_type"},
        state={"apollo_adamw": ADAMW | {"update_norm"}, "adamw": ADAMW},
        bad=BAD,
        other=OTHER,
        kwargs={"decay_order": "torch"},
    ),
)
