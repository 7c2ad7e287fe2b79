"""Dion."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor
from typing_extensions import Unpack

from oxidion._core import validate
from oxidion._core.base import OxOptimizer
from oxidion._core.signature import CommonOptions, Params, spread
from oxidion._dist.comm import check_same, read_meshes
from oxidion.optim._settings import VIEW_SCHEMA
from oxidion.optim.mixed_precision import DionMixedPrecisionConfig


class Dion(OxOptimizer):
    r"""Dion: low-rank orthonormal updates with error feedback (Ahn et al. 2025, arXiv:2504.05295).

    With the matrix oriented so that ``m ≥ n`` (its transpose where it is wide) and rank ``r``:

    .. math::
        M \leftarrow M + G, \quad P = \operatorname{orth}(M Q), \quad R = M^\top P, \quad
        M \leftarrow M - (1-\mu) P R^\top, \\
        Q_j \leftarrow R_j / (\lVert R_j \rVert + \epsilon), \quad
        X \leftarrow (1 - \mathrm{lr}\,\lambda) X - \mathrm{lr} \sqrt{d_{out}/d_{in}}\; P Q^\top

    State: ``momentum``, shaped like the parameter, and ``Q`` ``[n, r]``; all is written in place. A direction
    that the momentum lacks (a column of R that is zero or rounding noise) adds nothing to the update and
    keeps its column of Q. A non-finite gradient makes its own parameter NaN, no other.

    Args:
        lr: RMS-to-RMS operator norm of an update, whatever the rank; a one-element tensor is allowed.
        rank_fraction: rank of the update as a fraction of the matrix's short side, in (0, 1].
        rank_multiple_of: the rank is rounded up to a multiple of this.
        mu: momentum factor: this share of the captured part stays in the momentum.
        betas: decay rates of groups with algorithm "adamw" or "lion"; ``beta1`` and ``beta2`` mirror them.
            In other groups the first shows the momentum factor: a scheduler that changes it sets that.
        weight_decay: decoupled decay: a step multiplies by ``1 - lr * weight_decay``.
        epsilon: added to the column norms, and AdamW's epsilon.
        power_iters: power iterations per step, at most 1000.
        qr_method: "rcqr" (Cholesky QR, after a sketch where it needs one), "cqr", "cqr2" (twice) or "qr".
        cqr_warmup_steps: "cqr" uses "rcqr" for this many steps.
        rcqr_oversample: rows of the sketch per column; the group key is ``oversample``.
        mixed_precision_config: dtypes of the states one by one; they are group keys of their own.
        orth_dtype: of P, R, products: "bfloat16", "tf32" (on CUDA devices; float32 elsewhere), "float32",
            "float64", "auto" (float64 where the weight or M is, else "tf32").
        adjust_lr: the rule for the factor of ``lr``: "spectral_norm" or "spectral_unclamped"
            ``√(d_out/d_in)``, "rms_norm" or "match_rms_adamw" ``0.2·√max(d_out, d_in)``, "original"
            ``√max(1, d_out/d_in)``, None 1.
        right_factor: "column" divides each column of R by its norm, "orthonormal" (Orth-Dion,
            arXiv:2605.16341) takes the Q factor of R, with a positive diagonal. Columns of R that are zero or
            rounding noise are no part of the factorization and add nothing to the update. They keep their
            column of Q, less what it has of the new ones and scaled to length 1; unchanged where less than
            1/1024 of it is left, or where all columns are such. A column that depends on those before it
            is divided by its norm.
        flatten: read ``[d0, d1, …]`` as one matrix ``[d0, d1·d2·…]`` (convolutions). Group keys without an
            argument: ``num_heads``, ``split_sizes``, ``split_dim`` and ``interleaved`` cut a weight;
            ``fan_in_fan_out=True`` is for weights stored ``[in, out]``.
        seed: of the initial Q and of the sketches, with the parameter's name (else position) and the step.
        route: "keep" iterates on shards and sends factors; "gather" sends each matrix to an owner and back; a
            tuple does so along these mesh axes, and inner ones of the same side. "auto" takes what sends
            least: gathering, beyond about ``1 / rank_fraction`` shards. A momentum of fewer bits than the
            products is rounded once more when gathered. One of 8 bits is kept, and so is a matrix whose norm
            is held, which forms U in memory.
        check_grad_sync: check at every step that gradients are averaged if, and only if, they should be.
        distributed_mesh: the other classes' word for a ``replicate_mesh`` whose gradients are averaged
            already, as by DDP; together with ``replicate_mesh`` it has to have the same ranks.
        replicate_mesh: mesh or process group whose ranks hold copies. Meshes may be left
            out with DTensors, from whose layouts they are read.
        outer_shard_mesh: 1-D mesh of FSDP. Where this or the next is given, the outer one's side is Q's.
        inner_shard_mesh: 1-D mesh of tensor parallelism.
        replicate_mesh_grad_sync: average over ``replicate_mesh`` here: P and R where smaller than gradients.

    Arguments that are not named here are those of ``OxOptimizer``.
    """

    _ALGORITHM = "dion"
    _STATE_NAMES: ClassVar[dict[str, dict[str, str]]] = {}  # the core's, which are those of microsoft/dion
    _SCHEMA: ClassVar[dict[str, validate.Field]] = {
        "rank_fraction": validate.number(1.0, high=1.0, open_low=True),
        "rank_multiple_of": validate.count(1),
        "mu": validate.number(0.95),
        "betas": validate.betas((0.9, 0.95)),
        "beta1": validate.beta(None),
        "beta2": validate.beta(None),
        "epsilon": validate.number(1e-8),
        "oversample": validate.number(1.25, low=1.0),
        "power_iters": validate.count(1, high=1000),
        "right_factor": validate.word("column", "column", "orthonormal"),
        "qr_method": validate.word("rcqr", "rcqr", "cqr", "cqr2", "qr"),
        "cqr_warmup_steps": validate.count(150, low=0),
        "momentum_dtype": validate.dtype(),
        "Q_dtype": validate.dtype(),
        "variance_dtype": validate.dtype(),
        "orth_dtype": validate.word("auto", "auto", "bfloat16", "tf32", "float32", "float64"),
        "seed": validate.count(0, low=0),
        "route": validate.route(),
        **VIEW_SCHEMA,
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        rank_fraction: float = 1.0,
        rank_multiple_of: int = 1,
        mu: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        epsilon: float = 1e-8,
        power_iters: int = 1,
        qr_method: Literal["rcqr", "cqr", "cqr2", "qr"] = "rcqr",
        cqr_warmup_steps: int = 150,
        rcqr_oversample: float = 1.25,
        mixed_precision_config: DionMixedPrecisionConfig | None = None,
        *,
        orth_dtype: Literal["auto", "bfloat16", "tf32", "float32", "float64"] = "auto",
        adjust_lr: Literal["spectral_norm", "rms_norm", "original", "match_rms_adamw", "spectral_unclamped"]
        | None = "spectral_norm",
        right_factor: Literal["column", "orthonormal"] = "column",
        flatten: bool = False,
        seed: int = 0,
        route: Literal["auto", "keep", "gather"] | tuple[str, ...] = "auto",
        check_grad_sync: bool = False,
        replicate_mesh: Any = None,
        outer_shard_mesh: Any = None,
        inner_shard_mesh: Any = None,
        replicate_mesh_grad_sync: bool = True,
        **common: Unpack[CommonOptions],
    ) -> None:
        replicas = ("replicate_mesh", replicate_mesh, not replicate_mesh_grad_sync)
        if (mesh := common.get("distributed_mesh")) is not None:
            check_same("distributed_mesh", mesh, "replicate_mesh", replicate_mesh)
            replicas = ("distributed_mesh", mesh, replicate_mesh is None or replicas[2])
        self._meshes = read_meshes(replicas, outer_shard_mesh, inner_shard_mesh, check=check_grad_sync)
        config = mixed_precision_config or DionMixedPrecisionConfig()
        values = spread(locals()) | {"oversample": rcqr_oversample, "distributed_mesh": None}
        keys = ("momentum_dtype", "Q_dtype", "variance_dtype")
        values |= {k: validate.dtype_name(getattr(config, k), k) for k in keys}
        super().__init__(params, values)
