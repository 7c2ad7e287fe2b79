"""LAMB."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor
from typing_extensions import Unpack

from oxidion._core import validate
from oxidion._core.base import OxOptimizer
from oxidion._core.signature import CommonOptions, Params
from oxidion._core.validate import Field


class Lamb(OxOptimizer):
    r"""LAMB: Adam's direction, scaled by a trust ratio per parameter (You et al. 2020, arXiv:1904.00962).

    .. math::
        m &\leftarrow \beta_1 m + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
        u &= \hat m / (\sqrt{\hat v} + \epsilon) + \lambda x, \qquad
        x \leftarrow x - \mathrm{lr}\, \frac{\phi(\lVert x \rVert)}{\lVert u \rVert}\, u

    Norms are those of whole parameters, however they are sharded. The ratio is 1 where :math:`\phi(\lVert x
    \rVert)` or :math:`\lVert u \rVert` is 0, and where ``weight_decay`` is 0 unless ``always_adapt``.

    State: ``exp_avg``, ``exp_avg_sq`` (shaped like the parameter, of its dtype unless ``state_dtype``) and
    ``step`` (float32 scalar). Parameters and state are written in place. A NaN or infinite
    gradient makes its parameter NaN, no other; without the ratio, the same element only.

    Args:
        lr: step size relative to the norm of the parameter; a one-element tensor is allowed.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: decay, a part of the direction that the ratio scales.
        debias: "moments" divides m and v by :math:`1-\beta^t` (apex); "none" does not (the paper's last
            version); "step" multiplies the finished step by :math:`\sqrt{1-\beta_2^t}/(1-\beta_1^t)`.
        always_adapt: apply the ratio also where ``weight_decay`` is 0.
        phi: bounds ``(low, high)`` of :math:`\phi`, which is the identity where None.
        trust_clip: upper bound of the ratio.
        max_grad_norm: divide the group's gradients by ``max(1, norm / max_grad_norm)``, norm that of all.
        grad_averaging: False drops the factor :math:`1-\beta_1` of g.

    Arguments that are not named here are those of ``OxOptimizer``.
    """

    _ALGORITHM = "lamb"
    _LEAVES_UPDATE = False
    _IS_DECOUPLED = False
    _MATRIX = False
    _COMMUNICATES = True
    _SCHEMA: ClassVar[dict[str, Field]] = {
        "betas": validate.betas((0.9, 0.999)),
        "eps": validate.number(1e-6),
        "debias": validate.word("moments", "moments", "step", "none"),
        "always_adapt": validate.flag(False),
        "phi": validate.interval(),
        "trust_clip": validate.optional(validate.number(1.0, open_low=True)),
        "max_grad_norm": validate.optional(validate.number(1.0, open_low=True)),
        "grad_averaging": validate.flag(True),
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        debias: Literal["moments", "step", "none"] = "moments",
        always_adapt: bool = False,
        phi: tuple[float, float] | None = None,
        trust_clip: float | None = None,
        max_grad_norm: float | None = None,
        grad_averaging: bool = True,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(params, locals())
