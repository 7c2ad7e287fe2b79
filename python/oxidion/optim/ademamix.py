"""AdEMAMix with the authors' settings."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import Unpack

from oxidion._core import validate
from oxidion._core.base import OxOptimizer
from oxidion._core.signature import CommonOptions, Params
from oxidion._core.validate import Field


class AdEMAMix(OxOptimizer):
    r"""AdEMAMix: Adam with a second, slow momentum (Pagliardini et al. 2024, arXiv:2409.03137).

    .. math::
        m_1 &\leftarrow \beta_1 m_1 + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2, \\
        m_2 &\leftarrow \beta_3^{(t)} m_2 + (1-\beta_3^{(t)}) g \\
        x &\leftarrow (1 - \mathrm{lr}\,\lambda)\, x - \mathrm{lr}\,
            \frac{m_1/(1-\beta_1^t) + \alpha^{(t)} m_2}{\sqrt{v}/\sqrt{1-\beta_2^t} + \epsilon}

    The slow momentum starts at zero and is not corrected. With ``t_alpha_beta3 = T``, :math:`\alpha` grows
    linearly in the first T steps and :math:`\beta_3` from :math:`\beta_1` so that its half-life does:

    .. math::
        \alpha^{(t)} = \min(t \alpha / T, \alpha), \qquad \beta_3^{(t)} = \min\Bigl(\exp \frac{\ln\beta_1
            \ln\beta_3}{(1 - t/T) \ln\beta_3 + (t/T) \ln\beta_1},\, \beta_3\Bigr)

    State: ``step`` (float32 scalar), ``exp_avg_fast``, ``exp_avg_slow`` and ``exp_avg_sq``, shaped like the
    parameter, in float32 (float64 for float64) unless ``state_dtype``. Parameters and state are
    written in place. A non-finite gradient makes its parameter non-finite, no other.

    Args:
        lr: step size; a one-element tensor is allowed.
        betas: decay rates of the fast momentum, of the second moment and of the slow momentum.
        alpha: weight of the slow momentum; the paper takes 5 to 8 in most runs.
        eps: added to the denominator.
        weight_decay: decay per unit of ``lr``.
        t_alpha_beta3: steps of the warm-up of alpha and of the third beta; None for none. The paper takes all
            steps of the run.

    Arguments that are not named here are those of ``OxOptimizer``.
    """

    _ALGORITHM = "ademamix"
    _MATRIX = False
    _SCHEMA: ClassVar[dict[str, Field]] = {
        "betas": validate.betas((0.9, 0.999, 0.9999)),
        "alpha": validate.number(5.0),
        "eps": validate.number(1e-8),
        "t_alpha_beta3": validate.count(None, optional=True),
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        t_alpha_beta3: int | None = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(params, locals())
