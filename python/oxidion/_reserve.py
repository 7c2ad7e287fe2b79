"""Memory for the states of an optimizer, asked of the system while the first gradients are computed.

The system clears a page when it is written first, which for AdamW takes longer than a step. A thread of its
own has that done between the construction of an optimizer and its first step.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

LARGE = 1 << 21
"""Bytes from which memory is worth a mapping of its own: a huge page."""

SHARE = 4
"""One part in so many of the memory that is free is asked for ahead at most."""

STRETCH = 1 << 23
"""Bytes that the thread asks for at once: nobody waits for it longer than these take."""

WIPE_ON_FORK, KEEP_ON_FORK, POPULATE_WRITE = 18, 19, 23
"""``madvise`` of Linux; the last one, of 5.14, writes nothing that shows."""

CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Where the limit of a container is, and what of it is used."""


def zeros(
    shape: list[int], dtype: torch.dtype, device: torch.device, reserve: Reserve | None = None
) -> Tensor:
    """Zeros. Large ones on the CPU are mapped by the system, in huge pages, when they are written or before.

    ``torch.zeros`` writes them here, a page of 4 KiB after the other, which takes AdamW longer than a step.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = reserve.take(size) if reserve is not None else None
    return torch.frombuffer(_mapped(size) if memory is None else memory, dtype=dtype).view(shape)


def _mapped(size: int) -> mmap.mmap:
    """Bytes of a mapping of their own, zeros that have no memory yet."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Reserve:
    """Mappings of given sizes that a thread has the system fill with zeros until they are dropped.

    A process that is forked gets them empty: pages that two processes share are copied when one writes them.
    """

    outstanding: ClassVar[int] = 0
    """Bytes that this process has asked for ahead and not used yet."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self._mappings: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        self._dropped = threading.Event()
        ahead = []
        room = _free_bytes() // SHARE - Reserve.outstanding
        for size in sizes:
            if size < LARGE or size > room or not hasattr(mmap, "MADV_HUGEPAGE"):
                continue
            memory = _mapped(size)
            memory.madvise(WIPE_ON_FORK)  # Linux 4.14; an older one does not fill mappings ahead either
            room -= size
            Reserve.outstanding += size
            self._mappings[size].insert(0, memory)
            ahead.append(torch.frombuffer(memory, dtype=torch.uint8))
        self.thread = threading.Thread(target=_populate, args=(ahead, self._dropped), daemon=True)
        if ahead:
            self.thread.start()

    def take(self, size: int) -> mmap.mmap | None:
        """A mapping of this size, in the order in which they were asked for; None where there is none."""
        if not self._mappings[size]:
            return None
        Reserve.outstanding -= size
        memory = self._mappings[size].pop()
        try:
            memory.madvise(KEEP_ON_FORK)
        except OSError:  # a child would find zeros where its parent has numbers
            return None
        return memory

    def __del__(self) -> None:
        self._dropped.set()
        Reserve.outstanding -= sum(size * len(left) for size, left in self._mappings.items())


def _free_bytes() -> int:
    """Memory that this process may take and nobody else uses; 0 where the system does not say."""
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
