"""GaLore-AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor
from typing_extensions import Unpack

from oxidion._core import validate
from oxidion._core.signature import CommonOptions, Params
from oxidion._core.validate import Field
from oxidion.optim._low_rank import LOW_RANK_SCHEMA, PROJECTIONS, LowRankOptimizer


class GaLoreAdamW(LowRankOptimizer):
    r"""GaLore: AdamW on the gradient projected on its leading singular vectors (arXiv:2403.03507).

    With V the first ``rank`` right singular vectors of the gradient, recomputed every ``update_proj_gap``
    steps of the parameter, for a weight of more rows than columns:

    .. math::
        R = G V, \qquad N = \hat m / (\sqrt{\hat v} + \epsilon), \qquad
        X \leftarrow (1 - \mathrm{lr}\,\lambda) X - \mathrm{lr}\, s\, N V^\top

    where m and v are Adam's moments of R. Other weights are projected from the left, ``R = U^T G``.
    Parameters of a group without ``rank``, of fewer than two dimensions, or with a side of at most ``rank``
    get AdamW with the same settings. Leading dimensions number matrices.

    State: ``exp_avg`` and ``exp_avg_sq``, ``(..., m, rank)`` or ``(..., rank, n)``; ``proj``,
    ``(..., k, rank)`` with k the projected side (and ``proj_right`` where both are); ``step``, float32.
    Parameters and state are written in place. A gradient that is not finite changes no projection; it makes
    its parameter non-finite.

    Args:
        lr: step size; a one-element tensor is allowed.
        betas: decay rates of the two moments.
        eps: added to the denominator, outside the root.
        weight_decay: decoupled decay: a step multiplies by ``1 - lr * weight_decay``.
        rank: columns of the projection; None: AdamW. Usually a group key, as the next two.
        update_proj_gap: steps between two projections.
        scale: factor of the update, s.
        svd: how V is computed: "gram" from the eigenvectors of ``G^T G`` in float64, "exact" by a singular
            value decomposition, "random" from a sketch.
        proj_type: the side that is projected: "std" (the shorter one), "reverse_std", "left" (rows), "right"
            (columns), "full" (both), "unsharded" (the one that is not cut; depends on the layout).
        decay_order: decay before the update ("torch") or after it ("galore").
        rotate_moments: turn the moments into a new V instead of keeping their numbers.
        stagger: compute the projections of different parameters in different steps.
        state_bits: bits of an element of the moments: 8 (quantized, see docs/low-precision.md) or 32.
        block_size: elements of a row of the moments that share a scale.
        min_quant_numel: moments of fewer elements keep ``state_dtype``.
        owned_states: keep the moments of a weight with one process, its owner, where several would have the
            same: it sends the others what the projection turns back, and they share the memory. Call
            ``synchronize_for_checkpoint()`` on all ranks before ``state_dict()``.
        seed: of the sketches of ``svd="random"`` and of stochastic rounding.

    Arguments that are not named here are those of ``OxOptimizer``.
    """

    _ALGORITHM = "galore_adamw"
    _LEAVES_UPDATE = False
    _OWN_DEFAULTS: ClassVar[Mapping[str, Any]] = {"state_bits": 8}
    _SCHEMA: ClassVar[dict[str, Field]] = {
        **LOW_RANK_SCHEMA,
        "scale": validate.number(0.25),
        "svd": validate.word("gram", "gram", "exact", "random"),
        "proj_type": validate.word("std", *PROJECTIONS),
        "rotate_moments": validate.flag(False),
        "stagger": validate.flag(False),
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        rank: int | None = None,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        svd: Literal["gram", "exact", "random"] = "gram",
        proj_type: Literal["std", "reverse_std", "left", "right", "full", "unsharded"] = "std",
        decay_order: Literal["torch", "galore"] = "torch",
        rotate_moments: bool = False,
        stagger: bool = False,
        block_size: Literal[8, 16, 32, 64, 128, 256, 512] = 256,
        min_quant_numel: int = 4096,
        owned_states: bool = False,
        seed: int = 0,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(params, locals())
