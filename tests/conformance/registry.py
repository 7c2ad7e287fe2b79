"""The classes of oxidion as entries of ``torch.testing._internal.common_optimizers``.

`plug_in` replaces the entries of the framework's ``optim_db`` in place, so that everything which holds that
list (the ``optims`` decorator, an upstream test module imported afterwards) runs over these classes only.
"""

from __future__ import annotations

import copy
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

from .arguments import BAD, BAD_ANYWHERE, LEAST, OWN, SHARED, TWO_BETAS, least

STEP_ERROR = OptimizerErrorEnum.STEP_ERROR
InputsOf = Callable[..., list[OptimizerInput]]
ErrorsOf = Callable[..., list[ErrorOptimizerInput]]


def _inputs_of(cls: type[torch.optim.Optimizer]) -> InputsOf:
    name = cls.__name__
    shared = [kwargs for kwargs in SHARED if name in TWO_BETAS or "betas" not in kwargs]

    def inputs(device: object, dtype: torch.dtype | None = None) -> list[OptimizerInput]:
        return [
            # Copies: schedulers write into an lr that is a tensor.
            OptimizerInput(
                params=None, kwargs=copy.deepcopy({**least(name), **kwargs}), desc=_describe(kwargs)
            )
            for kwargs in (*shared, *OWN[name])
        ]

    return inputs


def _describe(kwargs: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in kwargs.items()) or "default"


def _errors_of(cls: type[torch.optim.Optimizer]) -> ErrorsOf:
    name, two = cls.__name__, cls.__name__ in TWO_BETAS
    anywhere = [pair for pair in BAD_ANYWHERE if two or pair[0] != "betas"]

    def errors(device: Any, dtype: torch.dtype) -> list[ErrorOptimizerInput]:
        found = [
            *get_error_inputs_for_all_optims(device, dtype),
            *_bad_values((*anywhere, *BAD[name])),
            *_bad_constructions(cls, dtype),
            *_bad_gradients(dtype),
        ]
        for error in found:
            given = error.optimizer_error_input
            given.kwargs = {**LEAST.get(name, {}), **given.kwargs}
        return found

    return errors


def _error(
    params: object,
    kwargs: dict[str, Any],
    kind: type[Exception],
    regex: str,
    **on: Any,
) -> ErrorOptimizerInput:
    given = OptimizerInput(params=params, kwargs=kwargs, desc=regex)
    return ErrorOptimizerInput(given, error_type=kind, error_regex=regex, **on)


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
        _error([("labels", torch.zeros(2, 3, dtype=torch.int32))], {}, TypeError, "labels"),
        _error([("phases", torch.zeros(2, 3, dtype=torch.complex64))], {}, TypeError, "phases"),
    ]
    if cls.__name__ not in LEAST:
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
        ([("weight", sparse)], TypeError),
        (spoilt(lambda grad: grad.to(torch.complex64)), TypeError),
        (spoilt(lambda grad: grad.mT.contiguous()), ValueError),
        (spoilt(lambda grad: grad.to(other)), TypeError),
    )
    return [_error(params, {}, kind, "weight", error_on=STEP_ERROR) for params, kind in wrong]


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
    for cls in dict.fromkeys(getattr(oxidion, name) for name in OWN)
]


def plug_in() -> list[OptimizerInfo]:
    """Replace the entries of the framework's data base by `INFOS`; returns that very list."""
    framework.optim_db[:] = INFOS
    return framework.optim_db
