"""States that lie with the owners of matrices in steps, and in checkpoints as all others do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oxidion._core.reserve import Reserve, zeros
from oxidion._dist import collectives
from oxidion._dist.comm import Groups, as_state, full, local
from oxidion._oxidion import LayoutError

Places = tuple[tuple[int, int, int, int], ...]


@dataclass
class Entry:
    """A state of a parameter, as its owners have it.

    Attributes:
        places: the blocks that this process owns: offset, rows, columns, distance of rows in the whole state.
        held: their elements, one block after the other.
        shown: what a checkpoint gets in its place, until the next step.
        version: of ``shown`` when it was made.
    """

    places: Places
    held: Tensor
    shown: Tensor | None = None
    version: int = 0

    def is_unchanged(self, value: object) -> bool:
        """True for what a checkpoint got, as it was then."""
        return value is self.shown and self.shown is not None and local(self.shown)._version == self.version


class Owned:
    """The states of an optimizer that lie with the owners of matrices, by parameter and key."""

    def __init__(self, entries: Iterable[tuple[Tensor, str, Entry]] = ()) -> None:
        self._entries: dict[Tensor, dict[str, Entry]] = {}
        self._is_fresh = True
        for param, key, entry in entries:
            self._entries.setdefault(param, {})[key] = entry

    def __iter__(self) -> Any:
        """Parameter, key and entry of each."""
        return ((param, key, entry) for param, own in self._entries.items() for key, entry in own.items())

    def __bool__(self) -> bool:
        """True where there are such states."""
        return bool(self._entries)

    def stepped(self) -> None:
        """Notes that a step has written the states: they are no zeros any more."""
        self._is_fresh = False

    def away(self, state: Mapping[Any, Mapping[str, Any]]) -> str | None:
        """The key of a state that lies with owners now."""
        found = (key for param, key, entry in self if state.get(param, {}).get(key) is entry.held)
        return next(found, None)

    def twin(self, twins: Mapping[Tensor, Tensor], state: Mapping[Tensor, Mapping[str, Any]]) -> Owned:
        """The same for copies of the parameters, whose states are in ``state``."""
        copies = []
        for param, key, entry in self:
            value = state.get(twins.get(param, param), {}).get(key)
            if isinstance(value, Tensor) and entry.shown is None:
                copies.append((twins[param], key, Entry(entry.places, value)))
            elif isinstance(value, Tensor):
                copies.append((twins[param], key, Entry(entry.places, entry.held.clone(), value)))
                copies[-1][2].version = local(value)._version
        twin = Owned(copies)
        twin._is_fresh = self._is_fresh
        return twin

    def bound(
        self,
        value: Tensor | None,
        of: tuple[str, Tensor, str],
        spec: Mapping[str, Any],
        reserve: Reserve | None,
    ) -> Tensor:
        """The state as a step works on it; new ones begin with zeros.

        Args:
            value: what is there.
            of: name of the parameter, the parameter, and the key of the state.
            spec: that the plan asks for.
            reserve: memory that was asked for ahead.

        Raises:
            LayoutError: for one that lies otherwise, or that belongs to other blocks.
        """
        name, param, key = of
        places: Places = tuple(spec["owned"][0])
        entry = self._entries.get(param, {}).get(key)
        if value is None:
            own = local(param)
            dtype = getattr(torch, spec["dtype"])
            held = zeros([_numel(places)], dtype, own.device, reserve, pin=own.is_pinned())
            entry = self._entries.setdefault(param, {})[key] = Entry(places, held)
        elif (
            entry is None or entry.places != places or not (value is entry.held or entry.is_unchanged(value))
        ):
            raise LayoutError(
                f"{name}: state {key!r} lies otherwise than the parameter asks for (owned_states). Call "
                "synchronize_for_checkpoint() on all ranks before the change, and load "
                "load_state_dict(state_dict()) after it"
            )
        entry.shown = None
        return entry.held

    def deal(self, value: Tensor, param: Tensor, key: str, spec: Mapping[str, Any]) -> Tensor:
        """A state that was loaded, with its owners; one of another shape is left as it is.

        Every rank has to call this.
        """
        if value.shape != torch.Size(spec["shape"]):
            return value
        places: Places = tuple(spec["owned"][0])
        own, whole = local(param), full(value).detach()
        held = zeros([_numel(places)], value.dtype, own.device, pin=own.is_pinned())
        _exchange(held, whole.to(own.device).contiguous(), places, out=False)
        self._entries.setdefault(param, {})[key] = Entry(places, held)
        self._is_fresh = False
        return held

    def show(self, param: Tensor, key: str, spec: Mapping[str, Any], groups: Groups | None) -> Tensor | None:
        """The state for a checkpoint, laid out as its parameter is; None where it lies so already.

        Every rank has to call this. Without groups only states are shown that no step has written.
        """
        entry = self._entries.get(param, {}).get(key)
        if entry is None or entry.shown is not None or (groups is None and not self._is_fresh):
            return None
        if groups is None or self._is_fresh:
            shape = [length for _, length in spec["spans"]]
            part = torch.zeros(shape, dtype=entry.held.dtype, device=entry.held.device)
        else:
            part = collected(entry.held, spec, groups, entry.places)
            for dim, (start, length) in enumerate(spec["spans"]):
                part = part.narrow(dim, start, length)
        entry.shown = as_state(part.clone(memory_format=torch.contiguous_format), param, spec)
        entry.version = local(entry.shown)._version
        return entry.shown


def collected(held: Tensor, spec: Mapping[str, Any], groups: Groups, places: Places | None = None) -> Tensor:
    """All of a state that lies with owners, on every rank of the parameter; each of them has to call this.

    Args:
        held: the blocks of this process.
        spec: of the state.
        groups: by the ranks of an axis.
        places: of the blocks, where they are not those of ``spec``.
    """
    own, axes = spec["owned"]
    wide = torch.float64 if held.dtype == torch.float64 else torch.float32
    whole = torch.zeros(spec["shape"], dtype=wide, device=held.device)
    _exchange(held, whole, tuple(own) if places is None else places, out=True)
    # All but one of them have a zero: the sum is exact.
    collectives.add(whole, [groups[tuple(ranks)] for ranks in axes])
    return whole.to(held.dtype)


def _numel(places: Places) -> int:
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
