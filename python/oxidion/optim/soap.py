"""SOAP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor
from typing_extensions import Unpack

from oxidion._core import validate
from oxidion._core.base import OxOptimizer
from oxidion._core.constructor import LEFT_OUT
from oxidion._core.signature import CommonOptions, Params
from oxidion._core.validate import Field, Word
from oxidion.optim._settings import VIEW_SCHEMA

BASIS_SCHEMA: dict[str, Field] = {
    "shampoo_beta": validate.beta(None),
    "precondition_frequency": validate.count(10),
    "max_precondition_dim": validate.count(10000, low=0),
    "sides": validate.word("both", "both", "short", "unsharded"),
    "seed": validate.count(0, low=0),
    "owned_states": validate.flag(False),
    **{key: field for key, field in VIEW_SCHEMA.items() if key != "adjust_lr"},
}
"""Group keys of the classes that work in an eigenbasis."""


class SOAP(OxOptimizer):
    r"""SOAP: Adam in the eigenbasis of Shampoo's factors (arXiv:2409.11321).

    The first gradient G makes the factors and their eigenvectors and changes no parameter. Afterwards, with t
    gradients before this one, for a weight of m rows and n columns:

    .. math::
        M \leftarrow \beta_1 M + (1 - \beta_1) G, \qquad
        V \leftarrow \beta_2 V + (1 - \beta_2) (Q_L^\top G Q_R)^2, \qquad
        U = Q_L \frac{Q_L^\top M Q_R}{\sqrt V + \epsilon} Q_R^\top

    .. math::
        X \leftarrow X - \mathrm{lr} \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} U, \qquad
        X \leftarrow (1 - \mathrm{lr}\,\lambda) X, \qquad
        L \leftarrow \beta L + (1 - \beta) G G^\top, \qquad R \leftarrow \beta R + (1 - \beta) G^\top G

    Where t is a multiple of ``precondition_frequency``, ``Q_L`` becomes the orthonormal factor of
    ``L Q_L``, and ``Q_R`` that of ``R Q_R``, columns by falling estimate of their eigenvalue. A side that is
    longer than ``max_precondition_dim`` has no basis. Leading dimensions number matrices; parameters of fewer
    than two dimensions take the same step without a basis.

    State: ``exp_avg`` (M) and ``exp_avg_sq`` (V), shaped like the parameter; ``L`` and ``Q_L``, ``(..., m,
    m)``, ``R`` and ``Q_R``, ``(..., n, n)``, float32 (float64 for float64 parameters); ``basis_step``, the
    number of the gradient that made the first basis of a matrix; ``step``, gradients so far. Where a side
    with a basis is cut, one process has all states of a matrix; where the other side is, factors are sums to
    which ranks add. Call ``synchronize_for_checkpoint()`` on all ranks before ``state_dict()``. Parameters
    and state are written in place. A gradient that is not finite changes no factor; it makes its parameter
    non-finite.

    Args:
        lr: step size; a one-element tensor is allowed.
        betas: decay rates of the two moments.
        eps: added to the denominator, outside the root.
        weight_decay: decoupled decay: a step multiplies by ``1 - lr * weight_decay``.
        shampoo_beta: decay rate of the factors; None (or the authors' -1): the second one of ``betas``.
        precondition_frequency: steps between two computations of the bases.
        max_precondition_dim: longest side with a basis.
        merge_dims: multiply dimensions together from the left while the product is at most
            ``max_precondition_dim``, and take the one or two that are left as those of a matrix: with a limit
            of 12 ``(3, 4, 4, 3)`` is 12 × 12. One dimension of n elements has one factor L, n × n. More than
            two are refused. L and Q_L keep the unmerged dimensions of the rows.
        sides: the sides with a basis: "both", "short" (the shorter one, columns of a square matrix),
            "unsharded" (the one that is not cut; depends on the layout).
        correct_bias: correct for moments that begin at zero.
        normalize_grads: divide U by the root of the mean of its squares.
        decay_order: decay after the update ("galore") or before it ("torch").
        max_precond_dim: the authors' word for ``max_precondition_dim``, also in groups.
        normalize_gradient: pytorch_optimizer's word for ``normalize_grads``, also in groups.
        flatten: read ``[d0, d1, …]`` as one matrix ``[d0, d1·d2·…]`` (convolutions). Group keys without an
            argument cut a weight into blocks: ``num_heads`` (equal ones), ``split_sizes`` (of these heights),
            ``split_dim`` (0: of rows, 1: of columns), ``interleaved`` (matrices whose rows alternate).
        owned_states: keep states with one process, the owner, also where no side with a basis is cut: copies
            of a weight share the memory and send the update instead of repeating the work.
        seed: of the numbers that complete the first bases, and of stochastic rounding.
        state_dtype: dtype of M; None means float32. V is float32 (float64
            for float64 parameters).

    Arguments that are not named here are those of ``OxOptimizer``.
    """

    _ALGORITHM = "soap"
    _TAKES_VECTORS = True
    _SCHEMA: ClassVar[dict[str, Field]] = {
        "betas": validate.betas((0.95, 0.95)),
        "eps": validate.number(1e-8),
        **BASIS_SCHEMA,
        "correct_bias": validate.flag(True),
        "normalize_grads": validate.flag(False),
        "decay_order": validate.word("galore", "torch", "galore"),
        "merge_dims": validate.flag(False),
    }
    _WORDS: ClassVar[Mapping[str, Word]] = {
        "max_precond_dim": Word("max_precondition_dim", BASIS_SCHEMA["max_precondition_dim"]),
        "normalize_gradient": Word("normalize_grads", validate.flag(False)),
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        shampoo_beta: float | None = None,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 10000,
        merge_dims: bool = False,
        sides: Literal["both", "short", "unsharded"] = "both",
        correct_bias: bool = True,
        normalize_grads: bool = False,
        decay_order: Literal["torch", "galore"] = "galore",
        max_precond_dim: int = LEFT_OUT,
        normalize_gradient: bool = LEFT_OUT,
        owned_states: bool = False,
        flatten: bool = False,
        seed: int = 0,
        **common: Unpack[CommonOptions],
    ) -> None:
        values = dict(locals())
        if shampoo_beta == -1:  # the authors' word for None
            values["shampoo_beta"] = None
        super().__init__(params, values)
