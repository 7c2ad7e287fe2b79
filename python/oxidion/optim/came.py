"""CAME with came-pytorch's signature."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import Unpack

from oxidion._core import validate
from oxidion._core.base import OxOptimizer
from oxidion._core.signature import CommonOptions, Params
from oxidion._core.validate import Field


class CAME(OxOptimizer):
    r"""CAME: Adafactor with momentum divided by its own instability (Luo et al. 2023, arXiv:2307.02047).

    With :math:`s = g^2 + \epsilon_1` and, over the last two dimensions of a parameter that has them, R and C
    the moving averages (:math:`\beta_2`) of s along rows and columns:

    .. math::
        u = g / \sqrt{R C^\top / \bar R}, \quad u \leftarrow u / \max(1, \mathrm{RMS}(u)/\mathrm{clip}), \quad
        m \leftarrow \beta_1 m + (1-\beta_1) u, \\
        q = (u - m)^2 + \epsilon_2, \quad R_q, C_q \text{ as R and C of } q \text{ with } \beta_3, \quad
        x \leftarrow (1 - \mathrm{lr}\,\lambda) x - \mathrm{lr}\, m / \sqrt{R_q C_q^\top / \bar R_q}

    RMS is that of the whole parameter, however it is sharded. Vectors and scalars keep the whole second
    moment and step by m. Nothing is debiased: the first update of a matrix has an RMS of 11.1 ``lr`` with the
    default ``betas``, so warm the learning rate up.

    State: ``exp_avg``; ``exp_avg_sq_row`` (shape without the last dimension), ``exp_avg_sq_col`` (without the
    last but one), ``exp_avg_sq_mean`` (without both) and the same of ``exp_avg_res``, or ``exp_avg_sq``;
    ``step``. Parameters and state are written in place. A non-finite gradient makes its parameter NaN, no
    other.

    Args:
        lr: step size, to be given; a one-element tensor is allowed.
        eps: what is added to the squared gradient and to the squared residual.
        clip_threshold: largest RMS of the normalized gradient.
        betas: decay rates of the momentum, of the second moment and of the instability.
        weight_decay: decoupled decay: a step multiplies by ``1 - lr * weight_decay``.

    Arguments that are not named here are those of ``OxOptimizer``.

    Raises:
        ValueError: where ``lr`` is not given.
    """

    _ALGORITHM = "came"
    _LEAVES_UPDATE = False
    _MATRIX = False
    _COMMUNICATES = True
    _SCHEMA: ClassVar[dict[str, Field]] = {
        "eps": validate.numbers((1e-30, 1e-16)),
        "clip_threshold": validate.number(1.0, open_low=True),
        "betas": validate.betas((0.9, 0.999, 0.9999)),
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor | None = None,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
        **common: Unpack[CommonOptions],
    ) -> None:
        if lr is None:
            raise ValueError("CAME has no default for lr: pass one, as oxidion.CAME(model, lr=...)")
        super().__init__(params, locals())
