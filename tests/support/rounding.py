"""Rounding at random: between which numbers, and what the random bits depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

STATES_TAG = 16
"""The tag of the first state of a parameter; the others follow in their order."""
WORD = 1 << 32


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


def rounded(
    x: Tensor, random: Tensor, dtype: torch.dtype = torch.bfloat16, *, stays_positive: bool = False
) -> Tensor:
    """Float32 numbers in 16 bits: away from zero where share of the way and random number are 1 or more.

    ``stays_positive``: what is not 0 becomes the smallest number at least.
    """
    digits, least, cut = (7, -126, 16) if dtype == torch.bfloat16 else (10, -14, 13)
    size = x.float().abs().double()
    if dtype == torch.float16:
        # The bits of the smallest ones are cut off from 2⁻³⁷ on.
        size = torch.where(size < 2.0**least, torch.round(size * 2.0**37) * 2.0**-37, size)
    exponent = torch.frexp(size)[1].clamp_min(least + 1) - 1 - digits
    unit = torch.ldexp(torch.ones_like(size), exponent)
    whole = torch.floor(size / unit)
    up = size / unit - whole + (random >> 16 - cut).double() * 2.0**-cut >= 1.0
    found = torch.where(up, whole + 1.0, whole) * unit
    if stays_positive:
        found = torch.where(x != 0, found.clamp_min(2.0 ** (least - digits)), found)
    found = torch.where(x.isfinite(), found, x.double().abs()).float().copysign(x.float())
    return found.to(dtype)


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """One block of Philox4x32-10, in whole numbers of any size."""
    (a, b, c, d), (k, j) = counter, key
    for _ in range(10):
        one, two = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = two // WORD ^ b ^ k, two % WORD, one // WORD ^ d ^ j, one % WORD
        k, j = (k + 0x9E3779B9) % WORD, (j + 0xBB67AE85) % WORD
    return [a, b, c, d]


def key_of(seed: int, stream: int, step: int, tag: int) -> tuple[int, int]:
    """The key of the random numbers of a parameter in a step, and that of one of its tensors."""
    counter = [stream % WORD, stream // WORD, step % WORD, step // WORD]
    first, _, _, last = philox(counter, [seed % WORD, seed // WORD])
    return first, last ^ tag


def word(at: Any, key: Sequence[int]) -> Any:
    """A word of random bits by its number: a hash of it; numbers of 64 bits, or an array of such."""
    x = (at % WORD + key[0]) % WORD
    x = (x ^ x // 2**17) * 0xED5AD4BB % WORD
    x = (x + key[1] + at // WORD * 0x9E3779B9) % WORD
    x = (x ^ x // 2**11) * 0xAC4C1B51 % WORD
    x = (x ^ x // 2**15) * 0x31848BAB % WORD
    return x ^ x // 2**14


def random_numbers(key: Sequence[int], places: Sequence[int] | np.ndarray) -> Tensor:
    """The 16 random bits of each place: two places have a word."""
    where = np.asarray(places, dtype=np.uint64)
    half = where % 2
    return torch.from_numpy((word(where // 2, key) >> 16 * half & 0xFFFF).astype(np.int64))


def of_state(optimizer: Any, param: Tensor, key: str, *, seed: int = 0, step: int | None = None) -> Tensor:
    """The random bits by which a state is rounded in a step, of all its elements; else in the last step."""
    params = [own for group in optimizer.param_groups for own in group["params"]]
    at = next(at for at, own in enumerate(params) if own is param)
    (group,) = [own for own in optimizer.param_groups if any(one is param for one in own["params"])]
    state = optimizer.state[param]
    tag = STATES_TAG + list(state).index(key)
    number = group["step"] if step is None else step
    value = state[key]
    found = key_of(seed, optimizer.plan().streams[at], number, tag)
    return random_numbers(found, np.arange(value.numel())).view(value.shape)


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
