"""Muon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from torch import Tensor
from typing_extensions import Unpack

from oxidion._core import validate
from oxidion._core.constructor import LEFT_OUT
from oxidion._core.signature import Params, SharedOptions
from oxidion._core.validate import Field
from oxidion.optim._orthonormal import OrthonormalOptimizer
from oxidion.optim._settings import FAMILY_SCHEMA, TORCH_WORDS


class Muon(OrthonormalOptimizer):
    r"""Muon: momentum orthonormalized by a quintic iteration (Jordan et al. 2024).

    .. math::
        M \leftarrow \mu M + G, \qquad U = \operatorname{orth}(\mu M + G) \text{ or } \operatorname{orth}(M),
        \qquad X \leftarrow (1 - \mathrm{lr}\,\lambda) X - \mathrm{lr}\, s\, U

    ``orth`` is five steps of Polar Express (arXiv:2505.16932) or of Newton–Schulz, and ``s`` the factor of
    ``adjust_lr``.

    State: ``momentum``, shaped like the parameter. Parameters and state are written in place. A non-finite
    gradient makes its own parameter NaN, no other.

    Args:
        mu: momentum factor.
        cautious_wd: decay only where the update and the parameter agree in sign.
        nesterov: look one step ahead.
        owned_states: keep the momentum of a weight that is replicated over processes (DDP, HSDP) on one of
            them, its owner. Call ``synchronize_for_checkpoint()`` on all ranks before ``state_dict()``.

    Arguments that are not named here are those of ``OrthonormalOptimizer`` and ``OxOptimizer``.
    """

    _ALGORITHM = "muon"
    _SCHEMA: ClassVar[dict[str, Field]] = {
        "mu": validate.number(0.95),
        "nesterov": validate.flag(False),
        "owned_states": validate.flag(False),
        **FAMILY_SCHEMA,
    }
    _WORDS = TORCH_WORDS

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        mu: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        cautious_wd: bool = False,
        epsilon: float = 1e-8,
        nesterov: bool = False,
        adjust_lr: Literal["spectral_norm", "rms_norm", "original", "match_rms_adamw", "spectral_unclamped"]
        | None = "spectral_norm",
        flatten: bool = False,
        use_gram_newton_schulz: bool = False,
        use_triton: bool = False,
        use_polar_express: bool = True,
        newton_schulz_func: Callable[..., Tensor] | None = None,
        *,
        momentum: float = LEFT_OUT,
        adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] | None = LEFT_OUT,
        eps: float = LEFT_OUT,
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
        owned_states: bool = False,
        check_grad_sync: bool = False,
        **common: Unpack[SharedOptions],
    ) -> None:
        super().__init__(params, locals())
