"""APOLLO-Mini."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from typing_extensions import Unpack

from oxidion._core.signature import CommonOptions, Params
from oxidion.optim._low_rank import LowRankOptimizer
from oxidion.optim.apollo import APOLLOAdamW


class APOLLOMini(APOLLOAdamW):
    """APOLLO-Mini: `APOLLOAdamW` with rank 1 and one factor for each matrix (arXiv:2412.05270).

    The moments of a matrix are those of one row or column: memory as of SGD. All parameters of at least two
    dimensions, with sides of at least 2, are projected. State and equation are those of ``APOLLOAdamW``.

    Args:
        rank: columns of the projection: every matrix with sides of at least 2 is projected.
        scale: the update is multiplied by its root.
        scale_type: one factor for the "tensor", or one for each "channel".

    Arguments that are not named here are those of ``APOLLOAdamW``.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        rank: int | None = 1,
        update_proj_gap: int = 200,
        scale: float = 128.0,
        scale_type: Literal["channel", "tensor"] = "tensor",
        proj_type: Literal["std", "reverse_std", "left", "right", "unsharded"] = "std",
        decay_order: Literal["torch", "galore"] = "galore",
        owned_states: bool = False,
        seed: int = 0,
        **common: Unpack[CommonOptions],
    ) -> None:
        LowRankOptimizer.__init__(self, params, locals())
