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

import torch
from torch import Tensor

LARGE = 1 << 21
"""Bytes from which memory is worth a mapping of its own: a huge page."""

SHARE = 4
"""One part in so many of the memory that is free is asked for ahead at most."""

STRETCH = 1 << 23
"""Bytes that the thread asks for at once: nobody waits for it longer than these take."""

POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux 5.14, which writes nothing that shows."""


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
    return (_mapped(size) if memory is None else memory).view(dtype).view(shape)


def _mapped(size: int) -> Tensor:
    """Bytes of a mapping of their own, zeros that have no memory yet."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Reserve:
    """Mappings of given sizes that a thread has the system fill with zeros until they are dropped."""

    def __init__(self, sizes: Iterable[int]) -> None:
        free = _free_bytes() // SHARE
        self._mappings: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._dropped = threading.Event()
        ahead = []
        for size in sizes:
            free -= size
            if size < LARGE or free < 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
                continue
            ahead.append(_mapped(size))
            self._mappings[size].insert(0, ahead[-1])
        if ahead:
            threading.Thread(target=_populate, args=(ahead, self._dropped), daemon=True).start()

    def take(self, size: int) -> Tensor | None:
        """A mapping of this size, in the order in which they were asked for; None where there is none."""
        of_size = self._mappings[size]
        return of_size.pop() if of_size else None

    def __del__(self) -> None:
        self._dropped.set()


def _free_bytes() -> int:
    """Memory of the machine that nothing uses; 0 where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
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
