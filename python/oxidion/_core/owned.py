"""Owner-sharded states (ZeRO-1): each process has some blocks in steps, and checkpoints have whole states.

In steps such a state is a flat tensor of the blocks that this process owns, one after the other. Of a state
that is a sum over a sharded side it has what this process adds. A whole state is laid out as its parameter;
`synchronize_for_checkpoint()` gathers it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from oxidion._core.reserve import zeros
from oxidion._dist import collectives
from oxidion._dist.comm import Groups, Ranks, as_state, is_distributed, lines_of, local
from oxidion._oxidion import LayoutError, axes_of

Places = Sequence[tuple[int, int, int, int]]
"""Of blocks: offset, rows, columns and distance of rows in the whole state."""
State = Mapping[Any, dict[str, Any]]
"""State of an optimizer, by parameter."""
Spec = Mapping[str, Any]
"""Spec of a state. Its ``owned`` has the blocks of this process, the ranks of each axis over which blocks are
added up, whether the state is a sum, and whether the elements of a gathered one belong here."""


class OwnerSharded:
    """The layouts of an optimizer's owner-sharded states.

    Attributes:
        is_fresh: whether no step has written them: all are zeros.
    """

    def __init__(self) -> None:
        self.is_fresh = True
        self._specs: dict[Tensor, dict[str, Spec]] = {}
        self._gathered: list[tuple[str, Tensor, str, Tensor]] = []
        self._whole: set[tuple[Tensor, str]] = set()

    def __bool__(self) -> bool:
        """True where there are such states."""
        return any(self._specs.values())

    def is_sharded(self, param: Tensor, key: str, value: object) -> bool:
        """True for a state in blocks, by its shape; where whole ones have the same, by what was done last."""
        spec = self._specs.get(param, {}).get(key)
        if spec is None or not isinstance(value, Tensor) or is_distributed(value):
            return False
        flat, whole = (numel(spec["owned"][0]),), tuple(spec["shape"])
        return tuple(value.shape) == flat and (flat != whole or (param, key) not in self._whole)

    def first_unsynced(self, state: State) -> str | None:
        """The key of a state that is in blocks now."""
        found = ((key, param) for param, own in self._specs.items() for key in own)
        return next((k for k, p in found if self.is_sharded(p, k, state.get(p, {}).get(k))), None)

    def clone_for(self, twins: Mapping[Tensor, Tensor]) -> OwnerSharded:
        """The same for copies of the parameters."""
        clone = OwnerSharded()
        clone.is_fresh = self.is_fresh
        clone._specs = {twins[p]: dict(own) for p, own in self._specs.items() if p in twins}
        clone._whole = {(twins[p], key) for p, key in self._whole if p in twins}
        return clone

    def bound(self, name: str, param: Tensor, own: dict[str, Any], key: str, spec: Spec) -> Tensor | None:
        """The state as a step works on it; None for one that is not owner-sharded.

        A new state begins as zeros. One that is whole is scattered by `scatter`, later: its blocks are zeros
        until then. A tensor that a caller put there instead of another is taken as it is.

        Args:
            name: of the parameter.
            param: the parameter.
            own: its states.
            key: of the state.
            spec: that the plan asks for.

        Raises:
            LayoutError: for blocks of other owners than the plan's.
        """
        value: Any = own.get(key)
        if self.is_sharded(param, key, value):
            if spec["owned"] != self._specs[param][key]["owned"]:
                raise LayoutError(
                    f"{name}: state {key!r} is in blocks of other owners than the step asks for: parameters "
                    "were added, frozen or unfrozen, or owned_states or sides have changed. Call "
                    "synchronize_for_checkpoint() on all ranks"
                )
            return cast("Tensor", value)
        self._whole.discard((param, key))
        if spec["owned"] is None:
            self._specs.get(param, {}).pop(key, None)
            return None
        self._specs.setdefault(param, {})[key] = spec
        if value is not None:
            self._gathered.append((name, param, key, value))
        where, dtype = local(param), getattr(torch, spec["dtype"])
        own[key] = held = zeros([numel(spec["owned"][0])], dtype, where.device, pin=where.is_pinned())
        return held

    def gathered(self, ranks: Ranks) -> list[str]:
        """Names of the whole states that `scatter` would scatter, of parameters on an axis."""
        return [f"{name}: {key}" for name, param, key, _ in self._gathered if ranks in lines_of(param)]

    def scatter(self, state: State, groups: Groups) -> bool:
        """Brings whole states to their owners; every rank has to call this with the same states.

        Args:
            state: of the optimizer, changed in place.
            groups: by the ranks of an axis.

        Returns:
            True where there were some.
        """
        has_some = bool(self._gathered)
        while self._gathered:
            _, param, key, value = self._gathered[-1]
            spec, held = self._specs[param][key], state[param][key]
            places, _, _, takes = spec["owned"]
            whole = _whole(value, spec, groups).to(held.device)
            if takes:
                _exchange(held, whole.contiguous(), places, out=False)
            self.is_fresh = False
            self._gathered.pop()  # what is left when this raises is put back
        return has_some

    def put_back(self, state: State) -> bool:
        """Puts whole states back that were not scattered; True where there are some."""
        gathered, self._gathered = self._gathered, []
        for _, param, key, value in gathered:
            state[param][key] = value
            self._whole.add((param, key))
        return bool(gathered)

    @contextmanager
    def zeros_shown(self, state: State) -> Iterator[None]:
        """A context in which whole states of zeros replace blocks that no step has written.

        No other rank is asked: one alone may take a state dict before the first step.
        """
        blocks = []
        if self.is_fresh:
            for param, specs in self._specs.items():
                own = state.get(param, {})
                blocks += [
                    (own, param, key, own[key]) for key in specs if self.is_sharded(param, key, own.get(key))
                ]
            self.gather(state, {})
        try:
            yield
        finally:
            for own, param, key, value in blocks:
                own[key] = value
                self._whole.discard((param, key))

    def gather(self, state: State, groups: Groups) -> None:
        """Replaces blocks by whole states, laid out as their parameters.

        Every rank has to call this, but for states that no step has written.

        Args:
            state: of the optimizer, changed in place.
            groups: by the ranks of an axis.
        """
        with torch.inference_mode(mode=False), torch.no_grad():
            for param, specs in self._specs.items():
                for key, spec in specs.items():
                    held: Tensor = state.get(param, {}).get(key)  # type: ignore[assignment]
                    if not self.is_sharded(param, key, held):
                        continue
                    if self.is_fresh:
                        lengths = [length for _, length in spec["spans"]]
                        part = torch.zeros(lengths, dtype=held.dtype, device=held.device)
                    else:
                        part = collected(held, spec, groups)
                        for dim, (start, length) in enumerate(spec["spans"]):
                            part = part.narrow(dim, start, length)
                        part = part.clone(memory_format=torch.contiguous_format)
                    state[param][key] = as_state(part, param, spec)
                    self._whole.add((param, key))


def collected(held: Tensor, spec: Spec, groups: Groups) -> Tensor:
    """All of a state that is in blocks, on every rank of the parameter; each of them has to call this."""
    places, axes, _, _ = spec["owned"]
    wide = torch.float64 if held.dtype == torch.float64 else torch.float32
    whole = torch.zeros(spec["shape"], dtype=wide, device=held.device)
    _exchange(held, whole, places, out=True)
    # All ranks but the owner have a zero: the sum is exact.
    collectives.add(whole, [groups[tuple(ranks)] for ranks in axes])
    return whole.to(held.dtype)


def _whole(value: Tensor, spec: Spec, groups: Groups) -> Tensor:
    """All of a state that is laid out as its parameter.

    It is a sum of parts over the groups of steps: those of DTensors may be in use, as by a thread that saves.
    """
    part = local(value).detach()
    if not is_distributed(value):
        return part
    whole = torch.zeros(spec["shape"], dtype=part.dtype, device=part.device)
    own = whole
    for dim, (start, length) in enumerate(spec["spans"]):
        own = own.narrow(dim, start, length)
    own.copy_(part)
    lines = axes_of(cast("Any", value).device_mesh)
    cut = [tuple(ranks) for (_, ranks, _), dim in zip(lines, spec["shards"], strict=True) if dim is not None]
    collectives.add(whole, [groups[ranks] for ranks in cut if len(ranks) > 1])
    return whole


def numel(places: Places) -> int:
    """Elements of blocks."""
    return sum(rows * cols for _, rows, cols, _ in places)


def _exchange(held: Tensor, whole: Tensor, places: Places, *, out: bool) -> None:
    """Copies blocks to the whole state or from there."""
    flat, at = whole.reshape(-1), 0
    for offset, rows, cols, stride in places:
        if rows * cols:
            own = held[at : at + rows * cols].view(rows, cols)
            there = flat.as_strided((rows, cols), (stride, 1), flat.storage_offset() + offset)
            (there if out else own).copy_(own if out else there)
        at += rows * cols
