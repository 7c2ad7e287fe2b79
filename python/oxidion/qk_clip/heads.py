"""Attention heads as rows of weights, and the factors that QK-clip scales them by.

Legend: H = query heads, G = key heads, R = rows of a weight, n = its columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from oxidion._core import copies
from oxidion._dist.comm import along_rows, local
from oxidion.qk_clip.logits import max_logits

Rows: TypeAlias = slice | Sequence[int] | Tensor | None
Logits: TypeAlias = Tensor | Callable[[], Tensor]


@dataclass
class _Part:
    """A weight or bias.

    Attributes:
        tensor: all of it, or a DTensor.
        index: for each row on this process the place of its factor in the table.
        claimed: for each of all rows whether it is a query or key row.
    """

    tensor: Tensor
    index: Tensor
    claimed: Tensor

    def scale(self, table: Tensor, own_states: Mapping[str, Any]) -> None:
        """Multiplies the rows in place; the arithmetic is that of the table's dtype, rounded once."""
        own = local(self.tensor)
        self.index = self.index.to(own.device)
        factors = table.to(own.device)[self.index].view(-1, *[1] * (own.ndim - 1))
        own.mul_(factors)
        if own is not self.tensor:
            torch.autograd.graph.increment_version(self.tensor)
        copies.follow(own_states, lambda copy: copy.mul_(factors), (table != 1).any())


class Heads:
    """One attention layer under QK-clip, made by ``QKClip.add``.

    Attributes:
        name: what errors call it.
        num_heads: H.
        max_logits: ``[H]``, the running maximum since the last step, or the callable that was given.
        seen: ``[H]``, the maxima that the last ``apply`` used, after the reduction over ranks; None before.
        gammas: ``[H]``, the factors of the logits in the last ``apply``; None before.
    """

    def __init__(self, name: str, num_heads: int, num_kv_heads: int | None, logits: Logits) -> None:
        self.name = name
        self.num_heads = num_heads
        self.max_logits = logits
        self.seen: Tensor | None = None
        self.gammas: Tensor | None = None
        self._key_heads = num_kv_heads  # None: latent attention, whose factors are sqrt(gamma) and gamma
        self._parts: list[_Part] = []

    @torch.no_grad()
    def observe(
        self, q: Tensor, k: Tensor, *, causal: bool = True, scale: float | None = None, first_head: int = 0
    ) -> None:
        """Raises ``max_logits`` to the largest logits of these queries and keys, in place.

        Args:
            q: queries ``[..., heads, T, D]`` as the attention gets them.
            k: keys ``[..., key heads, S, D]``.
            causal: see ``oxidion.qk_clip.max_logits``.
            scale: see ``oxidion.qk_clip.max_logits``.
            first_head: number of the first of these heads, where a process computes only some.

        Raises:
            TypeError: if ``max_logits`` is a callable, or for anything but floating-point tensors.
            ValueError: for shapes that do not fit.
        """
        if not isinstance(self.max_logits, Tensor):
            raise TypeError(f"{self.name}: max_logits is a callable, so there is nothing to raise")
        most = max_logits(q, k, causal=causal, scale=scale)
        if not 0 <= first_head <= self.num_heads - len(most):
            raise ValueError(
                f"{self.name}: heads {first_head} to {first_head + len(most) - 1} were observed, "
                f"the layer has {self.num_heads}"
            )
        own = self.max_logits[first_head : first_head + len(most)]
        own.copy_(torch.maximum(own, most.to(own)))

    def overlaps(self, other: Heads) -> bool:
        """True where both scale one row."""
        return any(
            mine.tensor is yours.tensor and bool((mine.claimed & yours.claimed).any())
            for mine in self._parts
            for yours in other._parts
        )

    @property
    def tensors(self) -> list[Tensor]:
        """The weights and biases."""
        return [part.tensor for part in self._parts]

    def claim(self, sides: Sequence[tuple[str, Tensor, Tensor | None, Tensor, Tensor]]) -> None:
        """Fixes which rows take which factor.

        Args:
            sides: name, weight, bias, row numbers, and the place of each of these rows' factor in the table.

        Raises:
            ValueError: for rows that two sides name.
        """
        free = self.table(torch.ones(self.num_heads)).numel() - 1
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for name, weight, bias, rows, places in sides:
            for tensor in [weight] if bias is None else [weight, bias]:
                unclaimed = torch.full((tensor.shape[0],), free)
                _, index = found.setdefault(id(tensor), (tensor, unclaimed))
                if bool((index[rows] != free).any()) or len(set(rows.tolist())) < len(rows):
                    raise ValueError(
                        f"{self.name}: {name}_rows has rows twice; of a fused weight pass q_rows and k_rows"
                    )
                index[rows] = places
        self._parts = [
            _Part(tensor, along_rows(index, tensor), index != free) for tensor, index in found.values()
        ]

    def table(self, gamma: Tensor) -> Tensor:
        """Factors of query heads and of key heads, and a last one for all other rows: 1."""
        if self._key_heads is None:
            return torch.cat([gamma.sqrt(), gamma, gamma.new_ones(1)])
        keys = gamma.view(self._key_heads, -1).amin(dim=1).sqrt()
        queries = gamma / keys.repeat_interleave(self.num_heads // self._key_heads)
        return torch.cat([queries, keys, gamma.new_ones(1)])

    def observed(self) -> Tensor:
        """The maxima since the last step, NaN as infinity so that every rank takes the same from them.

        Raises:
            TypeError: if a callable returned anything but a floating-point tensor.
            ValueError: if it returned one of another shape.
        """
        value = self.max_logits if isinstance(self.max_logits, Tensor) else self.max_logits()
        check_logits(self.name, value, self.num_heads)
        return torch.where(value.isnan(), math.inf, value)

    def apply(self, seen: Tensor, threshold: float, state: Mapping[Any, Any] = MappingProxyType({})) -> None:
        """Scales the rows by what these maxima ask for and begins a new running maximum.

        Args:
            seen: the maxima.
            threshold: the largest logit that is not clipped.
            state: the optimizer's, where what is kept of the weights follows them.
        """
        kinds = [torch.promote_types(tensor.dtype, torch.float32) for tensor in self.tensors]
        most = seen.to(max(kinds, key=lambda kind: kind.itemsize))
        gamma = torch.where(most.isfinite() & (most > threshold), threshold / most, 1.0)
        self.seen, self.gammas = seen, gamma
        # Asking whether there is anything to do costs nothing on a CPU and a wait on other devices.
        if gamma.device.type != "cpu" or bool((gamma < 1).any()):
            table = self.table(gamma)
            for part in self._parts:
                part.scale(table, state.get(part.tensor, {}))
        if isinstance(self.max_logits, Tensor):
            self.max_logits.fill_(-math.inf)


def grouped(
    name: str,
    q_weight: Tensor,
    k_weight: Tensor,
    num_heads: int,
    num_kv_heads: int | None,
    logits: Logits | None,
    rows: tuple[Rows, Rows],
    biases: tuple[Tensor | None, Tensor | None],
) -> Heads:
    """A layer of multi-head or grouped-query attention, with the arguments of ``QKClip.add``."""
    key_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_count("num_heads", num_heads)
    check_count("num_kv_heads", key_heads)
    if num_heads % key_heads:
        raise ValueError(
            f"{name}: num_heads must be a multiple of num_kv_heads, got {num_heads} and {key_heads}"
        )
    q_rows = row_numbers("q", q_weight, biases[0], rows[0])
    k_rows = row_numbers("k", k_weight, biases[1], rows[1])
    width = width_of(f"{name}: q", q_rows, num_heads)
    if width != width_of(f"{name}: k", k_rows, key_heads):
        raise ValueError(
            f"{name}: query heads have {width} rows and key heads {len(k_rows) // key_heads}; "
            "they must be as wide"
        )
    heads = Heads(name, num_heads, key_heads, running_maximum(name, logits, q_weight, num_heads))
    places = torch.arange(num_heads + key_heads).repeat_interleave(width)
    heads.claim(
        [
            ("q", q_weight, biases[0], q_rows, places[: len(q_rows)]),
            ("k", k_weight, biases[1], k_rows, places[len(q_rows) :]),
        ]
    )
    return heads


def running_maximum(name: str, logits: Logits | None, weight: Tensor, heads: int) -> Logits:
    """The maxima that were given, checked, or new ones."""
    if logits is None:
        return torch.full((heads,), -math.inf, device=local(weight).device)
    if isinstance(logits, Tensor) or not callable(logits):
        check_logits(name, logits, heads)
    return logits


def row_numbers(name: str, weight: Tensor, bias: Tensor | None, rows: Rows) -> Tensor:
    """The numbers of the rows that belong to a side, checked with its weight and bias.

    Raises:
        TypeError: for anything but floating-point tensors.
        ValueError: for shapes that do not fit and rows that the weight does not have.
    """
    for kind, tensor, ndim in (("weight", weight, 2), ("bias", bias, 1)):
        if tensor is None and kind == "bias":
            continue
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name}_{kind} must be a floating-point tensor, got {got}")
        if tensor.ndim != ndim or tensor.shape[0] != weight.shape[0]:
            wanted = "[rows, n]" if ndim == 2 else f"[{weight.shape[0]}], one for each row of {name}_weight"
            raise ValueError(f"{name}_{kind} must have shape {wanted}, got {tuple(tensor.shape)}")
    count = weight.shape[0]
    if rows is None or isinstance(rows, slice):
        return torch.arange(count)[rows or slice(None)]
    numbers = torch.as_tensor(rows if isinstance(rows, Tensor) else list(rows)).cpu()
    if (
        numbers.ndim != 1
        or numbers.numel() == 0
        or numbers.is_floating_point()
        or numbers.dtype == torch.bool
    ):
        raise ValueError(f"{name}_rows must be a slice or a list of row numbers, got {rows!r}")
    if int(numbers.min()) < 0 or int(numbers.max()) >= count:
        raise ValueError(
            f"{name}_rows must be within 0 to {count - 1}, the rows of {name}_weight; "
            f"got {int(numbers.min())} to {int(numbers.max())}"
        )
    return numbers.long()


def width_of(name: str, rows: Tensor, heads: int) -> int:
    """Number of rows of a head.

    Raises:
        ValueError: for rows that do not divide by the heads.
    """
    if rows.numel() == 0 or rows.numel() % heads:
        raise ValueError(f"{name}: {rows.numel()} rows are not divisible by {heads} heads")
    return rows.numel() // heads


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raises ValueError for anything but a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")


def check_logits(name: str, value: Any, heads: int) -> None:
    """Raises TypeError or ValueError for anything but a plain floating-point tensor ``[H]``."""
    if not isinstance(value, Tensor) or local(value) is not value or not value.is_floating_point():
        got = value.dtype if type(value) is Tensor else type(value).__name__
        raise TypeError(f"{name}: max_logits must be a plain floating-point tensor, got {got}")
    if tuple(value.shape) != (heads,):
        raise ValueError(f"{name}: max_logits must have shape [{heads}], got {tuple(value.shape)}")
