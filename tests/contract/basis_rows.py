"""The rows of the classes that work in an eigenbasis."""

from __future__ import annotations

import math

import oxidion

from .case import Case

NAN, INF = math.nan, math.inf

KEYWORDS = frozenset(
    {
        "weight_norm",
        "weight_norm_floor",
        "shampoo_beta",
        "precondition_frequency",
        "max_precondition_dim",
        "sides",
        "flatten",
        "seed",
        "maximize",
        "foreach",
        "capturable",
        "differentiable",
        "cautious_wd",
        "strict",
        "max_batch_bytes",
        "workspace_limit",
        "state_dtype",
        "state_bits",
        "stochastic_rounding",
        "master_weights",
        "init_state",
        "owned_states",
        "distributed_mesh",
    }
)
MOMENTS = frozenset({"step", "exp_avg", "exp_avg_sq"})
BASES = frozenset({"basis_step", "L", "R", "Q_L", "Q_R"})
BAD = (
    *((key, value) for key in ("lr", "weight_decay", "eps") for value in (-1.0, NAN, INF)),
    ("shampoo_beta", 1.0),
    ("shampoo_beta", NAN),
    ("precondition_frequency", 0),
    ("precondition_frequency", 2.5),
    ("max_precondition_dim", -1),
    ("sides", "left"),
    ("owned_states", "yes"),
    ("flatten", 2),
    ("seed", -1),
    ("seed", 2**63),
)

CASES = (
    Case(
        cls=oxidion.SOAP,
        algorithm="soap",
        positional=(("lr", 3e-3), ("betas", (0.95, 0.95)), ("eps", 1e-8), ("weight_decay", 1e-2)),
        keyword_only=KEYWORDS
        | {"correct_bias", "normalize_grads", "decay_order", "max_precond_dim", "normalize_gradient"}
        | {"merge_dims"},
        state={"soap": MOMENTS | BASES, "soap, vectors": MOMENTS, "adamw": MOMENTS},
        bad=(
            *BAD,
            *(("betas", value) for value in ((-0.1, 0.9), (0.9, 1.0), (NAN, 0.9), (0.9,))),
            ("correct_bias", 2),
            ("normalize_grads", "no"),
            ("merge_dims", "left"),
            ("decay_order", "first"),
            ("weight_norm", "sphere"),
            ("weight_norm_floor", -1.0),
        ),
        other={"lr": 0.03, "betas": (0.5, 0.6), "weight_decay": 0.3, "eps": 0.1, "shampoo_beta": 0.5},
        kwargs={"precondition_frequency": 2, "decay_order": "torch"},
        idle=1,
    ),
    Case(
        cls=oxidion.SOAPMuon,
        algorithm="soap_muon",
        positional=(("lr", 0.02), ("mu", 0.95), ("beta2", 0.9), ("weight_decay", 0.01)),
        keyword_only=KEYWORDS
        | {
            "betas",
            "eps",
            "epsilon",
            "denom_power",
            "adjust_lr",
            "use_polar_express",
            "newton_schulz_func",
            "orth_dtype",
            "orth_method",
            "orth_preset",
            "orth_norm",
            "ns_coefficients",
            "ns_steps",
            "check_grad_sync",
        },
        state={
            "soap_muon": frozenset({"step", "momentum", "exp_avg_sq"}) | BASES,
            "adamw": frozenset({"step_dev", "momentum", "variance"}),
        },
        bad=(
            *BAD,
            *((key, value) for key in ("mu", "epsilon", "denom_power") for value in (-0.1, NAN, INF)),
            ("beta2", 1.0),
            ("orth_norm", "nuclear"),
            ("orth_method", "qr"),
            ("weight_norm", "sphere"),
            ("weight_norm_floor", -1.0),
        ),
        other={"lr": 0.03, "mu": 0.5, "beta2": 0.6, "weight_decay": 0.3, "eps": 0.1, "epsilon": 0.1},
        kwargs={"precondition_frequency": 2},
    ),
)
