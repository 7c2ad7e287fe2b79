"""Owner-sharded states (ZeRO-1): each process has some blocks in steps, and checkpoints have whole states.

In steps such a state is a tensor of shape (1, ..., 1, k), with one dimension more than the whole one: the k
elements of the blocks that this process owns, or of a sum over a sharded side what this process adds. A whole
state is laid out as its parameter; `synchronize_for_checkpoint()` gathers it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
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
        self._made: list[tuple[Tensor, str]] = []

    def __bool__(self) -> bool:
        """True where there are such states."""
        return any(self._specs.values())

    def is_sharded(self, param: Tensor, key: str, value: object) -> bool:
        """True for a state in blocks."""
        spec = self._specs.get(param, {}).get(key)
        return spec is not None and isinstance(value, Tensor) and tuple(value.shape) == tuple(spec["stored"])

    def _sharded(self, state: State) -> Iterator[tuple[dict[str, Any], Tensor, str, Spec]]:
        """The states that are in blocks now: those of the parameter, it, the key, the spec."""
        for param, specs in self._specs.items():
            own = state.get(param, {})
            yield from (
                (own, param, k, spec) for k, spec in specs.items() if self.is_sharded(param, k, own.get(k))
            )

    def first_unsynced(self, state: State, asked: Container[Tensor] | None = None) -> str | None:
        """The key of a state that is in blocks now; with ``asked`` of those of these, or of a sum."""
        rows = self._sharded(state)
        return next((k for _, p, k, s in rows if asked is None or p in asked or s["owned"][2]), None)

    def clone_for(self, twins: Mapping[Tensor, Tensor]) -> OwnerSharded:
        """The same for copies of the parameters."""
        clone = OwnerSharded()
        clone.is_fresh = self.is_fresh
        clone._specs = {twins[p]: dict(own) for p, own in self._specs.items() if p in twins}
        return clone

    def bound(self, name: str, param: Tensor, own: dict[str, Any], key: str, spec: Spec) -> Tensor | None:
        """The state ``own[key]`` as a step works on it; None for one that is not owner-sharded.

        A new state begins as zeros. One that is whole is scattered by `scatter`, later: its blocks are zeros
        until then. A tensor that a caller put there instead of another is taken as it is.

        Raises:
            LayoutError: for blocks of other owners than the plan's.
        """
        value: Any = own.get(key)
        if self.is_sharded(param, key, value):
            if spec["owned"] != self._specs[param][key]["owned"]:
                raise LayoutError(
                    f"{name}: state {key!r} is in blocks of other owners than the step asks for: parameters "
                    "were added, frozen or unfrozen, or owned_states or sides have changed. Call "
                    "synchronize_for_checkpoint() on all ranks, and then load_state_dict(state_dict()) "
                    "where sides have changed"
                )
            return cast("Tensor", value)
        if spec["owned"] is None:
            self._specs.get(param, {}).pop(key, None)
            return None
        self._specs.setdefault(param, {})[key] = spec
        if value is None:
            self._made.append((param, key))
        else:
            self._gathered.append((name, param, key, value))
        where, dtype = local(param), getattr(torch, spec["dtype"])
        own[key] = held = zeros(spec["stored"], dtype, where.device, pin=where.is_pinned())
        return held

    def gathered(self, ranks: Ranks) -> list[str]:
        """Names of the whole states that `scatter` would scatter, of parameters on an axis."""
        return [f"{name}: {key}" for name, param, key, _ in self._gathered if ranks in lines_of(param)]

    def scatter(self, state: State, groups: Groups) -> bool:
        """Brings whole states to their owners, in place; every rank calls it. True where there were some."""
        has_some = bool(self._gathered)
        self._made.clear()
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

    def undo(self, state: State) -> bool:
        """Undoes what `bound` did for a step that is refused; True where that was something.

        Ranks refuse at different parameters: without this some would have states that others lack, and
        gathering them would wait for ranks that have nothing to give.
        """
        made, self._made = self._made, []
        for param, key in made:
            self._specs[param].pop(key, None)
            state[param].pop(key, None)
        return self.put_back(state) or bool(made)

    def put_back(self, state: State) -> bool:
        """Puts whole states back that were not scattered; True where there are some."""
        self._made.clear()
        gathered, self._gathered = self._gathered, []
        for _, param, key, value in gathered:
            state[param][key] = value
        return bool(gathered)

    @contextmanager
    def zeros_shown(self, state: State) -> Iterator[None]:
        """A context in which whole states of zeros replace blocks that no step has written.

        One rank alone may take a state dict before the first step.
        """
        blocks = [(own, key, own[key]) for own, _, key, _ in self._sharded(state)] if self.is_fresh else []
        if blocks:
            self.gather(state, {})
        try:
            yield
        finally:
            for own, key, value in blocks:
                own[key] = value

    def gather(self, state: State, groups: Groups) -> None:
        """Replaces blocks by whole states, laid out as their parameters; every rank calls it."""
        with torch.inference_mode(mode=False), torch.no_grad():
            for own, param, key, spec in [*self._sharded(state)]:
                part = _own_part(collected(own[key], spec, groups), spec)
                own[key] = as_state(part.clone(memory_format=torch.contiguous_format), param, spec)


def collected(held: Tensor, spec: Spec, groups: Groups) -> Tensor:
    """All of a state that is in blocks, on every rank of the parameter; without groups what is here."""
    places, axes, _, _ = spec["owned"]
    wide = torch.float64 if held.dtype == torch.float64 else torch.float32
    whole = torch.zeros(spec["shape"], dtype=wide, device=held.device)
    _exchange(held, whole, places, out=True)
    # All ranks but the owner have a zero: the sum is exact.
    collectives.add(whole, [groups[tuple(ranks)] for ranks in axes if groups])
    return whole.to(held.dtype)


def _whole(value: Tensor, spec: Spec, groups: Groups) -> Tensor:
    """All of a state that is laid out as its parameter."""
    part = local(value).detach()
    if not is_distributed(value):
        return part
    whole = part.new_zeros(spec["shape"])
    _own_part(whole, spec).copy_(part)
    # A sum over the groups of steps: those of DTensors may be in use, as by a thread that saves.
    lines = axes_of(cast("Any", value).device_mesh)
    cut = [tuple(ranks) for (_, ranks, _), dim in zip(lines, spec["shards"], strict=True) if dim is not None]
    collectives.add(whole, [groups[ranks] for ranks in cut if len(ranks) > 1])
    return whole


def _own_part(whole: Tensor, spec: Spec) -> Tensor:
    """A view of what this process has of a whole state that is laid out as its parameter."""
    for dim, (start, length) in enumerate(spec["spans"]):
        whole = whole.narrow(dim, start, length)
    return whole


def _exchange(held: Tensor, whole: Tensor, places: Places, *, out: bool) -> None:
    """Copies blocks to the whole state or from there."""
    flat, row, at = whole.reshape(-1), held.view(-1), 0
    for offset, rows, cols, stride in places:
        if rows * cols:
            own = row[at : at + rows * cols].view(rows, cols)
            there = flat.as_strided((rows, cols), (stride, 1), flat.storage_offset() + offset)
            (there if out else own).copy_(own if out else there)
        at += rows * cols
