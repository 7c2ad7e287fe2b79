"""A process that ends right after a step ends well: no thread of gloo still holds a tensor of its."""

from __future__ import annotations

import threading
import time

import torch
from torch.distributed import HashStore, ProcessGroupGloo

from oxidion._dist import collectives


def lend() -> tuple[torch.Tensor, list[object]]:
    """A tensor of a step, and a collective that holds it."""
    tensor = collectives._lent(torch.ones(8))
    group = ProcessGroupGloo(HashStore(), 0, 1)
    work = group.allreduce([tensor])
    work.wait()
    return tensor, [work]


def test_process_end_waits_for_a_collective_to_release_tensors() -> None:
    tensor, held = lend()
    assert tensor._use_count() > 1
    before = time.monotonic()
    threading.Timer(0.2, held.clear).start()
    collectives.give_back(patience=20)
    assert 0.15 < time.monotonic() - before < 10
    assert tensor._use_count() == 1


def test_end_of_process_does_not_wait_for_ever_nor_without_need() -> None:
    tensor, held = lend()
    before = time.monotonic()
    collectives.give_back(patience=0.1)
    assert 0.1 <= time.monotonic() - before < 5
    held.clear()
    while tensor._use_count() > 1:
        time.sleep(1e-3)
    del tensor
    collectives.give_back(patience=20)
    assert time.monotonic() - before < 10
