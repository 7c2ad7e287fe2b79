"""AdamW with torch's signature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor
from typing_extensions import Unpack, override

from oxidion._core import validate
from oxidion._core.signature import CommonOptions, Params
from oxidion._core.validate import Field
from oxidion.optim._settings import WEIGHT_NORM_SCHEMA
from oxidion.optim._weight_norm import WeightNormOptimizer


class AdamW(WeightNormOptimizer):
    r"""AdamW: Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101).

    .. math::
        m &\leftarrow \beta_1 m + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
        x &\leftarrow (1 - \mathrm{lr}\,\lambda)\, x
            - \frac{\mathrm{lr}}{1-\beta_1^t} \frac{m}{\sqrt{v}/\sqrt{1-\beta_2^t} + \epsilon}

    With ``weight_norm`` a matrix takes another step (arXiv:2606.16899). U being what is subtracted for an
    ``lr`` of 1, without decay, and R the Frobenius norm that X has before it first moves:

    .. math::
        \text{hyperball:}\; X' = X - \mathrm{lr} \frac{R}{\lVert U \rVert} U, \;
        X \leftarrow R \frac{X'}{\lVert X' \rVert} \qquad
        \text{floor:}\; U \leftarrow U \max\Big(1, c \frac{\lVert X \rVert}{\lVert U \rVert}\Big)

    State: ``step`` (float32 scalar), ``exp_avg``, ``exp_avg_sq`` and with ``amsgrad`` ``max_exp_avg_sq``,
    shaped like the parameter, of its dtype unless ``state_dtype``; with "hyperball" ``radius``, a number for
    each matrix. Parameters and state are written in place. Equal to ``torch.optim.AdamW``, whose checkpoints
    load. A non-finite gradient makes its own element non-finite, no other; with ``weight_norm`` its matrix.

    Args:
        lr: step size, in units of the parameter; a one-element tensor is allowed.
        betas: decay rates of the two moments.
        eps: added to the denominator, outside the root.
        weight_decay: decoupled decay: a step multiplies by ``1 - lr * weight_decay``.
        amsgrad: use the running maximum of the second moment.
        fused: accepted for compatibility; there is one implementation.
        weight_norm: "free", "hyperball" (``lr`` is an angle, and ``weight_decay`` must be 0), "floor", or
            "row_floor", the same for each row. Leading dimensions number matrices; parameters of fewer than
            two dimensions are free in any case.
        weight_norm_floor: the ``c`` of the floors.

    Arguments that are not named here are those of ``OxOptimizer``.

    Raises:
        RuntimeError: for ``foreach`` and ``fused`` at the same time.
        ValueError: for ``weight_norm="hyperball"`` with decay, for a ``weight_norm`` with ``amsgrad`` or
            ``capturable``, and in the first step for a matrix of zeros, which has no norm to keep.
    """

    _ALGORITHM = "adamw"
    _MATRIX = False
    _SCHEMA: ClassVar[dict[str, Field]] = {
        "betas": validate.betas((0.9, 0.999)),
        "eps": validate.number(1e-8),
        "amsgrad": validate.flag(False),
        **WEIGHT_NORM_SCHEMA,
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
        weight_norm: Literal["free", "hyperball", "floor", "row_floor"] = "free",
        weight_norm_floor: float = 0.35,
        **common: Unpack[CommonOptions],
    ) -> None:
        if common.get("foreach") and fused:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        super().__init__(params, locals())

    @classmethod
    @override
    def _check_settings(cls, group: dict[str, Any], where: str) -> None:
        super()._check_settings(group, where)
        if group.get("weight_norm", "free") == "free":
            return
        for key in ("amsgrad", "capturable"):
            if group.get(key):
                raise ValueError(f"{key} needs weight_norm='free', got {group['weight_norm']!r} ({where})")
