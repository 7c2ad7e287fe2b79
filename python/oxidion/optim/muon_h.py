"""MuonH."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor
from typing_extensions import Unpack

from oxidion._core.constructor import LEFT_OUT
from oxidion._core.signature import Params, SharedOptions
from oxidion.optim._orthonormal import OrthonormalOptimizer
from oxidion.optim.muon import Muon


class MuonH(Muon):
    r"""MuonH: `Muon` on a sphere, whose weights keep their norm (arXiv:2606.16899).

    With R the Frobenius norm of a matrix at its first step and U the update of `Muon`:

    .. math::
        X' = X - \mathrm{lr}\, \frac{R}{\lVert U \rVert_F} U, \qquad
        X \leftarrow R \frac{X'}{\lVert X' \rVert_F}

    A step turns a matrix by the angle ``arctan(lr)`` at most, whatever its shape and norm: ``adjust_lr``
    changes nothing, and there is no decay. It is `Muon` with ``weight_norm="hyperball"`` and defaults of its
    own. As R stays for ever, matrices should start with elements of deviation about ``1 / sqrt(d_in)``.

    State: ``momentum``, shaped like the parameter, and ``radius`` (R), a number for each matrix, 0 until the
    first step. Parameters and state are written in place. A non-finite gradient makes its own parameter NaN,
    no other.

    Args:
        lr: the tangent of the largest angle of a step.
        mu: momentum factor.
        nesterov: look one step ahead.
        owned_states: keep the momentum of a weight that is replicated over processes (DDP, HSDP) on one of
            them, its owner. Call ``synchronize_for_checkpoint()`` on all ranks before ``state_dict()``.

    Arguments that are not named here are those of ``Muon``, ``OrthonormalOptimizer`` and ``OxOptimizer``.

    Raises:
        ValueError: for ``weight_decay`` other than 0, and in the first step for a matrix of zeros, which
            could never move; the error names it.
    """

    _WORDS = Muon._WORDS
    _OWN_DEFAULTS: ClassVar[Mapping[str, Any]] = {"weight_norm": "hyperball"}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.018,
        mu: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        cautious_wd: bool = False,
        epsilon: float = 1e-8,
        nesterov: bool = True,
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
        OrthonormalOptimizer.__init__(self, params, locals())
