"""Rounding to bfloat16 at random: between which numbers, and what the random bits depend on."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Run(Protocol):
    """A step of two parameters that are alike: what was rounded of each."""

    def __call__(self, *, seed: int = 0, skip: int = 0) -> list[Tensor]:
        """With a seed, after this many steps that were not taken."""


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 numbers next to float32 numbers, towards zero and away from it; equal where x is one."""
    bits = x.view(torch.int32)
    low = (bits & -65536).view(torch.float32)
    high = ((bits & -65536) + torch.where((bits & 0xFFFF) != 0, 65536, 0).int()).view(torch.float32)
    return low, high


def assert_bits_go_by_seed_parameter_and_step(run: Run) -> None:
    """Assert that they do, and that the number of threads changes none."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, two = run()
        assert not torch.equal(one, two)
        torch.set_num_threads(2)
        assert all(map(torch.equal, (one, two), run()))
        assert not torch.equal(one, run(seed=1)[0])
        assert not torch.equal(one, run(skip=1)[0])
    finally:
        torch.set_num_threads(threads)
