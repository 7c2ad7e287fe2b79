"""State keys of the classes that follow torch's names."""

from __future__ import annotations

_MOMENTS = {"momentum": "exp_avg", "variance": "exp_avg_sq"}
_FACTORS = {"row": "exp_avg_sq_row", "col": "exp_avg_sq_col", "mean": "exp_avg_sq_mean"}

TORCH_NAMES: dict[str, dict[str, str]] = {
    "adamw": {**_MOMENTS, "max_variance": "max_exp_avg_sq"},
    "lion": {"momentum": "exp_avg"},
    "lamb": _MOMENTS,
    "adafactor": {**_MOMENTS, **_FACTORS},
    "came": {
        **_MOMENTS,
        **_FACTORS,
        "res_row": "exp_avg_res_row",
        "res_col": "exp_avg_res_col",
        "res_mean": "exp_avg_res_mean",
    },
}
"""By algorithm: the key under which ``Optimizer.state`` holds each role."""
