"""Forked processes: libtorch's threads stayed with the parent, and waiting for them would never end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from oxidion._oxidion import forget_threads_after_fork

_forked = False


def _forget() -> None:
    global _forked
    _forked = True
    forget_threads_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextmanager
def alone() -> Iterator[None]:
    """Keeps torch's own operations to this thread in a forked process; elsewhere changes nothing."""
    threads = torch.get_num_threads() if _forked else 1
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)
