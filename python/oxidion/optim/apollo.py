"""APOLLO-AdamW."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor
from typing_extensions import Unpack

from oxidion._core import validate
from oxidion._core.signature import CommonOptions, Params
from oxidion._core.validate import Field
from oxidion.optim._low_rank import LOW_RANK_SCHEMA, PROJECTIONS, LowRankOptimizer


class APOLLOAdamW(LowRankOptimizer):
    r"""APOLLO: gradients scaled by channel as AdamW would scale them in a random subspace (arXiv:2412.05270).

    With P Gaussian of variance ``1 / rank``, redrawn every ``update_proj_gap`` steps of the parameter from
    seed and name (or position) alone and never stored, for a weight of more rows than columns:

    .. math::
        R = G P, \qquad N = m / (\sqrt{v} + \epsilon), \qquad
        s_i = \|N_i\| / (\|R_i\| + 10^{-8}), \qquad U_i = s_i G_i / \ell, \\
        X \leftarrow X - \mathrm{lr} \frac{\sqrt{1-\beta_2^t}}{1-\beta_1^t} \sqrt{\mathrm{scale}}\, U, \qquad
        X \leftarrow (1 - \mathrm{lr}\,\lambda) X

    where m and v are Adam's moments of R, i numbers the rows (columns, where the rows are projected), and the
    limiter l lets the norm of U grow by 1 % from step to step at most. Parameters of a group without
    ``rank``, of fewer than two dimensions, or with a side of at most ``rank`` get AdamW with the same
    settings.

    State: ``exp_avg`` and ``exp_avg_sq``, ``(..., m, rank)`` or ``(..., rank, n)``; ``update_norm``, one
    number for each matrix; ``step``, float32. Parameters and state are written in place. A non-finite
    gradient makes its parameter non-finite.

    Args:
        lr: step size; a one-element tensor is allowed.
        betas: decay rates of the two moments.
        eps: added to the denominator, outside the root.
        weight_decay: decoupled decay: a step multiplies by ``1 - lr * weight_decay``.
        rank: columns of the projection; None: AdamW. Usually a group key, as the next three.
        update_proj_gap: steps between two projections.
        scale: the update is multiplied by its root.
        scale_type: a factor for each "channel", or one for the "tensor".
        proj_type: the side that is projected: "std" (the shorter one), "reverse_std", "left" (rows), "right"
            (columns), "unsharded" (the one that is not cut; depends on the layout).
        decay_order: decay before the update ("torch") or after it ("galore").
        owned_states: keep the moments of a weight with one process, its owner, where several would have the
            same: it sends the others the factors, and they share the memory. Call
            ``synchronize_for_checkpoint()`` on all ranks before ``state_dict()``.
        seed: of the projections and of stochastic rounding.

    Arguments that are not named here are those of ``OxOptimizer``.
    """

    _ALGORITHM = "apollo_adamw"
    _LEAVES_UPDATE = False
    _SCHEMA: ClassVar[dict[str, Field]] = {
        **LOW_RANK_SCHEMA,
        "eps": validate.number(1e-6),
        "scale": validate.number(1.0),
        "scale_type": validate.word("channel", "channel", "tensor"),
        "proj_type": validate.word("std", *(kind for kind in PROJECTIONS if kind != "full")),
        "decay_order": validate.word("galore", "torch", "galore"),
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        rank: int | None = None,
        update_proj_gap: int = 200,
        scale: float = 1.0,
        scale_type: Literal["channel", "tensor"] = "channel",
        proj_type: Literal["std", "reverse_std", "left", "right", "unsharded"] = "std",
        decay_order: Literal["torch", "galore"] = "galore",
        owned_states: bool = False,
        seed: int = 0,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(params, locals())
