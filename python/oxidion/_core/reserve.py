"""Memory for the states of an optimizer, asked of the system while the first gradients are computed.

The system clears a page when it is written first, which for AdamW takes longer than a step. A thread of its
own has that done between the construction of an optimizer and its first step.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import mmap
import os
import threading
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate, count
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

LARGE = 1 << 21
"""Bytes from which memory is worth a mapping of its own: a huge page. Smaller states share one."""

Like = tuple[tuple[int, ...], torch.dtype]

LINE = 64
"""Bytes at whose multiples the parts of a shared mapping begin."""

PAGE, STAGGER = 4096, 7 * LINE
"""Size of a page, and bytes by which the starts of mappings in their pages differ. A step works on several
mappings at once: with equal starts they would compete for the same few sets of the first-level cache."""

_mappings = count()

SHARE = 4
"""Divisor of the free memory: at most that fraction of it is requested ahead."""

STRETCH = 1 << 23
"""Bytes that the thread requests at once: no caller waits for it longer than these take."""

WIPE_ON_FORK, KEEP_ON_FORK, POPULATE_WRITE = 18, 19, 23
"""``madvise`` of Linux; the last one, of 5.14, writes nothing that shows."""

CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with the limit of a container's memory, and with what of it is used."""


_filling: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()
"""Threads that were started, and what ends each."""


def zeros(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    reserve: Reserve | None = None,
    *,
    pin: bool = False,
) -> Tensor:
    """Zeros, of what ``reserve`` has or new. Large ones on the CPU are mapped, in huge pages, when written.

    ``torch.zeros`` writes them here, a page of 4 KiB after the other, which takes AdamW longer than a step.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        device: of the tensor.
        reserve: memory that was asked for ahead.
        pin: whether the tensor is to be in pinned memory of the host; where there is none, it is not.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    locked = empty_pinned(shape, dtype) if pin else None
    if locked is not None:
        return locked.zero_()
    ahead = reserve.take(shape, dtype) if reserve is not None else None
    if ahead is not None:
        return ahead
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    memory, start = _mapped(size)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=start).view(shape)


def empty_pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """A tensor in pinned memory of the host; None, with one warning in a process, where there is none."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        _say_pageable(str(error).partition("\n")[0])
        return None


@cache
def _say_pageable(why: str) -> None:
    warnings.warn(
        f"states of parameters in pinned memory are in pageable memory: no more can be pinned ({why}). "
        "Steps are the same; copies of these states to a device wait for the host",
        stacklevel=2,
    )


def _mapped(size: int) -> tuple[mmap.mmap, int]:
    """A mapping of zeros that have no memory yet, and where in it to begin."""
    start = STAGGER * (1 + next(_mappings) % ((PAGE - 1) // STAGGER))  # torch's own begin at 0 or one line on
    memory = mmap.mmap(-1, start + size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advised(memory, mmap.MADV_HUGEPAGE)  # there are systems without
    return memory, start


def _advised(memory: mmap.mmap, advice: int) -> bool:
    """True where the system took an advice."""
    try:
        memory.madvise(advice)
    except OSError:
        return False
    return True


class Reserve:
    """Tensors of zeros whose memory a thread has the system fill until they are dropped.

    Large ones have a mapping each; the small ones have one together, if it is large, and are tensors with
    storages of their own for all that. A process that is forked gets the mappings empty: pages that two
    processes share are copied when one writes them.
    """

    outstanding: ClassVar[int] = 0
    """Bytes that this process has asked for ahead and not used yet."""

    def __init__(self, wanted: Iterable[tuple[Sequence[int], torch.dtype]]) -> None:
        self._parts: defaultdict[Like, deque[tuple[mmap.mmap, int]]] = defaultdict(deque)
        self._kept: dict[mmap.mmap, bool] = {}
        self._dropped = threading.Event()
        self._left = 0
        ahead, small = [], []
        room = _free_bytes() // SHARE - Reserve.outstanding
        for shape, dtype in wanted:
            size = math.prod(shape) * dtype.itemsize
            if 0 < size <= room and hasattr(mmap, "MADV_HUGEPAGE"):
                room -= size
                if size < LARGE:
                    small.append((tuple(shape), dtype))
                else:
                    ahead.append(self._map([(tuple(shape), dtype)]))
        if sum(math.prod(shape) * dtype.itemsize for shape, dtype in small) >= LARGE:
            ahead.append(self._map(small))
        self.thread = threading.Thread(target=_populate, args=(ahead, self._dropped), daemon=True)
        if ahead:
            self.thread.start()
            _filling[self.thread] = self._dropped

    def _map(self, wanted: list[Like]) -> Tensor:
        """A mapping with room for these, which are listed."""
        counts = [math.prod(shape) for shape, _ in wanted]
        sizes = [many * dtype.itemsize for many, (_, dtype) in zip(counts, wanted, strict=True)]
        *starts, end = accumulate((-(-size // LINE) * LINE for size in sizes), initial=0)
        memory, first = _mapped(end)
        memory.madvise(WIPE_ON_FORK)  # Linux 4.14; an older one does not fill mappings ahead either
        for like, start in zip(wanted, starts, strict=True):
            self._parts[like].append((memory, first + start))
        self._count(sum(sizes))
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _count(self, size: int) -> None:
        self._left += size
        Reserve.outstanding += size

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """One of these, in the order in which they were asked for; None where there is none."""
        own = self._parts[tuple(shape), dtype]
        if not own:
            return None
        memory, start = own.popleft()
        many = math.prod(shape)
        self._count(-many * dtype.itemsize)
        if memory not in self._kept:
            self._kept[memory] = _advised(memory, KEEP_ON_FORK)
        if not self._kept[memory]:  # a child would find zeros where its parent has numbers
            return None
        return torch.frombuffer(memory, dtype=dtype, count=many, offset=start).view(shape)

    def __del__(self) -> None:
        self._dropped.set()
        Reserve.outstanding -= self._left


@atexit.register
def stop() -> None:
    """Ends the threads, each after one ``STRETCH`` at most: at exit their memory is no longer needed.

    A thread that returned to an interpreter in teardown would end the process with SIGABRT.
    """
    running = [*_filling.items()]
    for _, dropped in running:
        dropped.set()
    for thread, _ in running:
        thread.join()


def _free_bytes() -> int:
    """Returns this process's share of the free memory in bytes; 0 where the system does not report it."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = dict(line.split(":") for line in lines)
        free = int(sizes.get("MemAvailable", "0 kB").split()[0]) * 1024
        for limit, used in CGROUPS:
            with contextlib.suppress(OSError, ValueError):  # no such version, or no limit
                free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
        return max(0, free) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return 0


def _populate(mappings: list[Tensor], dropped: threading.Event) -> None:
    """Has the system fill the mappings in order until they are ``dropped`` or it refuses, as old ones do."""
    madvise = ctypes.CDLL(None).madvise  # the one of mmap keeps other threads of the interpreter waiting
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for mapping in mappings:
        start, size = mapping.data_ptr(), mapping.numel()
        for offset in range(0, size, STRETCH):
            if dropped.is_set() or madvise(start + offset, min(STRETCH, size - offset), POPULATE_WRITE):
                return
