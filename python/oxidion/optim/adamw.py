"""AdamW with torch's signature."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from oxidion._core import validate
from oxidion._core.base import OxOptimizer
from oxidion._core.schema import defaults
from oxidion._core.validate import Field


class AdamW(OxOptimizer):
    r"""AdamW: Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101).

    .. math::
        m &\leftarrow \beta_1 m + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
        x &\leftarrow (1 - \mathrm{lr}\,\lambda)\, x
            - \frac{\mathrm{lr}}{1-\beta_1^t} \frac{m}{\sqrt{v}/\sqrt{1-\beta_2^t} + \epsilon}

    State: ``step`` (float32 scalar), ``exp_avg``, ``exp_avg_sq`` and with ``amsgrad`` ``max_exp_avg_sq``,
    shaped like the parameter, of its dtype unless ``state_dtype``. Parameters and state are written in place.
    Equal to ``torch.optim.AdamW``, whose checkpoints load. A non-finite gradient makes its own element
    non-finite, no other.

    Args:
        lr: step size, in units of the parameter; a one-element tensor is allowed.
        betas: decay rates of the two moments.
        eps: added to the denominator, outside the root.
        weight_decay: decoupled decay: a step multiplies by ``1 - lr * weight_decay``.
        amsgrad: use the running maximum of the second moment.
        fused: accepted for compatibility; there is one implementation.

    Arguments that are not named here are those of ``OxOptimizer``.

    Raises:
        RuntimeError: for ``foreach`` and ``fused`` at the same time.
    """

    ALGORITHM = "adamw"
    MATRIX = False
    SCHEMA: ClassVar[dict[str, Field]] = {
        "betas": validate.betas((0.9, 0.999)),
        "eps": validate.number(1e-8),
        "amsgrad": validate.flag(False),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        cautious_wd: bool = False,
        strict: bool = True,
        max_batch_bytes: int | None = None,
        workspace_limit: float | None = None,
        state_dtype: torch.dtype | Literal["float16", "bfloat16", "float32", "float64"] | None = None,
        state_bits: Literal[8, 32] = 32,
        stochastic_rounding: bool = False,
        init_state: bool = False,
        distributed_mesh: Any = None,
    ) -> None:
        if foreach and fused:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        super().__init__(
            params, defaults(locals(), self.SCHEMA), init_state=init_state, distributed_mesh=distributed_mesh
        )
