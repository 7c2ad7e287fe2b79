"""ColossalAI's names for `Lamb`, `Adafactor`, `CAME` and `GaLoreAdamW`; ColossalAI is not needed for it.

Names, order of arguments and defaults are those of ``colossalai.nn.optimizer``; the classes are those of this
package. Further keyword arguments, as ``master_weights=True``, are those of the class that a name stands for.
docs/coming-from/colossalai.md lists which numbers differ, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from oxidion import optim
from oxidion._core import schema, validate
from oxidion._core.base import OxOptimizer
from oxidion._core.signature import Params
from oxidion._dist import comm

__all__ = [
    "CAME",
    "Adafactor",
    "DistGaloreAwamW",
    "DistributedAdaFactor",
    "DistributedCAME",
    "DistributedLamb",
    "GaLoreAdamW8bit",
    "Lamb",
    "get_galore_param_groups",
]


class _Distributed(OxOptimizer):
    """Method that ColossalAI's distributed optimizers have."""

    _ZERO = False
    """Default of ``is_zero`` and ``use_zero``, two words for one argument."""

    def setup_distributed(
        self,
        tp_group: Any = None,
        dp_group: Any = None,
        shard_to_working_param: Mapping[int, Tensor] | None = None,
        padding_map: Any = None,
        is_zero: bool | None = None,
        use_zero: bool | None = None,
    ) -> None:
        """Checks the parameters and changes nothing: DTensors tell where parameters lie.

        Args:
            tp_group: process group of tensor parallelism.
            dp_group: process group of data parallelism.
            shard_to_working_param: parameters of the model by ``id`` of the shard that is stepped.
            padding_map: not read.
            is_zero: True says that ``dp_group`` shards the parameters.
            use_zero: the same; the default of both is ColossalAI's.

        Raises:
            ValueError: where no parameter is a DTensor and the arguments say that parameters are shards.
                Norms, means and factors would be those of a shard.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        if any(comm.is_distributed(param) for param in params):
            return
        zero = next((given for given in (is_zero, use_zero) if given is not None), self._ZERO)
        tp, dp = (1 if group is None else group.size() for group in (tp_group, dp_group))
        working = shard_to_working_param or {}
        if tp > 1:
            found = f"tp_group has {tp} ranks"
        elif zero and dp > 1:
            word = "use_zero" if self._ZERO else "is_zero"
            found = f"dp_group has {dp} ranks under ZeRO ({word}=False says that parameters are whole)"
        elif any(working.get(id(param), param) is not param for param in params):
            found = "shard_to_working_param maps parameters to other tensors"
        else:
            return
        raise ValueError(
            f"setup_distributed expects DTensors, got plain tensors, and {found}. Shard the model with "
            "torch's tensor parallelism or FSDP2: optimizers of oxidion read the layout from DTensors, see "
            "docs/coming-from/colossalai.md"
        )


_NO_CLIPPING = (
    "be 100, which clips nothing: norms of earlier gradients are not kept, see torch.nn.utils.clip_grad_norm_"
)


_BIAS_CORRECTION = {
    "bias_correction": validate.Word("debias", validate.flag(True), {True: "step", False: "none"})
}
"""ColossalAI's word for ``debias``, of arguments and of groups."""


class Lamb(optim.Lamb):
    """`oxidion.Lamb` with ``always_adapt=True`` and, unless ``bias_correction``, ``debias="none"``.

    ``oxidion.checkpoint.import_state_dict(saved, "colossalai-lamb")`` reads checkpoints of ColossalAI's.

    Args:
        adam: must be False: without the trust ratio it is AdamW.
        bias_correction: True is ``debias="step"``; also a key of groups.

    Raises:
        ValueError: for ``adam=True``.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        bias_correction: bool = False,
        **arguments: Any,
    ) -> None:
        if adam:
            raise ValueError(
                f"adam must be False, got {adam!r}: without the trust ratio Lamb is AdamW; take oxidion.AdamW"
            )
        words = {"bias_correction": bias_correction}
        schema.translate(words, _BIAS_CORRECTION, "arguments")
        super().__init__(params, lr, betas, eps, weight_decay, **{"always_adapt": True, **words, **arguments})

    @override
    def _words(self, group: Mapping[str, Any]) -> Mapping[str, validate.Word]:
        is_lamb = group.get("algorithm", self._ALGORITHM) == self._ALGORITHM
        return {**super()._words(group), **(_BIAS_CORRECTION if is_lamb else {})}


class DistributedLamb(_Distributed, Lamb):
    """`oxidion.Lamb` with ``debias="step"`` and ``always_adapt=True``, on any layout of torch's DTensors.

    Checkpoints of ColossalAI's class are read as those of `Lamb`.

    Args:
        bias_correction: False is ``debias="none"``; also a key of groups.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        bias_correction: bool = True,
        **arguments: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, False, bias_correction, **arguments)


class Adafactor(optim.Adafactor):
    """`oxidion.Adafactor`: ``lr`` and ``scale_parameter`` act; see `DistributedAdaFactor`."""


class DistributedAdaFactor(_Distributed, optim.Adafactor):
    """`oxidion.Adafactor` on any layout of torch's DTensors: ``lr`` and ``scale_parameter`` act.

    ColossalAI overwrites ``lr`` with None and, for ``scale_parameter``, takes the RMS of a parameter as 0.
    Here ``lr`` with ``relative_step=True`` is a ``ValueError``, and the defaults take larger steps. Up to
    step 10,000 the steps of ColossalAI's defaults are those of
    ``lr=1e-5, scale_parameter=False, relative_step=False``.
    """

    _ZERO = True


class CAME(optim.CAME):
    """`oxidion.CAME`; ``lr`` has to be given here too."""


class DistributedCAME(_Distributed, optim.CAME):
    """`oxidion.CAME` on any layout of torch's DTensors; ``lr`` has to be given.

    ColossalAI's class averages the residual into the factors of the second moment, and overwrites the
    momentum of a vector with its step. Here residual and momentum have states of their own, as in the paper.
    """

    _ZERO = True


class GaLoreAdamW8bit(optim.GaLoreAdamW):
    """`oxidion.GaLoreAdamW` with ``svd="exact"`` and ``decay_order="galore"``, as ColossalAI computes them.

    Args:
        nbits: bits of an element of the moments, 8 or 32: ``state_bits``.
        min_8bit_size: moments of fewer elements are float32: ``min_quant_numel``.
        percentile_clipping: must be 100 or more, which clips nothing.
        block_wise: must be True with 8 bits: every ``block_size`` elements have a scale.
        is_paged: must be False.
        args: must be None.

    Raises:
        ValueError: for another value of those arguments.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        nbits: int = 8,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        is_paged: bool = False,
        args: Any = None,
        **arguments: Any,
    ) -> None:
        clips, is_exact = percentile_clipping, nbits == 32
        checks = (
            ("nbits", nbits, nbits in (8, 32), "be 8 or 32: moments are of 8 bits or float32"),
            ("percentile_clipping", clips, validate.is_number(clips) and clips >= 100, _NO_CLIPPING),
            (
                "block_wise",
                block_wise,
                block_wise is True or (block_wise is False and is_exact),
                "be True: each block of 8-bit moments has a scale",
            ),
            ("is_paged", is_paged, not is_paged, "be False: states are not paged, see docs/offload.md"),
            ("args", args, args is None, "be None: give nbits and min_8bit_size themselves"),
        )
        for name, value, fits, rule in checks:
            if not fits:
                raise ValueError(f"{name} must {rule} (got {value!r})")
        size: Any = min_8bit_size
        own: dict[str, Any] = {
            "svd": "exact",
            "decay_order": "galore",
            "state_bits": nbits,
            "min_quant_numel": int(size) if isinstance(size, float) and size.is_integer() else size,
            **arguments,
        }
        super().__init__(params, lr, betas, eps, weight_decay, **own)


class DistGaloreAwamW(_Distributed, GaLoreAdamW8bit):
    """`GaLoreAdamW8bit` on any layout of torch's DTensors, sharded along the projected side too."""


def get_galore_param_groups(
    model: nn.Module,
    weight_decay: float | None = None,
    rank: int = 256,
    update_proj_gap: int = 200,
    scale: float = 0.25,
    proj_type: str = "std",
    *,
    decay: float | None = None,
) -> list[dict[str, Any]]:
    """Three groups, sorted as ColossalAI does: projected matrices, other parameters, those without decay.

    Every parameter of two dimensions is projected, embeddings and output layers too. Names that contain
    "bias" or "LayerNorm.weight" do not decay. `oxidion.galore_param_groups` sorts by modules instead.

    Args:
        model: the model, before or after ``fully_shard``.
        weight_decay: of the first two groups.
        rank: of the projection.
        update_proj_gap: steps between two projections.
        scale: factor of the update.
        proj_type: the side that is projected.
        decay: ``weight_decay`` by the name that ColossalAI's page has for it.

    Raises:
        TypeError: where neither or both of ``weight_decay`` and ``decay`` are given.
    """
    if (weight_decay is None) == (decay is None):
        raise TypeError("get_galore_param_groups() needs weight_decay, or decay, which is the same")
    kept = decay if weight_decay is None else weight_decay
    projection = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale, "proj_type": proj_type}
    groups: list[dict[str, Any]] = [
        {"params": [], "param_names": [], "weight_decay": kept, **projection},
        {"params": [], "param_names": [], "weight_decay": kept},
        {"params": [], "param_names": [], "weight_decay": 0.0},
    ]
    for name, param in model.named_parameters():
        is_bare = "bias" in name or "LayerNorm.weight" in name
        group = groups[2 if is_bare else 0 if param.ndim == 2 else 1]
        group["params"].append(param)
        group["param_names"].append(name)
    return groups
