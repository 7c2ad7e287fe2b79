"""States that ranks have parts of in steps and that lie in checkpoints as all others do.

They lie with the owners of matrices, or are sums to which every rank adds.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oxidion._core.reserve import zeros
from oxidion._dist import collectives
from oxidion._dist.comm import Groups, as_state, full, local
from oxidion._oxidion import LayoutError

Places = Sequence[tuple[int, int, int, int]]
"""Of blocks: offset, rows, columns and distance of rows in the whole state."""
State = Mapping[Any, dict[str, Any]]
"""State of an optimizer, by parameter."""


@dataclass
class Entry:
    """A state of a parameter, as ranks have it in steps.

    Attributes:
        spec: of the plan that says which. Its ``owned`` has the blocks that this process owns or adds to, the
            ranks of each axis over which they are added up, whether the state is a sum, and whether the
            elements of one that was loaded belong here.
        held: their elements, one block after the other.
        shown: what a checkpoint gets in its place, until the next step.
        version: of ``shown`` when it was made.
    """

    spec: Mapping[str, Any]
    held: Tensor
    shown: Tensor | None = None
    version: int = 0

    def is_at_hand(self, value: object, spec: Mapping[str, Any]) -> bool:
        """True where ``held`` is the state with this value, for a plan with the same owners."""
        unchanged = value is self.shown and local(value)._version == self.version  # type: ignore[arg-type]
        return (value is self.held or unchanged) and spec["owned"] == self.spec["owned"]


class Owned:
    """The states of an optimizer that ranks have parts of, by parameter and key.

    Attributes:
        is_fresh: whether no step has written them: all are zeros.
    """

    def __init__(self, entries: Iterable[tuple[Tensor, str, Entry]] = (), *, is_fresh: bool = True) -> None:
        self._entries: dict[Tensor, dict[str, Entry]] = {}
        self.is_fresh = is_fresh
        for param, key, entry in entries:
            self._entries.setdefault(param, {})[key] = entry

    def __iter__(self) -> Iterator[tuple[Tensor, str, Entry]]:
        """Parameter, key and entry of each."""
        return ((param, key, entry) for param, own in self._entries.items() for key, entry in own.items())

    def __bool__(self) -> bool:
        """True where there are such states."""
        return bool(self._entries)

    @property
    def has_owners(self) -> bool:
        """True where there are states of which other parameters may change who has them: not sums."""
        return any(not entry.spec["owned"][2] for _, _, entry in self)

    def away(self, state: State) -> str | None:
        """The key of a state that is in parts now."""
        found = (key for param, key, entry in self if state.get(param, {}).get(key) is entry.held)
        return next(found, None)

    def twin(self, twins: Mapping[Tensor, Tensor], state: State) -> Owned:
        """The same for copies of the parameters, whose states are in ``state``."""
        copies = []
        for param, key, entry in self:
            value = state.get(twins.get(param, param), {}).get(key)
            if isinstance(value, Tensor) and entry.shown is None:
                copies.append((twins[param], key, Entry(entry.spec, value)))
            elif isinstance(value, Tensor):
                twin = Entry(entry.spec, entry.held.clone(), value, local(value)._version)
                copies.append((twins[param], key, twin))
        return Owned(copies, is_fresh=self.is_fresh)

    def take(self, held: Tensor, param: Tensor, key: str, spec: Mapping[str, Any]) -> Tensor:
        """A new state, whose blocks of this process are ``held``."""
        self._entries.setdefault(param, {})[key] = Entry(spec, held)
        return held

    def bound(self, value: Tensor, of: tuple[str, Tensor, str], spec: Mapping[str, Any]) -> Tensor:
        """The state as a step works on it, of any parameter.

        Args:
            value: what is there.
            of: name of the parameter, the parameter, and the key of the state.
            spec: that the plan asks for.

        Raises:
            LayoutError: for one that belongs to other owners than the plan's.
        """
        name, param, key = of
        entry = self._entries.get(param, {}).get(key)
        if spec["owned"] is None and (entry is None or value is not entry.held):
            if entry is not None:  # steps write what is there from now on
                del self._entries[param][key]
            return value
        if entry is None or not entry.is_at_hand(value, spec):
            raise LayoutError(
                f"{name}: state {key!r} lies otherwise than the step asks for, as parameters were added, "
                "frozen or unfrozen, or owned_states or sides have changed. Call "
                "synchronize_for_checkpoint() and load_state_dict(state_dict()) on all ranks"
            )
        entry.shown = None
        return entry.held

    def deal(self, value: Tensor, param: Tensor, key: str, spec: Mapping[str, Any]) -> Tensor:
        """A state that was loaded, where its elements belong; one of another shape is left as it is.

        Every rank has to call this.
        """
        if value.shape != torch.Size(spec["shape"]):
            return value
        (places, _, _, takes), own, whole = spec["owned"], local(param), full(value).detach()
        held = zeros([numel(places)], value.dtype, own.device, pin=own.is_pinned())
        if takes:
            _exchange(held, whole.to(own.device).contiguous(), places, out=False)
        self.is_fresh = False
        return self.take(held, param, key, spec)

    def show(self, state: State, groups: Groups, of: Container[int] | None = None) -> None:
        """Has states lie as their parameters do, until the next step, so that a checkpoint may have them.

        Every rank has to call this, but for states that no step has written.

        Args:
            state: of the optimizer, changed in place.
            groups: by the ranks of an axis.
            of: the ``id`` of each parameter whose states are wanted; None are all.
        """
        with torch.inference_mode(mode=False), torch.no_grad():
            for param, key, entry in self:
                is_wanted = of is None or id(param) in of
                if is_wanted and state.get(param, {}).get(key) is entry.held:
                    shown = self._laid_out(param, entry, groups)
                    entry.version, entry.shown = local(shown)._version, shown
                    state[param][key] = shown

    def _laid_out(self, param: Tensor, entry: Entry, groups: Groups) -> Tensor:
        """A state as its parameter is laid out."""
        spec, held = entry.spec, entry.held
        if self.is_fresh:
            part = torch.zeros([length for _, length in spec["spans"]], dtype=held.dtype, device=held.device)
        else:
            part = collected(held, spec, groups)
            places, _, is_sum, takes = spec["owned"]
            if is_sum:  # steps go on as from the checkpoint
                held.zero_()
                if takes:
                    _exchange(held, part, places, out=False)
            for dim, (start, length) in enumerate(spec["spans"]):
                part = part.narrow(dim, start, length)
        return as_state(part.clone(memory_format=torch.contiguous_format), param, spec)


def collected(held: Tensor, spec: Mapping[str, Any], groups: Groups) -> Tensor:
    """All of a state that is in parts, on every rank of the parameter; each of them has to call this."""
    places, axes, _, _ = spec["owned"]
    wide = torch.float64 if held.dtype == torch.float64 else torch.float32
    whole = torch.zeros(spec["shape"], dtype=wide, device=held.device)
    _exchange(held, whole, places, out=True)
    # Of what lies with owners all but one have a zero: the sum is exact.
    collectives.add(whole, [groups[tuple(ranks)] for ranks in axes])
    return whole.to(held.dtype)


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
