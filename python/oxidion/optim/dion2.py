"""Dion2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor
from typing_extensions import Unpack

from oxidion._core import validate
from oxidion._core.signature import CommonOptions, Params
from oxidion._core.validate import Field
from oxidion.optim._orthonormal import OrthonormalOptimizer
from oxidion.optim._settings import FAMILY_SCHEMA, SELECTION_SCHEMA


class Dion2(OrthonormalOptimizer):
    r"""Dion2: the strongest part of the momentum orthonormalized, with error feedback (arXiv:2512.16928).

    K are the ``k = ceil(fraction * size)`` rows of M with the largest sums of absolute values, or columns
    where there are fewer of them than rows:

    .. math::
        M \leftarrow M + G, \qquad U = \operatorname{orth}(M_K), \qquad M_K \leftarrow \mu_{ef} M_K, \\
        X \leftarrow (1 - \mathrm{lr}\,\lambda) X, \qquad X_K \leftarrow X_K - \mathrm{lr}\, s\, U

    with ``s`` of ``adjust_lr`` from the whole matrix. Sums are compared in float32, ties go to the lowest
    index. Where dimensions are cut, ``selection_scope="local"`` takes the strongest of what each process
    stores, along the dimension that is cut: a quarter of the bytes for a quarter of the rows, and results
    that depend on the layout. "global" takes the strongest of all, as one process does.

    State: ``momentum``, shaped like the parameter. Parameters and state are written in place. A non-finite
    gradient makes NaN of what is selected with it, in its own parameter only.

    Args:
        fraction: share of the rows or columns, in (0, 1].
        ef_decay: what the selected part of the momentum keeps.
        verbose: accepted for compatibility: `explain()` says more.
        triton_post_ortho: accepted for compatibility; the kernels are built in.
        selection_scope: "local" or "global".

    Arguments that are not named here are those of ``OrthonormalOptimizer`` and ``OxOptimizer``.
    """

    _ALGORITHM = "dion2"
    _LAYOUT_SETTINGS: ClassVar[dict[str, Any]] = {"selection_scope": "local"}
    _SCHEMA: ClassVar[dict[str, Field]] = {
        "ef_decay": validate.number(0.95),
        **SELECTION_SCHEMA,
        **FAMILY_SCHEMA,
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        fraction: float = 0.25,
        ef_decay: float = 0.95,
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
        verbose: bool = False,
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
        check_grad_sync: bool = False,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(params, locals())
