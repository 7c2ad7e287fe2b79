"""What ranks do in the tests of the processes themselves: answer, raise, end, or wait for ever."""

from __future__ import annotations

import os
import time

import torch.distributed as dist


def processes() -> tuple[int, int, int]:
    """Rank, number of ranks and process of each."""
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def ends(code: int) -> None:
    """The last rank ends while the others wait for it."""
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(code)
    dist.barrier()


def hangs() -> None:
    """The last rank does not come to where the others are."""
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(600)


def raises() -> None:
    """The first rank raises while the others wait for it."""
    if dist.get_rank() == 0:
        raise ValueError("the first rank has had enough")
    dist.barrier()


def raises_everywhere() -> None:
    """All ranks raise, and can work on."""
    raise ValueError(f"rank {dist.get_rank()} has had enough")
