"""Base of the classes that orthonormalize momentum: arguments, their documentation, names of states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from oxidion._core.base import OxOptimizer
from oxidion._core.signature import spread
from oxidion._dist.comm import read_meshes
from oxidion.optim._settings import functions, gram_settings


class OrthonormalOptimizer(OxOptimizer):
    """An optimizer with an orthonormalized update.

    Parameters of three dimensions are stacks of matrices over their last two, unless ``flatten``; those of
    more need ``flatten``, or a group key ``interleaved`` (1: they are stacks too).
    Group keys without an argument: ``num_heads`` (a ``[h·d, n]`` weight is ``h`` matrices) and
    ``split_sizes`` (row blocks, for example of a fused QKV weight), both of columns with ``split_dim=1`` (for
    example the heads of an output projection). Each block has the factor ``s`` of its own shape.

    For a matrix of ``d_out`` rows and ``d_in`` columns ``s`` is ``√(d_out/d_in)`` ("spectral_norm"),
    ``0.2·√max(d_out, d_in)`` ("rms_norm", in units of AdamW's ``lr``) or 1 (None); torch's "original" is
    ``√max(1, d_out/d_in)``, its "match_rms_adamw" is "rms_norm" and its "spectral_unclamped" "spectral_norm".

    Args:
        distributed_mesh: mesh or process group to split the work over; with DDP its ``process_group``. May be
            left out with DTensors, and with a model in DDP: it is read from them.
        lr: step size, the spectral norm of an update divided by ``s``; a one-element tensor is allowed.
        betas: decay rates of groups with algorithm "adamw" or "lion"; ``beta1`` and ``beta2`` mirror them.
            In other groups the first shows the momentum factor: a scheduler that changes it sets that.
        weight_decay: decoupled decay: a step multiplies by ``1 - lr * weight_decay``, without ``s``.
        epsilon: added to the norm that scales the iteration, and AdamW's epsilon.
        adjust_lr: the rule for ``s``: "spectral_norm" or "spectral_unclamped" ``√(d_out/d_in)``, "rms_norm"
            or "match_rms_adamw" ``0.2·√max(d_out, d_in)``, "original" ``√max(1, d_out/d_in)``, None 1.
        flatten: read ``[d0, d1, …]`` as one matrix ``[d0, d1·d2·…]`` (convolutions). Group keys without an
            argument cut a weight into blocks: ``num_heads`` (equal ones), ``split_sizes`` (of these heights),
            ``split_dim`` (0: of rows, 1: of columns), ``interleaved`` (matrices whose rows alternate).
            ``fan_in_fan_out=True`` is for weights stored ``[in, out]``: ``d_out`` is then their columns.
        use_gram_newton_schulz: the Gram form with Polar Express for it, as in microsoft/dion.
        use_triton: accepted for compatibility; the kernels are built in.
        use_polar_express: Polar Express (default) or Newton–Schulz, unless ``ns_coefficients`` says more.
        newton_schulz_func: ``f(X, epsilon=...)``, used for ``orth`` before all else. X is a batch
            ``[B, m, n]`` in ``orth_dtype``, the result as large. Not in groups or checkpoints.
        momentum: torch.optim.Muon's word for ``mu``. Groups have ``mu``; a group key ``momentum`` sets it.
        adjust_lr_fn: torch.optim.Muon's word for ``adjust_lr``, also in groups: "original",
            "match_rms_adamw", "spectral_unclamped", or None, which is "original" there.
        eps: torch.optim.Muon's word for ``epsilon``, also in groups.
        orth_dtype: dtype of the iteration; "auto" is float64 for float64 parameters, for others float16 on
            CUDA devices, bfloat16 where the CPU multiplies it faster, else float32. For "float16" matrices
            come in bfloat16, which has the range of float32.
        orth_method: "standard", "gram" (the same polynomial by the Gram matrix of the short side), "svd"
            (exact polar factor), or "auto": the form of clearly fewer operations.
        orth_preset: "exact", or "fast": division by the Schatten-8 norm and four steps made for it.
        ns_coefficients: "polar_express", "newton_schulz", "keller_jordan", "cans", "aol",
            "polar_express_gram", triples ``(a, b, c)``, or one triple for every step, as torch has it.
        ns_steps: how many of the rows; the last is repeated. None: all, and five of one triple.
        check_grad_sync: check at every step that replicas have equal gradients.

    Raises:
        TypeError: for a ``newton_schulz_func`` that cannot be called.
        ValueError: for ``use_gram_newton_schulz`` with another ``orth_method`` or other coefficients, and
            for two words for one setting with different values.
    """

    _ABSENT: ClassVar[Mapping[str, Any]] = {"newton_schulz_func": None}
    _STATE_NAMES: ClassVar[dict[str, dict[str, str]]] = {"adamw": {"step": "step_dev"}}

    def __init__(self, params: Any, arguments: Mapping[str, Any]) -> None:
        """Reads a constructor's arguments by name; those that are no group keys are kept outside groups."""
        arguments = spread(arguments)
        self._meshes = read_meshes(
            ("distributed_mesh", arguments["distributed_mesh"], True), check=arguments["check_grad_sync"]
        )
        self._functions = functions(arguments["newton_schulz_func"])
        method, coefficients = gram_settings(
            arguments["use_gram_newton_schulz"], arguments["orth_method"], arguments["ns_coefficients"]
        )
        arguments |= {"orth_method": method, "ns_coefficients": coefficients, "distributed_mesh": None}
        super().__init__(params, arguments)
