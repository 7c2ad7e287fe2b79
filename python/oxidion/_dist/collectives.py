"""Collectives over process groups: those of a plan, and the small ones around a step."""

from __future__ import annotations

import atexit
import importlib
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from oxidion._dist.comm import Groups, Ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


def bind(transfers: Sequence[Mapping[str, Any]], arena: Tensor, groups: Groups) -> list[Callable[[], Work]]:
    """One function without arguments for each transfer of a plan: it starts the collective.

    Args:
        transfers: ``Plan.transfers``.
        arena: the workspace in which the buffers lie.
        groups: process groups by ranks.

    Raises:
        ValueError: for a process group that cannot exchange memory of the arena's device.
    """
    return [_bound(transfer, arena.view(torch.uint8), groups) for transfer in transfers]


def _bound(transfer: Mapping[str, Any], memory: Tensor, groups: Groups) -> Callable[[], Work]:
    dist: Any = torch.distributed
    ranks: Ranks = tuple(transfer["ranks"])
    (at, count), (to, room) = transfer["send"], transfer["recv"]
    send, recv = memory[at : at + count], memory[to : to + room]
    if transfer["kind"] == "all_reduce":
        value = _lent(send.view(getattr(torch, transfer["dtype"])))
        lines = [groups[ranks]] if ranks in groups else _along(ranks, transfer["lines"], groups)
        for line in lines:
            check_backend(line, ranks, memory.device)
        return lambda: _summed(value, [_step_group(line, value.device) for line in lines])
    group = groups[ranks]
    check_backend(group, ranks, memory.device)
    send, recv = _lent(send), _lent(recv)
    if transfer["kind"] == "all_gather":
        return lambda: dist.all_gather_into_tensor(
            recv, send, group=_step_group(group, recv.device), async_op=True
        )
    out, into = transfer["recv_bytes"], transfer["send_bytes"]
    # A reduce-scatter is an all-to-all too: the owner adds what comes in the order of the ranks, so that sums
    # do not depend on timing or on the backend.
    return lambda: dist.all_to_all_single(
        recv, send, out, into, group=_step_group(group, recv.device), async_op=True
    )


_LENT: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def _lent(tensor: Tensor) -> Tensor:
    """A tensor that collectives are given. On CPUs the process outlives their hold on it."""
    if tensor.device.type == "cpu":
        _LENT[id(tensor)] = tensor
    return tensor


@atexit.register
def give_back(patience: float = 1.0) -> None:
    """Waits, at most for ``patience`` seconds, until no thread of gloo holds a tensor that was lent.

    Such a thread lets go of a tensor a moment after the collective has ended, and takes the GIL to do so. In
    an interpreter that is being torn down that ends the process with SIGABRT.
    """
    end = time.monotonic() + patience
    while any(tensor._use_count() > 1 for tensor in cast("Any", _LENT).values()) and time.monotonic() < end:
        time.sleep(1e-3)


def check_backend(group: ProcessGroup, ranks: Ranks, device: torch.device) -> None:
    """Refuses a group without a backend for a device; on a CUDA device gloo too, which lacks collectives.

    Parameters that were offloaded lie on the CPU, whatever device their mesh is for.

    Raises:
        ValueError: that says which backends to take.
    """
    own: Any = group
    kinds = [kind.type for kind in own._device_types]
    backend = own._get_backend(device).name() if device.type in kinds else None
    if kinds and (backend is None or (device.type == "cuda" and backend == "gloo")):
        raise ValueError(
            f"the process group of the ranks {list(ranks)} cannot exchange tensors on {device.type}: it has "
            f"{own._get_backend_name() if backend is None else backend!r}. For "
            f"{'CUDA devices' if device.type == 'cuda' else 'parameters that are offloaded to the CPU'} use "
            "init_process_group('cpu:gloo,cuda:nccl')"
        )


def _along(ranks: Ranks, lines: Sequence[Sequence[int]], groups: Groups) -> list[ProcessGroup]:
    """The groups of several axes together: one, if it is that of all processes, else one for each axis.

    A group of its own could be made in the middle of training only if all ranks had made equally many before.
    """
    world = torch.distributed.group.WORLD
    if world is not None and len(ranks) == world.size():
        return [world]
    return [groups[tuple(line)] for line in lines]


def _summed(value: Tensor, groups: Sequence[ProcessGroup]) -> Work:
    """Starts the sum over the last group, after those over the others."""
    dist: Any = torch.distributed
    for group in groups[:-1]:
        dist.all_reduce(value, group=group)
    return cast("Work", dist.all_reduce(value, group=groups[-1], async_op=True))


_own_groups: dict[str, tuple[ProcessGroup, ProcessGroup]] = {}
"""By use the default process group, and a group of the same ranks that nothing else uses."""


def own_group(use: str) -> ProcessGroup | None:
    """A group of gloo of all ranks that has one use; None where ``torch.distributed`` is not initialized.

    The first call makes it, on all ranks together. Where the default group exchanges tensors of the host by
    something else than gloo it is the default group.
    """
    dist, world = cast("Any", torch.distributed), cast("Any", everyone())
    if world is None:
        return None
    if _own_groups.get(use, (None,))[0] is not world:
        host = torch.device("cpu")
        is_gloo = host in world._device_types and world._get_backend(host).name() == "gloo"
        ranks = list(range(world.size()))
        # Not with `use_local_synchronization`: torch names such a group by how many groups a rank is in.
        # Where that differs among ranks they wait for each other forever.
        made = dist.new_group(ranks, backend="gloo") if is_gloo else world
        _own_groups[use] = world, made
    return _own_groups[use][1]


def _step_group(group: ProcessGroup, device: torch.device) -> ProcessGroup:
    """The group over which tensors of a device are exchanged: for those of the host never the default one.

    A thread that saves a checkpoint (``dcp.async_save``) exchanges messages over the default group while
    steps go on. Messages of two threads over one group of gloo come in another order on each rank, and all
    of them wait forever.
    """
    if device.type != "cpu" or group is not everyone():
        return group
    return cast("ProcessGroup", own_group("steps"))


def start_saving(state: dict[str, Any], folder: Path, group: ProcessGroup | None) -> Future[Any]:
    """Copies what `dcp.save` takes, and has a thread write it to a folder that all ranks of a group share."""
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    started: Future[Any] = dcp.async_save(state, checkpoint_id=folder, process_group=group)
    return started


def my_rank() -> int:
    """The global rank of this process."""
    return torch.distributed.get_rank()


def everyone() -> ProcessGroup | None:
    """The group of all ranks; None where ``torch.distributed`` is not initialized."""
    dist: Any = torch.distributed
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def largest(numbers: Tensor, group: ProcessGroup) -> Tensor:
    """Replaces numbers by the largest of each over the ranks of a group."""
    own = _step_group(group, numbers.device)
    torch.distributed.all_reduce(_lent(numbers), op=torch.distributed.ReduceOp.MAX, group=own)
    return numbers


def needs_device(group: ProcessGroup) -> bool:
    """True where numbers of the host go through a device to be compared over a group: NCCL alone."""
    kinds = [kind.type for kind in cast("Any", group)._device_types]
    return bool(kinds) and "cpu" not in kinds


def host(group: ProcessGroup) -> torch.device:
    """The device on which numbers of the host are compared over a group."""
    kinds: list[torch.device] = cast("Any", group)._device_types
    return kinds[0] if needs_device(group) else torch.device("cpu")


def largest_of(numbers: Sequence[int], group: ProcessGroup) -> list[int]:
    """The largest of each number over the ranks of a group. Where that takes a device, the host waits."""
    values: list[int] = largest(torch.tensor(numbers, device=host(group)), group).tolist()
    return values


def sums_of(numbers: Sequence[int], group: ProcessGroup) -> list[int]:
    """The sum of each number over the ranks of a group. Where that takes a device, the host waits."""
    values = _lent(torch.tensor(numbers, device=host(group)))
    torch.distributed.all_reduce(values, group=_step_group(group, values.device))
    totals: list[int] = values.tolist()
    return totals


def run_ahead(groups: Iterable[ProcessGroup]) -> bool:
    """True where numbers of the host are added up by CUDA devices alone, for which it need not wait."""
    return all(host(group).type == "cuda" for group in groups)


class Sums:
    """Sums of rows of numbers, each over the ranks of a group; the host does not wait for a device.

    Args:
        rows: one for each group, all of one length.
        carried: how many of the first columns are those of the first row alone, added up over one group after
            the other.
        groups: process groups, all with the same kind of device.
    """

    def __init__(self, rows: Sequence[Sequence[int]], carried: int, groups: Sequence[ProcessGroup]) -> None:
        own, where = torch.tensor(rows), host(groups[0])
        self._done: torch.cuda.Event | None = None
        if where.type == "cpu":
            self._totals = _chained(own, carried, groups)
            return
        # On a separate stream, so that neither this nor the steps' work waits for the other.
        stream = _stream_of(where)
        with torch.cuda.stream(stream):
            there = _chained(pinned(own).to(where, non_blocking=True), carried, groups)
            self._totals = pinned(own).copy_(there, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(stream)

    def read(self) -> list[list[int]]:
        """The sums; the host waits only where the device is not that far yet."""
        if self._done is not None and not self._done.query():  # type: ignore[no-untyped-call]
            self._done.synchronize()
        totals: list[list[int]] = self._totals.tolist()
        return totals


def pinned(numbers: Tensor) -> Tensor:
    """A copy of a tensor of the host which a device copies without the host."""
    return numbers.pin_memory()


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _chained(rows: Tensor, carried: int, groups: Sequence[ProcessGroup]) -> Tensor:
    for at, group in enumerate(groups):
        if at:
            rows[at, :carried] = rows[at - 1, :carried]
        torch.distributed.all_reduce(_lent(rows[at]), group=_step_group(group, rows.device))
    return rows


def all_gather_object(what: Any, group: ProcessGroup) -> list[Any]:
    """Gathers an object of every rank of a group, in the order of the ranks."""
    gathered: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(gathered, what, group=_step_group(group, host(group)))
    return gathered


def add(tensor: Tensor, groups: Iterable[ProcessGroup]) -> None:
    """Replaces a local tensor by its sum over the groups, one after the other."""
    lent = _lent(tensor)
    for group in groups:
        torch.distributed.all_reduce(lent, group=_step_group(group, lent.device))


def average(tensors: Sequence[Tensor], groups: Iterable[ProcessGroup]) -> None:
    """Replaces local tensors by their means over the groups, in flat pieces of at most 64 MB."""
    pieces: list[list[Tensor]] = []
    for tensor in tensors:
        if pieces and pieces[-1][0].dtype == tensor.dtype and sum(t.nbytes for t in pieces[-1]) < 64 << 20:
            pieces[-1].append(tensor)
        else:
            pieces.append([tensor])
    for piece in pieces:
        flat = _lent(torch.cat([tensor.reshape(-1) for tensor in piece]))
        for group in groups:
            torch.distributed.all_reduce(flat.div_(group.size()), group=_step_group(group, flat.device))
        for tensor, mean in zip(piece, torch.split(flat, [t.numel() for t in piece]), strict=True):
            tensor.copy_(mean.view_as(tensor))
