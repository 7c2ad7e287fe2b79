"""SOAP-Muon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from torch import Tensor
from typing_extensions import Unpack

from oxidion._core import validate
from oxidion._core.signature import CommonOptions, Params
from oxidion._core.validate import Field
from oxidion.optim._orthonormal import OrthonormalOptimizer
from oxidion.optim._settings import ADJUST_LR, FAMILY_SCHEMA
from oxidion.optim.soap import BASIS_SCHEMA

DEFAULT_BETA2 = 0.9


class SOAPMuon(OrthonormalOptimizer):
    r"""SOAP-Muon: momentum tempered in the eigenbasis of Shampoo's factors, then orthonormalized.

    With M the running mean of the gradients G and N its look-ahead:

    .. math::
        M \leftarrow \mu M + (1 - \mu) G, \qquad N = (1 - \mu) G + \mu M, \qquad
        Y = Q_L^\top N Q_R, \qquad V \leftarrow \beta_2 V + (1 - \beta_2) Y^2

    .. math::
        D = Q_L \frac{Y}{\max(V, \epsilon^2)^p} Q_R^\top, \qquad
        X \leftarrow (1 - \mathrm{lr}\,\lambda) X - \mathrm{lr}\, s \operatorname{orth}(D)

    D is scaled to the Schatten-4 norm of N. Before a matrix has a basis, at its first gradient, ``D = N``.
    Then come factors and bases as in ``SOAP``.
    ``orth`` and ``s`` are those of ``Muon``.

    State: ``momentum`` (M) and ``exp_avg_sq`` (V), shaped like the parameter; ``L`` and ``Q_L``, ``(..., m,
    m)``, ``R`` and ``Q_R``, ``(..., n, n)``, float32 (float64 for float64 parameters); ``basis_step``, the
    number of the gradient that made the first basis of a matrix; ``step``, gradients so far. Where rows or
    columns are cut, one process has all states of a matrix: call ``synchronize_for_checkpoint()`` on all
    ranks before ``state_dict()``. Parameters and state are written in place. A gradient that is not finite
    changes no factor; it makes its parameter NaN.

    Args:
        mu: decay rate of the momentum, which is a mean here and not a sum.
        beta2: decay rate of V, and of the factors unless ``shampoo_beta`` is given.
        betas: decay rates of groups with algorithm "adamw" or "lion"; the second one is ``beta2``.
        eps: root of the least V that is divided by.
        shampoo_beta: decay rate of the factors; None: ``beta2``.
        precondition_frequency: steps between two computations of the bases.
        max_precondition_dim: longest side with a basis.
        denom_power: the exponent p; 0 leaves N as it is.
        sides: the sides with a basis: "both", "short" (the shorter one, columns of a square matrix),
            "unsharded" (the one that is not cut; depends on the layout).
        owned_states: keep states with one process, the owner, also where neither side is cut: copies of a
            weight share the memory and send the update instead of repeating the work.
        orth_norm: the norm by which ``orth`` divides: "frobenius" or "schatten4".
        seed: of the numbers that complete the first bases, and of stochastic rounding.

    Raises:
        ValueError: for a ``beta2`` that is not the second one of ``betas``.

    Arguments that are not named here are those of ``OrthonormalOptimizer`` and ``OxOptimizer``.
    """

    _ALGORITHM = "soap_muon"
    _STATE_NAMES: ClassVar[dict[str, dict[str, str]]] = {
        **OrthonormalOptimizer._STATE_NAMES,
        "soap_muon": {"variance": "exp_avg_sq"},
    }
    _SCHEMA: ClassVar[dict[str, Field]] = {
        "mu": validate.number(0.95),
        **FAMILY_SCHEMA,
        "betas": validate.betas((0.9, 0.9)),
        "beta2": validate.beta(0.9),
        "adjust_lr": validate.word("original", *ADJUST_LR.words, None),
        "eps": validate.number(1e-8),
        **BASIS_SCHEMA,
        "denom_power": validate.number(0.5),
        "orth_norm": validate.word("frobenius", "frobenius", "schatten4"),
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.02,
        mu: float = 0.95,
        beta2: float = 0.9,
        weight_decay: float = 0.01,
        *,
        betas: tuple[float, float] = (0.9, 0.9),
        eps: float = 1e-8,
        shampoo_beta: float | None = None,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 10000,
        denom_power: float = 0.5,
        sides: Literal["both", "short", "unsharded"] = "both",
        adjust_lr: Literal["spectral_norm", "rms_norm", "original", "match_rms_adamw", "spectral_unclamped"]
        | None = "original",
        epsilon: float = 1e-8,
        flatten: bool = False,
        use_polar_express: bool = True,
        newton_schulz_func: Callable[..., Tensor] | None = None,
        orth_dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto",
        orth_method: Literal["auto", "standard", "gram", "svd"] = "auto",
        orth_preset: Literal["exact", "fast"] = "exact",
        orth_norm: Literal["frobenius", "schatten4"] = "frobenius",
        ns_coefficients: Literal[
            "polar_express", "newton_schulz", "keller_jordan", "cans", "aol", "polar_express_gram"
        ]
        | Sequence[float]
        | Sequence[Sequence[float]]
        | None = None,
        ns_steps: int | None = None,
        owned_states: bool = False,
        seed: int = 0,
        check_grad_sync: bool = False,
        **common: Unpack[CommonOptions],
    ) -> None:
        arguments = dict(locals())
        if validate.is_pair(betas) and betas[1] != beta2:
            if betas[1] != DEFAULT_BETA2 != beta2:
                raise ValueError(
                    f"beta2 is the second of betas and must be equal to it, got beta2={beta2!r} and "
                    f"betas={betas!r}: leave one of them out"
                )
            arguments["betas"] = (betas[0], betas[1] if beta2 == DEFAULT_BETA2 else beta2)
        arguments["use_gram_newton_schulz"] = False
        super().__init__(params, arguments)
