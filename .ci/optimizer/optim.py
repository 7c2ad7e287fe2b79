"""ClassName: say whose signature it has."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from oxidion._core import validate
from oxidion._core.base import OxOptimizer
from oxidion._core.schema import defaults
from oxidion._core.validate import Field
from oxidion.optim._model_options import ModelOptions, Params


class ClassName(OxOptimizer):
    r"""ClassName: momentum with decoupled weight decay (say whose, with the paper).

    .. math::
        m &\leftarrow \mu m + g \\
        x &\leftarrow (1 - \mathrm{lr}\,\lambda)\, x - \mathrm{lr}\, m

    State: ``momentum_buffer``, shaped like the parameter, of its dtype unless ``state_dtype``. Parameters and
    state are written in place. A non-finite gradient makes its element non-finite, no other.

    Args:
        lr: step size; a one-element tensor is allowed.
        momentum: momentum factor.
        weight_decay: decay per unit of ``lr``.

    Arguments that are not named here are those of ``OxOptimizer``.
    """

    _ALGORITHM = "optimizer_name"
    _MATRIX = False
    _SCHEMA: ClassVar[dict[str, Field]] = {"momentum": validate.number(0.9)}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        cautious_wd: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        strict: bool = True,
        max_batch_bytes: int | None = None,
        workspace_limit: float | None = None,
        state_dtype: torch.dtype | Literal["float16", "bfloat16", "float32", "float64"] | None = None,
        state_bits: Literal[8, 32] = 32,
        stochastic_rounding: bool = False,
        master_weights: bool = False,
        init_state: bool = False,
        distributed_mesh: Any = None,
        **model_options: Unpack[ModelOptions],
    ) -> None:
        super().__init__(
            params, defaults(locals(), self._SCHEMA), init_state=init_state, distributed_mesh=distributed_mesh
        )
