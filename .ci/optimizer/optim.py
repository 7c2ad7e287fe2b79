"""ClassName: say whose signature it has."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import Unpack

from oxidion._core import validate
from oxidion._core.base import OxOptimizer
from oxidion._core.signature import CommonOptions, Params
from oxidion._core.validate import Field


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
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(params, locals())
