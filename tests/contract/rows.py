"""The rows of the table: one for each class; those with norms or factored moments are in ``memory_rows``."""

from __future__ import annotations

import math

import oxidion

from .basis_rows import CASES as BASIS
from .case import Case
from .low_rank_rows import CASES as LOW_RANK

NAN = math.nan
INF = math.inf

EXTRA = frozenset(
    {
        "maximize",
        "foreach",
        "capturable",
        "differentiable",
        "strict",
        "max_batch_bytes",
        "workspace_limit",
        "state_dtype",
        "state_bits",
        "stochastic_rounding",
        "master_weights",
        "init_state",
        "weight_norm",
        "weight_norm_floor",
        "distributed_mesh",
    }
)

FAMILY = EXTRA | {
    "orth_dtype",
    "orth_method",
    "orth_preset",
    "ns_coefficients",
    "ns_steps",
    "check_grad_sync",
}

TORCH_WORDS = frozenset({"momentum", "adjust_lr_fn", "eps"})
MESHES = frozenset({"replicate_mesh", "outer_shard_mesh", "inner_shard_mesh", "replicate_mesh_grad_sync"})

_NOT_A_NON_NEGATIVE_NUMBER = (-1.0, NAN, INF, -INF)
BAD_LR_AND_DECAY = tuple(
    (key, value) for key in ("lr", "weight_decay") for value in _NOT_A_NON_NEGATIVE_NUMBER
)
BAD_BETAS = tuple(("betas", value) for value in ((-0.1, 0.9), (0.9, -0.1), (NAN, 0.9), (0.9, INF), (0.9,)))
_BAD_MATRIX = tuple((key, value) for key in ("mu", "epsilon") for value in (-0.1, NAN, INF))
_BAD_ORTH = (("orth_method", "qr"), ("orth_preset", "quick"), ("ns_steps", 0), ("ns_coefficients", "newton"))

CASES = (
    Case(
        cls=oxidion.Dion,
        algorithm="dion",
        positional=(
            ("lr", 0.01),
            ("rank_fraction", 1.0),
            ("rank_multiple_of", 1),
            ("mu", 0.95),
            ("betas", (0.9, 0.95)),
            ("weight_decay", 0.01),
            ("epsilon", 1e-8),
            ("power_iters", 1),
            ("qr_method", "rcqr"),
            ("cqr_warmup_steps", 150),
            ("rcqr_oversample", 1.25),
            ("mixed_precision_config", None),
        ),
        keyword_only=EXTRA
        | MESHES
        | {
            "orth_dtype",
            "check_grad_sync",
            "seed",
            "cautious_wd",
            "adjust_lr",
            "flatten",
            "route",
            "right_factor",
        },
        state={
            "dion": frozenset({"momentum", "Q"}),
            "adamw": frozenset({"momentum", "variance", "step"}),
            "lion": frozenset({"momentum"}),
        },
        bad=(
            *BAD_LR_AND_DECAY,
            *BAD_BETAS,
            *_BAD_MATRIX,
            *(("rank_fraction", value) for value in (0.0, -0.5, 1.5, NAN)),
            *(("rank_multiple_of", value) for value in (0, -1)),
            *(("route", value) for value in ("both", 3, (1,), ("",), None)),
            *(("seed", value) for value in (-1, 2**63, 1.5)),
            *(("right_factor", value) for value in ("qr", None, True)),
            ("weight_norm", "sphere"),
            ("weight_norm_floor", -1.0),
        ),
        other={"lr": 0.03, "mu": 0.5, "betas": (0.5, 0.6), "weight_decay": 0.3, "epsilon": 0.1},
        kwargs={"rank_fraction": 0.5},
    ),
    Case(
        cls=oxidion.Muon,
        algorithm="muon",
        positional=(
            ("lr", 0.01),
            ("mu", 0.95),
            ("betas", (0.9, 0.95)),
            ("weight_decay", 0.01),
            ("cautious_wd", False),
            ("epsilon", 1e-8),
            ("nesterov", False),
            ("adjust_lr", "spectral_norm"),
            ("flatten", False),
            ("use_gram_newton_schulz", False),
            ("use_triton", False),
            ("use_polar_express", True),
            ("newton_schulz_func", None),
        ),
        keyword_only=FAMILY | TORCH_WORDS | {"owned_states"},
        state={
            "muon": frozenset({"momentum"}),
            "adamw": frozenset({"momentum", "variance", "step_dev"}),
            "lion": frozenset({"momentum"}),
        },
        bad=(
            *BAD_LR_AND_DECAY,
            *BAD_BETAS,
            *_BAD_MATRIX,
            *_BAD_ORTH,
            ("adjust_lr", "arbitrary"),
            ("owned_states", "yes"),
        ),
        other={
            "lr": 0.03,
            "mu": 0.5,
            "betas": (0.5, 0.6),
            "weight_decay": 0.3,
            "epsilon": 0.1,
            "nesterov": True,
            "adjust_lr": "rms_norm",
            "orth_method": "svd",
            "ns_coefficients": [(1.5, -0.5, 0.0), (1.875, -1.25, 0.375)],
            "ns_steps": 3,
        },
    ),
    Case(
        cls=oxidion.NorMuon,
        algorithm="normuon",
        positional=(
            ("lr", 0.01),
            ("mu", 0.95),
            ("muon_beta2", 0.95),
            ("betas", (0.9, 0.95)),
            ("weight_decay", 0.01),
            ("cautious_wd", False),
            ("epsilon", 1e-8),
            ("nesterov", False),
            ("adjust_lr", "spectral_norm"),
            ("flatten", False),
            ("use_gram_newton_schulz", False),
            ("use_triton", False),
            ("use_polar_express", True),
            ("newton_schulz_func", None),
        ),
        keyword_only=FAMILY | TORCH_WORDS | {"norm_scope", "owned_states"},
        state={
            "normuon": frozenset({"momentum", "variance_neuron"}),
            "adamw": frozenset({"momentum", "variance", "step_dev"}),
            "lion": frozenset({"momentum"}),
        },
        bad=(
            *BAD_LR_AND_DECAY,
            *BAD_BETAS,
            *_BAD_MATRIX,
            *_BAD_ORTH,
            ("adjust_lr", "arbitrary"),
            ("muon_beta2", 1.0),
            ("muon_beta2", NAN),
            ("norm_scope", "local"),
        ),
        other={
            "lr": 0.03,
            "mu": 0.5,
            "muon_beta2": 0.5,
            "betas": (0.5, 0.6),
            "weight_decay": 0.3,
            "epsilon": 0.1,
            "nesterov": True,
            "adjust_lr": "rms_norm",
            "orth_method": "svd",
        },
    ),
    Case(
        cls=oxidion.Dion2,
        algorithm="dion2",
        positional=(
            ("lr", 0.01),
            ("fraction", 0.25),
            ("ef_decay", 0.95),
            ("betas", (0.9, 0.95)),
            ("weight_decay", 0.01),
            ("epsilon", 1e-8),
            ("adjust_lr", "spectral_norm"),
            ("flatten", False),
            ("use_triton", False),
            ("use_polar_express", True),
            ("use_gram_newton_schulz", False),
            ("newton_schulz_func", None),
            ("verbose", False),
            ("triton_post_ortho", False),
            ("selection_scope", "local"),
        ),
        keyword_only=FAMILY | {"cautious_wd"},
        state={
            "dion2": frozenset({"momentum"}),
            "adamw": frozenset({"momentum", "variance", "step_dev"}),
            "lion": frozenset({"momentum"}),
        },
        bad=(
            *BAD_LR_AND_DECAY,
            *BAD_BETAS,
            *(("ef_decay", value) for value in (-0.1, NAN, INF)),
            *(("fraction", value) for value in (0.0, -0.5, 1.5, NAN)),
            ("selection_scope", "shard"),
            ("weight_norm", "sphere"),
            ("weight_norm_floor", -1.0),
        ),
        other={
            "lr": 0.03,
            "ef_decay": 0.5,
            "fraction": 0.5,
            "betas": (0.5, 0.6),
            "weight_decay": 0.3,
            "epsilon": 0.1,
            "adjust_lr": "rms_norm",
        },
        kwargs={"fraction": 0.75},
    ),
    Case(
        cls=oxidion.NorDion2,
        algorithm="nordion2",
        positional=(
            ("lr", 0.01),
            ("fraction", 0.25),
            ("mu", 0.95),
            ("muon_beta2", 0.95),
            ("betas", (0.9, 0.95)),
            ("weight_decay", 0.01),
            ("epsilon", 1e-8),
            ("adjust_lr", "spectral_norm"),
            ("flatten", False),
            ("use_triton", False),
            ("use_polar_express", True),
            ("use_gram_newton_schulz", False),
            ("newton_schulz_func", None),
            ("triton_post_ortho", False),
            ("selection_scope", "local"),
        ),
        keyword_only=FAMILY | {"cautious_wd", "norm_scope"},
        state={
            "nordion2": frozenset({"momentum", "variance_neuron"}),
            "adamw": frozenset({"momentum", "variance", "step_dev"}),
            "lion": frozenset({"momentum"}),
        },
        bad=(
            *BAD_LR_AND_DECAY,
            *BAD_BETAS,
            *_BAD_MATRIX,
            *(("fraction", value) for value in (0.0, -0.5, 1.5, NAN)),
            ("selection_scope", "shard"),
            ("weight_norm", True),
            ("weight_norm_floor", NAN),
            ("muon_beta2", -0.1),
        ),
        other={
            "lr": 0.03,
            "mu": 0.5,
            "muon_beta2": 0.5,
            "fraction": 0.5,
            "betas": (0.5, 0.6),
            "weight_decay": 0.3,
            "epsilon": 0.1,
        },
        kwargs={"fraction": 0.75},
    ),
    Case(
        cls=oxidion.AdamW,
        algorithm="adamw",
        positional=(
            ("lr", 1e-3),
            ("betas", (0.9, 0.999)),
            ("eps", 1e-8),
            ("weight_decay", 1e-2),
            ("amsgrad", False),
        ),
        keyword_only=EXTRA | {"fused", "cautious_wd"},
        state={"adamw": frozenset({"step", "exp_avg", "exp_avg_sq"})},
        bad=(
            *BAD_LR_AND_DECAY,
            *BAD_BETAS,
            ("betas", (1.0, 0.9)),
            ("betas", (0.9, 1.0)),
            *(("eps", value) for value in (-0.1, NAN, INF)),
            ("weight_norm", "sphere"),
            ("weight_norm_floor", -1.0),
        ),
        other={"lr": 0.03, "betas": (0.5, 0.6), "weight_decay": 0.3, "eps": 0.1},
    ),
    Case(
        cls=oxidion.Lion,
        algorithm="lion",
        positional=(("lr", 1e-4), ("betas", (0.9, 0.99)), ("weight_decay", 0.0)),
        keyword_only=EXTRA | {"cautious_wd"},
        state={"lion": frozenset({"exp_avg"})},
        bad=(*BAD_LR_AND_DECAY, *BAD_BETAS),
        other={"lr": 0.03, "betas": (0.1, 0.6), "weight_decay": 0.3},
    ),
    *LOW_RANK,
    *BASIS,
)
