"""NorDion2, also called Dion3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor
from typing_extensions import Unpack

from oxidion._core import validate
from oxidion._core.signature import CommonOptions, Params
from oxidion._core.validate import Field
from oxidion.optim._orthonormal import OrthonormalOptimizer
from oxidion.optim._settings import FAMILY_SCHEMA, NEURON_SCHEMA, SELECTION_SCHEMA


class NorDion2(OrthonormalOptimizer):
    r"""NorDion2 (Dion3): the strongest rows of the momentum orthonormalized, with neurons of equal strength.

    K are the ``k = ceil(fraction * rows)`` rows of M with the largest sums of absolute values:

    .. math::
        M \leftarrow M + G, \qquad U = \operatorname{norm}_V(\operatorname{orth}(M_K)), \qquad
        M_K \leftarrow \mu M_K, \\
        X \leftarrow (1 - \mathrm{lr}\,\lambda) X, \qquad X_K \leftarrow X_K - \mathrm{lr}\, s\, U

    It is `Dion2` with rows only and with the normalization of `NorMuon` on the selected rows; V of the others
    stays as it is. Norms are those of whole matrices on every layout.

    State: ``momentum``, shaped like the parameter, and ``variance_neuron`` (V), shaped like ``p[..., 0:1]``.
    Parameters and state are written in place. A non-finite gradient makes NaN of the rows that are selected
    with it, in its own parameter only.

    Args:
        fraction: share of the rows, in (0, 1].
        mu: what the selected rows of the momentum keep.
        muon_beta2: decay rate of V.
        triton_post_ortho: accepted for compatibility; the kernels are built in.
        selection_scope: "local" or "global", see `Dion2`.
        norm_scope: "global" or "shard", see `NorMuon`.

    Arguments that are not named here are those of ``OrthonormalOptimizer`` and ``OxOptimizer``.
    """

    _ALGORITHM = "nordion2"
    _LAYOUT_SETTINGS: ClassVar[dict[str, Any]] = {"selection_scope": "local", "norm_scope": "shard"}
    _SCHEMA: ClassVar[dict[str, Field]] = {
        "mu": validate.number(0.95),
        **NEURON_SCHEMA,
        **SELECTION_SCHEMA,
        **FAMILY_SCHEMA,
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        fraction: float = 0.25,
        mu: float = 0.95,
        muon_beta2: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        epsilon: float = 1e-8,
        adjust_lr: Literal["spectral_norm", "rms_norm", "original", "match_rms_adamw", "spectral_unclamped"]
        | None = "spectral_norm",
        flatten: bool = False,
        use_triton: bool = False,
        use_polar_express: bool = True,
        use_gram_newton_schulz: bool = False,
        newton_schulz_func: Callable[..., Tensor] | None = None,
        triton_post_ortho: bool = False,
        selection_scope: Literal["local", "global"] = "local",
        *,
        orth_dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto",
        orth_method: Literal["auto", "standard", "gram", "svd"] = "auto",
        orth_preset: Literal["exact", "fast"] = "exact",
        ns_coefficients: Literal[
            "polar_express", "newton_schulz", "keller_jordan", "cans", "aol", "polar_express_gram"
        ]
        | Sequence[float]
        | Sequence[Sequence[float]]
        | None = None,
        ns_steps: int | None = None,
        norm_scope: Literal["global", "shard"] = "global",
        check_grad_sync: bool = False,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(params, locals())
