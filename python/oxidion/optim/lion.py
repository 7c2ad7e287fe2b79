"""Lion with lion-pytorch's signature."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import Unpack

from oxidion._core import validate
from oxidion._core.base import OxOptimizer
from oxidion._core.signature import CommonOptions, Params
from oxidion._core.validate import Field


class Lion(OxOptimizer):
    r"""Lion: the sign of an interpolated momentum (Chen et al. 2023, arXiv:2302.06675).

    .. math::
        u &= \operatorname{sign}(\beta_1 m + (1-\beta_1) g), \qquad m \leftarrow \beta_2 m + (1-\beta_2) g \\
        x &\leftarrow (1 - \mathrm{lr}\,\lambda)\, x - \mathrm{lr}\, u

    Every element moves by ``lr`` or not at all. State: ``exp_avg``, shaped like the parameter, in float32
    (float64 for float64) unless ``state_dtype``. Parameters and state are written in place. The sign is
    ``torch.sign``'s: where a gradient is not finite, its element of the state is not either, and that of the
    parameter stays finite.

    Args:
        lr: distance that every element moves, in units of the parameter; usually 3 to 10 times smaller than
            AdamW's. A one-element tensor is allowed.
        betas: weight of the momentum in the direction, and its decay rate.
        weight_decay: decoupled decay: a step multiplies by ``1 - lr * weight_decay``.

    Arguments that are not named here are those of ``OxOptimizer``.
    """

    _ALGORITHM = "lion"
    _MATRIX = False
    _SCHEMA: ClassVar[dict[str, Field]] = {"betas": validate.betas((0.9, 0.99))}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(params, locals())
