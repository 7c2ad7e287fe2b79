"""NorMuon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor
from typing_extensions import Unpack

from oxidion._core import validate
from oxidion._core.constructor import LEFT_OUT
from oxidion._core.signature import Params, SharedOptions
from oxidion._core.validate import Field
from oxidion.optim._orthonormal import OrthonormalOptimizer
from oxidion.optim._settings import FAMILY_SCHEMA, NEURON_SCHEMA, TORCH_WORDS


class NorMuon(OrthonormalOptimizer):
    r"""NorMuon: Muon with neurons of equal strength (Li et al. 2025, arXiv:2510.05491).

    With U the update of `Muon` and v the mean square of each of its rows:

    .. math::
        V \leftarrow V + (1 - \beta_2)(v - V), \qquad U' = U / (\sqrt{V} + 10^{-8}) \text{ by row}, \\
        X \leftarrow (1 - \mathrm{lr}\,\lambda) X
        - \mathrm{lr}\, s\, \frac{\lVert U \rVert_F}{\max(\lVert U' \rVert_F, 10^{-8})} U'

    V starts at zero and is not corrected for that. A row runs over the parameter's last dimension and the
    norm over its last two, with ``flatten`` too; with ``split_dim=1`` each block of columns has a V of its
    own. Norms are those of whole matrices on every layout.

    State: ``momentum``, shaped like the parameter, and ``variance_neuron`` (V), shaped like ``p[..., 0:1]``.
    Parameters and state are written in place. A non-finite gradient makes its own parameter NaN, no other.

    Args:
        mu: momentum factor.
        nesterov: look one step ahead.
        muon_beta2: decay rate of V.
        norm_scope: "global", or "shard": norms of what one process stores, as in microsoft/dion, where
            results depend on how many processes there are.
        owned_states: keep the momentum of a weight that is replicated over processes (DDP, HSDP) on one of
            them, its owner. Call ``synchronize_for_checkpoint()`` on all ranks before ``state_dict()``.

    Arguments that are not named here are those of ``OrthonormalOptimizer`` and ``OxOptimizer``.
    """

    _ALGORITHM = "normuon"
    _LAYOUT_SETTINGS: ClassVar[dict[str, Any]] = {"norm_scope": "shard"}
    _SCHEMA: ClassVar[dict[str, Field]] = {
        "mu": validate.number(0.95),
        "nesterov": validate.flag(False),
        "owned_states": validate.flag(False),
        **NEURON_SCHEMA,
        **FAMILY_SCHEMA,
    }
    _WORDS = TORCH_WORDS

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        mu: float = 0.95,
        muon_beta2: float = 0.95,
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
        norm_scope: Literal["global", "shard"] = "global",
        owned_states: bool = False,
        check_grad_sync: bool = False,
        **common: Unpack[SharedOptions],
    ) -> None:
        super().__init__(params, locals())
