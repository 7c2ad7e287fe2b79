"""Muon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from oxidion import _validate
from oxidion._base import OxOptimizer, defaults
from oxidion._comm import read_meshes
from oxidion._validate import Field
from oxidion.optim._orthonormal import FAMILY_SCHEMA, functions, gram_settings


class Muon(OxOptimizer):
    r"""Muon: momentum orthonormalized by a quintic iteration (Jordan et al. 2024).

    .. math::
        M \leftarrow \mu M + G, \qquad U = \operatorname{orth}(\mu M + G) \text{ or } \operatorname{orth}(M),
        \qquad X \leftarrow (1 - \mathrm{lr}\,\lambda) X - \mathrm{lr}\, s\, U

    ``orth`` is five steps of Polar Express (arXiv:2505.16932) or of Newton–Schulz. For a matrix of ``d_out``
    rows and ``d_in`` columns ``s`` is ``√(d_out/d_in)`` ("spectral_norm"), ``0.2·√max(d_out, d_in)``
    ("rms_norm", in units of AdamW's ``lr``) or 1 (None); torch's "original" is ``√max(1, d_out/d_in)``.

    Parameters of three and more dimensions are stacks of matrices over their last two, unless ``flatten``.
    Group keys without an argument: ``num_heads`` (a ``[h·d, n]`` weight is ``h`` matrices) and
    ``split_sizes`` (row blocks, for example of a fused QKV weight), both of columns with ``split_dim=1`` (for
    example the heads of an output projection); ``s`` comes from the block.

    State: ``momentum``, shaped like the parameter. Parameters and state are written in place. A non-finite
    gradient makes its own parameter NaN, no other.

    Args:
        distributed_mesh: mesh or process group to split the work over; with DDP its ``process_group``. May be
            left out where parameters are DTensors: their layouts tell.
        lr: step size, see ``adjust_lr``; a one-element tensor is allowed.
        mu: momentum factor.
        betas: decay rates of groups with algorithm "adamw" or "lion".
        weight_decay: decay per unit of ``lr``.
        epsilon: added to the norm that scales the iteration, and AdamW's epsilon.
        nesterov: look one step ahead.
        adjust_lr: the rule for ``s``.
        flatten: read ``[d0, d1, …]`` as one matrix ``[d0, d1·d2·…]`` (convolutions).
        use_gram_newton_schulz: the Gram form with Polar Express for it, as in microsoft/dion.
        use_triton: accepted for compatibility; the kernels are built in.
        use_polar_express: Polar Express (default) or Newton–Schulz, without ``ns_coefficients``.
        newton_schulz_func: ``f(X, epsilon=...)``, used for ``orth`` before all else. X is a batch
            ``[B, m, n]`` in ``orth_dtype``, the result as large. Not in groups or checkpoints.
        orth_dtype: dtype of the iteration; "auto" is float64 for float64 parameters, else bfloat16 where the
            CPU multiplies it faster, else float32.
        orth_method: "standard", "gram" (the same polynomial by the Gram matrix of the short side), "svd"
            (exact polar factor), or "auto": the form with fewer operations, in 16 bits "standard".
        ns_coefficients: "polar_express", "newton_schulz", "keller_jordan", "cans", "aol",
            "polar_express_gram", or triples ``(a, b, c)``.
        ns_steps: how many of the rows; the last is repeated. None: all.
        check_grad_sync: check at every step that replicas have equal gradients.

    Arguments that are not named here are those of ``OxOptimizer``.
    """

    ALGORITHM = "muon"
    SCHEMA: ClassVar[dict[str, Field]] = {
        "mu": _validate.number(0.95),
        "nesterov": _validate.flag(False),
        **FAMILY_SCHEMA,
    }
    STATE_NAMES: ClassVar[dict[str, dict[str, str]]] = {"adamw": {"step": "step_dev"}}

    def __init__(
        self,
        params: ParamsT,
        distributed_mesh: Any = None,
        lr: float | Tensor = 0.01,
        mu: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        cautious_wd: bool = False,
        epsilon: float = 1e-8,
        nesterov: bool = False,
        adjust_lr: str | None = "spectral_norm",
        flatten: bool = False,
        use_gram_newton_schulz: bool = False,
        use_triton: bool = False,
        use_polar_express: bool = True,
        newton_schulz_func: Callable[..., Tensor] | None = None,
        *,
        orth_dtype: str = "auto",
        orth_method: str = "auto",
        ns_coefficients: str | Sequence[Sequence[float]] | None = None,
        ns_steps: int | None = None,
        check_grad_sync: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        strict: bool = True,
        max_batch_bytes: int | None = None,
        state_dtype: Any = None,
    ) -> None:
        self._meshes = read_meshes(("distributed_mesh", distributed_mesh, True), check=check_grad_sync)
        self._functions = functions(newton_schulz_func)
        orth_method, ns_coefficients = gram_settings(use_gram_newton_schulz, orth_method, ns_coefficients)
        super().__init__(params, defaults(locals(), self.SCHEMA))
