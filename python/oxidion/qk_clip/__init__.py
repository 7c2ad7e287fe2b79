"""QK-clip: bounds attention logits by scaling the query and key weights after the step.

Algorithm 1 of the Kimi K2 report (arXiv:2507.20534). For every query head h, with ``S_h`` the largest logit
``scale * q . k`` since the last step and tau the threshold,

    gamma_h = min(1, tau / S_h)

and the rows of the head are scaled so that all its logits become ``gamma_h`` times what they were:

    gamma_g = min of gamma_h over the query heads h of g
    key head g:    sqrt(gamma_g)
    query head h:  gamma_h / sqrt(gamma_g)

The product of the two is ``gamma_h``, so a head below the threshold keeps its logits even if it shares its
key head with one above: its queries grow by what its keys lost. With G = H both are ``sqrt(gamma_h)``.

Legend: H = query heads, G = key heads, R = rows of a weight, n = its columns.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from oxidion._dist import collectives, comm
from oxidion._oxidion import PlanMismatch
from oxidion.qk_clip.heads import (
    Heads,
    Logits,
    Rows,
    check_count,
    check_logits,
    grouped,
    row_numbers,
    running_maximum,
)
from oxidion.qk_clip.logits import max_logits

__all__ = ["Heads", "QKClip", "max_logits", "qk_clip_"]


class QKClip:
    """Applies QK-clip after every step of an optimizer, any ``torch.optim.Optimizer``.

    After a step the rows of each registered layer are scaled in place, and its ``max_logits`` is reset to
    ``-inf``. A head whose maximum is NaN or infinite is left as it is, and so is one that was not observed.
    What this package's optimizers keep of the weights follows: the weights that ``average="schedule_free"``
    steps are scaled too, and norms that "hyperball" keeps are those of the clipped weights from then on.

    Args:
        optimizer: the optimizer of the weights, on which ``register_step_post_hook`` is called. A copy or a
            pickle of the optimizer alone has no hooks; a copy of the ``QKClip`` brings a hooked copy with it.
        threshold: tau, the largest logit that is not clipped.
        reduce_over: mesh or process group, or a list of them, over which ``max_logits`` is reduced by its
            maximum. The meshes of DTensor weights are always added. Replicas of plain tensors
            (DistributedDataParallel) need it, else their weights diverge.

    Raises:
        TypeError: for anything but an optimizer, and for meshes that are none.
        ValueError: for a threshold that is not a finite number > 0.
    """

    def __init__(self, optimizer: Optimizer, threshold: float = 100.0, *, reduce_over: Any = None) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        _check_threshold(threshold)
        several = reduce_over if isinstance(reduce_over, (list, tuple)) else [reduce_over]
        self._meshes = [comm.read_meshes(("reduce_over", mesh, True)) for mesh in several if mesh is not None]
        self.optimizer = optimizer
        self.threshold = threshold
        self.layers: list[Heads] = []
        self._groups: list[Any] | None = None
        self._hook: Any = optimizer.register_step_post_hook(self._after_step)

    def add(
        self,
        q_weight: Tensor,
        k_weight: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        max_logits: Logits | None = None,
        q_rows: Rows = None,
        k_rows: Rows = None,
        q_bias: Tensor | None = None,
        k_bias: Tensor | None = None,
        name: str | None = None,
    ) -> Heads:
        """Registers the projections of one attention layer, ``[R, n]`` as ``nn.Linear`` has them.

        Args:
            q_weight: the query projection, a tensor or DTensor; head h has the h-th of H equal runs of rows.
            k_weight: the key projection; the same object where query and key are fused.
            num_heads: H. Under tensor parallelism all heads for a DTensor, this process's for a plain tensor.
            num_kv_heads: G, a divisor of H; None means H. Query head h belongs to key head ``h // (H / G)``.
            max_logits: ``[H]``, which the model raises in place with every forward pass and this class resets
                to ``-inf``; or a callable that returns such a tensor, which nothing resets. None makes one
                on the weight's device, for ``Heads.observe``.
            q_rows: the query rows within ``q_weight``, head by head: a slice or row numbers; None means all.
            k_rows: the key rows within ``k_weight``.
            q_bias: bias of the query projection, with the same rows as the weight.
            k_bias: bias of the key projection.
            name: what errors call the layer.

        Returns:
            The layer, with ``max_logits`` and, after a step, ``seen`` and ``gammas``.

        Raises:
            TypeError: for anything but floating-point tensors.
            ValueError: for shapes, head counts or rows that do not fit, or that another layer has.
        """
        name = f"layer {len(self.layers)}" if name is None else name
        heads = grouped(
            name, q_weight, k_weight, num_heads, num_kv_heads, max_logits, (q_rows, k_rows), (q_bias, k_bias)
        )
        return self._register(heads)

    def add_mla(
        self,
        q_weight: Tensor,
        kv_weight: Tensor,
        *,
        num_heads: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        max_logits: Logits | None = None,
        name: str | None = None,
    ) -> Heads:
        """Registers a layer of multi-head latent attention, whose rotary key is shared by all heads.

        Content queries and content keys are scaled by ``sqrt(gamma_h)``, rotary queries by ``gamma_h``; the
        shared rotary key and the values are unchanged.

        Args:
            q_weight: ``[H (qk_nope_head_dim + qk_rope_head_dim), n]``, in each head content rows first.
            kv_weight: ``[H (qk_nope_head_dim + v_head_dim), n]``, in each head content keys first.
            num_heads: H.
            qk_nope_head_dim: content rows of a head.
            qk_rope_head_dim: rotary rows of a head's query.
            v_head_dim: value rows of a head; 0 where ``kv_weight`` holds keys only.
            max_logits: as in ``add``.
            name: as in ``add``.

        Raises:
            TypeError: for anything but floating-point tensors.
            ValueError: for shapes that do not fit, or weights that another layer has.
        """
        name = f"layer {len(self.layers)}" if name is None else name
        check_count("num_heads", num_heads)
        check_count("qk_nope_head_dim", qk_nope_head_dim)
        check_count("qk_rope_head_dim", qk_rope_head_dim, 0)
        check_count("v_head_dim", v_head_dim, 0)
        rows = []
        for side, weight, second in (("q", q_weight, qk_rope_head_dim), ("kv", kv_weight, v_head_dim)):
            numbers, per_head = row_numbers(side, weight, None, None), qk_nope_head_dim + second
            if len(numbers) != num_heads * per_head:
                raise ValueError(
                    f"{name}: {side}_weight must have {num_heads} x {per_head} rows, got {len(numbers)}"
                )
            rows.append(numbers.view(num_heads, per_head))
        heads = Heads(name, num_heads, None, running_maximum(name, max_logits, q_weight, num_heads))
        places = torch.arange(2 * num_heads)
        parts = [
            ("q", q_weight, rows[0][:, :qk_nope_head_dim], places[:num_heads]),
            ("q", q_weight, rows[0][:, qk_nope_head_dim:], places[num_heads:]),
            ("kv", kv_weight, rows[1][:, :qk_nope_head_dim], places[:num_heads]),
        ]
        heads.claim([(s, w, None, r.flatten(), p.repeat_interleave(r.shape[1])) for s, w, r, p in parts])
        return self._register(heads)

    def _register(self, heads: Heads) -> Heads:
        for other in self.layers:
            if other.overlaps(heads):
                raise ValueError(f"{heads.name}: its rows are among those of {other.name} already")
        self.layers.append(heads)
        self._groups = None
        return heads

    @torch.no_grad()
    def apply(self) -> None:
        """Clips every layer by its ``max_logits`` now and resets them; the hook calls this after each step.

        Ranks that the maxima are reduced over all have to call it.

        Raises:
            PlanMismatch: on every rank, if the ranks registered different numbers of heads.
            TypeError: if a callable returned anything but a floating-point tensor; nothing has been written.
            ValueError: if it returned one of another shape; nothing has been written.
        """
        if not self.layers and not self._meshes:
            return
        seen = [heads.observed() for heads in self.layers]
        for heads, most in zip(self.layers, self._reduced(seen), strict=True):
            heads.apply(most, self.threshold, self.optimizer.state)

    def _reduced(self, seen: list[Tensor]) -> list[Tensor]:
        """The maxima over all ranks, one all-reduce for each axis."""
        device = seen[0].device if seen else None
        if self._groups is None:
            tensors = [tensor for heads in self.layers for tensor in heads.tensors]
            found: dict[Any, Any] = {}
            for meshes in self._meshes or [comm.NO_MESHES]:
                found |= comm.groups_of(tensors, meshes)
            count = sum(len(most) for most in seen)
            counts = torch.tensor([count, -count], device=device)
            # Over all axes before anybody raises: no rank may wait for one that has.
            most, least = (
                [collectives.largest(counts, group) for group in found.values()][-1] if found else (0, 0)
            )
            if int(most + least):
                raise PlanMismatch(
                    f"QKClip: this rank has {count} heads, others {int(-least)} to {int(most)}: "
                    "register the same layers on all ranks"
                )
            self._groups = list(found.values())
        if not self._groups or not seen:
            return seen
        flat = torch.cat([most.to(device) for most in seen])
        for group in self._groups:
            collectives.largest(flat, group)
        pieces = torch.split(flat, [len(most) for most in seen])
        return [piece.to(most) for piece, most in zip(pieces, seen, strict=True)]

    def remove(self) -> None:
        """Takes the hook off the optimizer; ``apply`` still works."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def _after_step(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.apply()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_groups": None, "_hook": self._hook is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hook = self.optimizer.register_step_post_hook(self._after_step) if state["_hook"] else None

    @override
    def __repr__(self) -> str:
        return f"QKClip(threshold={self.threshold:g}, layers={len(self.layers)})"


@torch.no_grad()
def qk_clip_(
    q_weight: Tensor,
    k_weight: Tensor,
    max_logits: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    threshold: float = 100.0,
    q_rows: Rows = None,
    k_rows: Rows = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
) -> Tensor:
    """Clips one attention layer once, in place; ``max_logits`` is left as it is and not reduced over ranks.

    States of an optimizer do not follow: use ``QKClip`` with ``average="schedule_free"`` and with
    ``weight_norm="hyperball"``.

    The arguments are those of ``QKClip`` and ``QKClip.add``.

    Returns:
        ``[H]``, the factors gamma of the logits.

    Raises:
        TypeError: for anything but floating-point tensors.
        ValueError: for shapes, head counts, rows or a threshold that do not fit.
    """
    _check_threshold(threshold)
    check_logits("qk_clip_", max_logits, num_heads)
    heads = grouped(
        "qk_clip_",
        q_weight,
        k_weight,
        num_heads,
        num_kv_heads,
        max_logits.clone(),
        (q_rows, k_rows),
        (q_bias, k_bias),
    )
    heads.apply(heads.observed(), threshold)
    assert heads.gammas is not None
    return heads.gammas


def _check_threshold(threshold: Any) -> None:
    """Raises ValueError for anything but a finite number > 0."""
    number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
    if not number or not 0.0 < threshold < math.inf:
        raise ValueError(f"threshold must be a finite number > 0, got {threshold!r}")
