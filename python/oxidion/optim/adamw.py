"""AdamW with torch's signature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Unpack

from oxidion._core import validate
from oxidion._core.base import OxOptimizer
from oxidion._core.signature import CommonOptions, Params
from oxidion._core.validate import Field


class AdamW(OxOptimizer):
    r"""AdamW: Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101).

    .. math::
        m &\leftarrow \beta_1 m + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
        x &\leftarrow (1 - \mathrm{lr}\,\lambda)\, x
            - \frac{\mathrm{lr}}{1-\beta_1^t} \frac{m}{\sqrt{v}/\sqrt{1-\beta_2^t} + \epsilon}

    State: ``step`` (float32 scalar), ``exp_avg``, ``exp_avg_sq`` and with ``amsgrad`` ``max_exp_avg_sq``,
    shaped like the parameter, in float32 (float64 for float64) unless ``state_dtype``. Parameters
    and state are written in place. Equal to ``torch.optim.AdamW``, whose checkpoints load. A non-finite
    gradient makes its own element non-finite, no other, where weights are free.

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

    _ALGORITHM = "adamw"
    _MATRIX = False
    _SCHEMA: ClassVar[dict[str, Field]] = {
        "betas": validate.betas((0.9, 0.999)),
        "eps": validate.number(1e-8),
        "amsgrad": validate.flag(False),
    }
    _ABSENT: ClassVar[Mapping[str, Any]] = {
        "decay_order": "torch",
        "momentum_dtype": None,
        "variance_dtype": None,
        "seed": 0,
    }  # settings of groups whose algorithm leaves parameters to AdamW

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        fused: bool | None = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        if common.get("foreach") and fused:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        super().__init__(params, locals())
