"""The classes of oxidion as entries of ``torch.testing._internal.common_optimizers``.

`plug_in` replaces the entries of the framework's ``optim_db`` in place, so that everything which holds that
list (the ``optims`` decorator, an upstream test module imported afterwards) runs over these classes only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Parameter
from torch.testing._internal import common_optimizers as framework
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
)

import oxidion

TAKE_VECTORS = (
    oxidion.APOLLOAdamW,
    oxidion.APOLLOMini,
    oxidion.AdamW,
    oxidion.GaLoreAdamW,
    oxidion.Lion,
)

STEP_ERROR = OptimizerErrorEnum.STEP_ERROR
InputsOf = Callable[..., list[OptimizerInput]]
ErrorsOf = Callable[..., list[ErrorOptimizerInput]]

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
        {"power_iters": 2},
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
        {"orth_method": "gram", "ns_coefficients": "cans"},
        {"ns_coefficients": [(1.5, -0.5, 0.0)], "ns_steps": 8},
    ),
    "NorMuon": (*FAMILY, {"mu": 0.5}, {"nesterov": True}, {"muon_beta2": 0.5}, {"norm_scope": "shard"}),
    "Dion2": (*FAMILY, {"ef_decay": 0.5}, {"fraction": 1.0}, {"selection_scope": "global"}),
    "NorDion2": (
        *FAMILY,
        {"mu": 0.5},
        {"fraction": 1.0},
        {"muon_beta2": 0.5},
        {"selection_scope": "global"},
        {"norm_scope": "shard"},
    ),
    "AdamW": (
        {"eps": 1e-4},
        {"amsgrad": True},
        {"amsgrad": True, "weight_decay": 0.1, "maximize": True},
        {"cautious_wd": True, "weight_decay": 0.1},
    ),
    "Lion": ({"cautious_wd": True, "weight_decay": 0.1},),
    "GaLoreAdamW": (
        *LOW_RANK,
        {"rank": 2, "svd": "exact"},
        {"rank": 2, "svd": "random", "seed": 5},
        {"rank": 2, "proj_type": "full"},
        {"rank": 2, "rotate_moments": True, "update_proj_gap": 2},
        {"rank": 2, "stagger": True, "update_proj_gap": 3},
    ),
    "APOLLOAdamW": (*LOW_RANK, {"rank": 2, "scale_type": "tensor"}, {"rank": 2, "seed": 5}),
    "APOLLOMini": ({"scale": 4.0}, {"update_proj_gap": 2}),
}
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
    "Muon": (("mu", -1.0), ("epsilon", math.nan), ("adjust_lr", "arbitrary"), ("orth_dtype", "int8")),
    "NorMuon": (("muon_beta2", 1.0), ("norm_scope", "local")),
    "Dion2": (("fraction", 0.0), ("fraction", 7.5), ("ef_decay", -1.0), ("selection_scope", "shard")),
    "NorDion2": (("fraction", 0.0), ("muon_beta2", -0.5), ("mu", -1.0)),
    "AdamW": (("eps", -1.0), ("betas", (1.0, 0.0))),
    "Lion": (),
    "GaLoreAdamW": (("rank", 0), ("svd", "qr"), ("update_proj_gap", 0), ("proj_type", "up")),
    "APOLLOAdamW": (("rank", 0), ("scale_type", "row"), ("proj_type", "full")),
    "APOLLOMini": (("rank", 0), ("scale", -1.0)),
}
BAD_ANYWHERE: tuple[tuple[str, object], ...] = (
    ("lr", -1.0),
    ("lr", math.inf),
    ("weight_decay", -1.0),
    ("weight_decay", math.nan),
    ("betas", (-0.1, 0.9)),
    ("betas", (0.9, math.nan)),
)


def _inputs_of(cls: type[torch.optim.Optimizer]) -> InputsOf:
    strict = {} if cls in TAKE_VECTORS else {"strict": False}

    def inputs(device: object, dtype: torch.dtype | None = None) -> list[OptimizerInput]:
        return [
            OptimizerInput(params=None, kwargs={**strict, **kwargs}, desc=_describe(kwargs))
            for kwargs in (*SHARED, *OWN[cls.__name__])
        ]

    return inputs


def _describe(kwargs: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in kwargs.items()) or "default"


def _errors_of(cls: type[torch.optim.Optimizer]) -> ErrorsOf:
    def errors(device: Any, dtype: torch.dtype) -> list[ErrorOptimizerInput]:
        return [
            *get_error_inputs_for_all_optims(device, dtype),
            *_bad_values((*BAD_ANYWHERE, *BAD[cls.__name__])),
            *_bad_constructions(cls, dtype),
            *_bad_gradients(dtype),
        ]

    return errors


def _error(
    params: object,
    kwargs: dict[str, Any],
    kinds: type[Exception] | tuple[type[Exception], ...],
    regex: str,
    **on: Any,
) -> ErrorOptimizerInput:
    given = OptimizerInput(params=params, kwargs=kwargs, desc=regex)
    return ErrorOptimizerInput(given, error_type=kinds, error_regex=regex, **on)


def _bad_values(pairs: Iterable[tuple[str, object]]) -> list[ErrorOptimizerInput]:
    return [_error(None, {key: value}, ValueError, rf"{key}\b.* must be") for key, value in pairs]


def _bad_constructions(cls: type[torch.optim.Optimizer], dtype: torch.dtype) -> list[ErrorOptimizerInput]:
    def matrix() -> Parameter:
        return Parameter(torch.randn(2, 3, dtype=dtype))

    errors = [
        _error(
            [{"params": [matrix()], "weight_decai": 0.1}], {}, ValueError, r"weight_decai.*\bweight_decay\b"
        ),
        _error([{"params": [matrix()], "algorithm": "sgdm"}], {}, ValueError, "algorithm.*sgdm"),
        _error(
            None,
            {"lr": torch.tensor(0.001), "foreach": True},
            ValueError,
            "lr as a Tensor is not supported for capturable=False and foreach=True",
        ),
        _error(None, {"differentiable": True}, RuntimeError, "differentiable"),
        _error([("codes", torch.zeros(2, 3, dtype=torch.int32))], {}, (TypeError, ValueError), "codes"),
        _error([("phases", torch.zeros(2, 3, dtype=torch.complex64))], {}, (TypeError, ValueError), "phases"),
    ]
    if cls not in TAKE_VECTORS:
        errors.append(_error([("bias", Parameter(torch.randn(3, dtype=dtype)))], {}, ValueError, "bias"))
    return errors


def _bad_gradients(dtype: torch.dtype) -> list[ErrorOptimizerInput]:
    def spoilt(spoil: Callable[[torch.Tensor], torch.Tensor]) -> list[tuple[str, Parameter]]:
        param = Parameter(torch.randn(2, 3, dtype=dtype))
        param.grad = torch.randn(2, 3, dtype=dtype)
        param.grad.data = spoil(param.grad.data)
        return [("weight", param)]

    sparse = Parameter(torch.randn(2, 3, dtype=dtype))
    sparse.grad = torch.eye(2, 3, dtype=dtype).to_sparse()
    other = torch.float32 if dtype == torch.float64 else torch.float64
    wrong = (
        [("weight", sparse)],
        spoilt(lambda grad: grad.to(torch.complex64)),
        spoilt(lambda grad: grad.mT.contiguous()),
        spoilt(lambda grad: grad.to(other)),
    )
    return [_error(params, {}, (TypeError, ValueError), "weight", error_on=STEP_ERROR) for params in wrong]


INFOS = [
    OptimizerInfo(
        cls,
        optim_inputs_func=_inputs_of(cls),
        optim_error_inputs_func=_errors_of(cls),
        # On a CPU the framework multiplies the inputs by "fused" only; a test of its own covers "foreach".
        supported_impls=("foreach", "fused") if cls is oxidion.AdamW else ("foreach",),
        supports_fused_on=("cpu", "cuda") if cls is oxidion.AdamW else (),
        not_og_supported_flags=("foreach", "maximize", "capturable", "cautious_wd"),
        has_capturable_arg=True,
        supports_complex=False,
        supports_sparse=False,
    )
    for cls in (
        oxidion.APOLLOAdamW,
        oxidion.APOLLOMini,
        oxidion.AdamW,
        oxidion.Dion,
        oxidion.Dion2,
        oxidion.GaLoreAdamW,
        oxidion.Lion,
        oxidion.Muon,
        oxidion.NorDion2,
        oxidion.NorMuon,
    )
]


def plug_in() -> list[OptimizerInfo]:
    """Replace the entries of the framework's data base by `INFOS`; returns that very list."""
    framework.optim_db[:] = INFOS
    return framework.optim_db
