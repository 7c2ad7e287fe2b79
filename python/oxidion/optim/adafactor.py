"""Adafactor with the signature of fairseq and transformers."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import Unpack, override

from oxidion._core import validate
from oxidion._core.base import OxOptimizer
from oxidion._core.signature import CommonOptions, Params
from oxidion._core.validate import Field


class Adafactor(OxOptimizer):
    r"""Adafactor: the second moment as the product of two vectors (Shazeer & Stern 2018, arXiv:1804.04235).

    With :math:`\beta_2 = 1 - t^{d}` (``decay_rate`` d), :math:`s = g^2 + \epsilon_1` and, over the last two
    dimensions of a parameter that has them, R and C the averages of s along rows and columns:

    .. math::
        R \leftarrow \beta_2 R + (1-\beta_2) \bar s_{i\cdot}, \quad
        C \leftarrow \beta_2 C + (1-\beta_2) \bar s_{\cdot j}, \quad
        u = g / \sqrt{R C^\top / \bar R}, \\
        u \leftarrow \frac{u}{\max(1, \mathrm{RMS}(u)/\mathrm{clip})}, \qquad
        x \leftarrow (1 - a \lambda) x - a u, \qquad a = \rho \max(\epsilon_2, \mathrm{RMS}(x))

    :math:`\rho` is ``lr`` or :math:`\min(10^{-2}, t^{-1/2})`. RMS is that of the whole parameter, however it
    is sharded. Vectors and scalars keep the whole second moment.

    State: ``exp_avg_sq_row`` (shape without the last dimension), ``exp_avg_sq_col`` (without the last but
    one), ``exp_avg_sq_mean`` (without both), or ``exp_avg_sq``; ``exp_avg`` with ``beta1``; ``step``.
    Parameters and state are written in place. A non-finite gradient makes its parameter NaN, no other.

    Args:
        lr: step size :math:`\rho`; must be None with ``relative_step`` and a number without.
        eps: what is added to the squared gradient, and the least scale of a parameter.
        clip_threshold: largest RMS of an update before it is scaled.
        decay_rate: exponent of the second moment's decay rate, not above 0.
        beta1: averages the finished steps, with the learning rates that they had, so that parameters still
            move after ``lr`` has become 0; None keeps no momentum.
        weight_decay: decoupled decay: a step multiplies by ``1 - a * weight_decay``.
        scale_parameter: multiply :math:`\rho` by :math:`\max(\epsilon_2, \mathrm{RMS}(x))`; False: the step
            size a is :math:`\rho`.
        relative_step: step size from the number of steps instead of ``lr``.
        warmup_init: with ``relative_step``: at most ``1e-6 t``.

    Arguments that are not named here are those of ``OxOptimizer``.

    Raises:
        ValueError: for ``lr`` with ``relative_step``, neither of them, and
            ``warmup_init`` without ``relative_step``.
    """

    _ALGORITHM = "adafactor"
    _LEAVES_UPDATE = False
    _MATRIX = False
    _COMMUNICATES = True
    _OPTIONAL_ROLES = frozenset({"momentum"})
    _SCHEMA: ClassVar[dict[str, Field]] = {
        "lr": validate.optional(validate.number(1e-3)),
        "eps": validate.numbers((1e-30, 1e-3)),
        "clip_threshold": validate.number(1.0, open_low=True),
        "decay_rate": validate.exponent(-0.8),
        "beta1": validate.optional(validate.beta(None)),
        "scale_parameter": validate.flag(True),
        "relative_step": validate.flag(True),
        "warmup_init": validate.flag(False),
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(params, locals())

    @classmethod
    @override
    def _check_settings(cls, group: dict[str, Any], where: str) -> None:
        """Refuses what transformers refuses, and a step that is not relative without ``lr``."""
        # A rate of 0 moves nothing in any case: torch writes it for a step that makes the states.
        if group["relative_step"] and group["lr"] is not None and float(group["lr"]) != 0:
            raise ValueError(
                f"lr must be None with relative_step=True, got {group['lr']!r} ({where}): give it with "
                "relative_step=False"
            )
        if not group["relative_step"] and group["lr"] is None:
            raise ValueError(f"lr must be a finite number >= 0 with relative_step=False, got None ({where})")
        if group["warmup_init"] and not group["relative_step"]:
            raise ValueError(f"warmup_init=True requires relative_step=True ({where})")
