"""The rows of the classes that scale by norms or keep factored moments."""

from __future__ import annotations

import oxidion

from .case import Case
from .rows import BAD_BETAS, BAD_LR_AND_DECAY, EXTRA, INF, NAN

SECOND = {"exp_avg_sq_row": (-1,), "exp_avg_sq_col": (-2,), "exp_avg_sq_mean": (-2, -1)}
RESIDUAL = {key.replace("avg_sq", "avg_res"): dims for key, dims in SECOND.items()}

MEMORY_CASES = (
    Case(
        cls=oxidion.Lamb,
        algorithm="lamb",
        positional=(("lr", 1e-3), ("betas", (0.9, 0.999)), ("eps", 1e-6), ("weight_decay", 0.0)),
        keyword_only=EXTRA
        | {"debias", "always_adapt", "phi", "trust_clip", "max_grad_norm", "grad_averaging", "cautious_wd"},
        state={"lamb": frozenset({"step", "exp_avg", "exp_avg_sq"})},
        bad=(
            *BAD_LR_AND_DECAY,
            *BAD_BETAS,
            ("debias", "lr"),
            ("debias", None),
            *(("eps", value) for value in (-0.1, NAN, INF)),
            *(("phi", value) for value in (1.0, (2.0, 1.0), (-1.0, 1.0), (0.0, 0.0), (0.0, NAN), (1.0,))),
            *((key, value) for key in ("trust_clip", "max_grad_norm") for value in (0.0, -1.0, NAN, INF)),
        ),
        other={
            "lr": 0.03,
            "betas": (0.5, 0.6),
            "weight_decay": 0.3,
            "eps": 0.1,
            "debias": "step",
            "phi": (0.5, 1.5),
            "trust_clip": 0.25,
            "max_grad_norm": 0.5,
            "grad_averaging": False,
        },
        kwargs={"always_adapt": True},
        decoupled=False,
    ),
    Case(
        cls=oxidion.Adafactor,
        algorithm="adafactor",
        positional=(
            ("lr", None),
            ("eps", (1e-30, 1e-3)),
            ("clip_threshold", 1.0),
            ("decay_rate", -0.8),
            ("beta1", None),
            ("weight_decay", 0.0),
            ("scale_parameter", True),
            ("relative_step", True),
            ("warmup_init", False),
        ),
        keyword_only=EXTRA | {"cautious_wd"},
        state={
            "adafactor": frozenset({"step", "exp_avg", *SECOND}),
            "adafactor, vectors": frozenset({"step", "exp_avg", "exp_avg_sq"}),
        },
        bad=(
            *BAD_LR_AND_DECAY,
            *(("eps", value) for value in (1e-30, (-1e-30, 1e-3), (1e-30, NAN), (1e-30,))),
            *(("clip_threshold", value) for value in (0.0, -1.0, NAN, INF)),
            *(("decay_rate", value) for value in (0.8, NAN, -INF, None)),
            *(("beta1", value) for value in (-0.1, 1.0, NAN)),
        ),
        other={
            "lr": 0.03,
            "weight_decay": 0.3,
            "eps": (0.25, 1e-3),
            "clip_threshold": 0.25,
            "decay_rate": -0.5,
            "beta1": 0.5,
            "scale_parameter": True,
        },
        kwargs={"beta1": 0.75},
        required={"lr": 1e-3, "relative_step": False, "scale_parameter": False},
        factors=SECOND,
    ),
    Case(
        cls=oxidion.CAME,
        algorithm="came",
        positional=(
            ("lr", None),
            ("eps", (1e-30, 1e-16)),
            ("clip_threshold", 1.0),
            ("betas", (0.9, 0.999, 0.9999)),
            ("weight_decay", 0.0),
        ),
        keyword_only=EXTRA | {"cautious_wd"},
        state={
            "came": frozenset({"step", "exp_avg", *SECOND, *RESIDUAL}),
            "came, vectors": frozenset({"step", "exp_avg", "exp_avg_sq"}),
        },
        bad=(
            *BAD_LR_AND_DECAY,
            *(("betas", (*value, 0.9)) for value in ((-0.1, 0.9), (0.9, NAN), (1.0, 0.9))),
            ("betas", (0.9, 0.99)),
            *(("eps", value) for value in (1e-30, (-1e-30, 1e-16), (1e-30, NAN), (1e-30,))),
            *(("clip_threshold", value) for value in (0.0, -1.0, NAN, INF)),
        ),
        other={
            "lr": 0.03,
            "betas": (0.5, 0.6, 0.7),
            "weight_decay": 0.3,
            "eps": (0.25, 0.25),
            "clip_threshold": 0.25,
        },
        required={"lr": 1e-3},
        factors=SECOND | RESIDUAL,
    ),
)
