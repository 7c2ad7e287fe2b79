"""Sums over 8-bit values and randomly rounded numbers on the host emulator, against float64."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from .emulator.library import Emulated
from .jobs import LAMB, LIVE_LAMB
from .quantized import QUANTIZED_THREADS, Operand, quantized_table
from .test_quantized import BF16, F32, F64, lamb_direction, lamb_moments, operands_of


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated("quantized_sums.cu", tmp_path_factory.mktemp("quantized_sums"))


def summed(
    kernels: Emulated,
    name: str,
    form: str,
    jobs: list[list[Operand]],
    lanes: int = 0,
    count: int = 2,
    scalars: Sequence[float] = LAMB,
) -> Tensor:
    """What the pieces of each job leave, added up."""
    live = torch.tensor(LIVE_LAMB, dtype=F64)
    made, blocks = quantized_table(form, jobs, scalars, [(0.0, 0.0)] * len(jobs), lanes, live)
    partial = torch.full((blocks, count), float("nan"), dtype=F64)
    fields = (("jobs", type(made)), ("partial", ctypes.c_void_p))
    what = type("QuantizedSumJobs", (ctypes.Structure,), {"_fields_": fields})(made, partial.data_ptr())
    assert ctypes.sizeof(what) <= 32764
    kernels.launch(
        f"{name}_quantized_{form}",
        what,
        blocks=blocks,
        threads=QUANTIZED_THREADS,
        shared_bytes=0,
        readable=[],
    )
    ends = [0, *(made.job[i].plain.end for i in range(len(jobs)))]
    return torch.stack([partial[i:j].sum(0) for i, j in pairwise(ends)])


@pytest.mark.parametrize("form", ["many", "wide"])
@pytest.mark.parametrize("kinds", ["ggmv", "xgmv", "xggg", "wgmv", "wggg"])
def test_sums_equal_those_of_the_numbers(kernels: Emulated, kinds: str, form: str) -> None:
    stored = kinds in ("xggg", "wggg")  # moments that are plain numbers are written
    plain = F64 if form == "wide" else F32
    sizes = ((1, 5, 8), (3, 257, 256), (40, 1000, 256), (7, 64, 16))
    jobs = [
        operands_of(kinds, rows, width, block, slice(0, rows * width), plain) for rows, width, block in sizes
    ]
    for operands in jobs if stored else []:
        operands[3].values.abs_()
    before = [[operand.values.clone() for operand in operands] for operands in jobs]
    numbers = [
        [operand.read().to(F64 if form == "wide" else F32) for operand in operands] for operands in jobs
    ]
    found = summed(kernels, "lamb_norms" if stored else "lamb_norms_only", form, jobs)
    for operands, kept, (x, g, m, v), sums in zip(jobs, before, numbers, found, strict=True):
        lamb_moments(g, m, v)
        expected = [y.double().square().sum() for y in (x, lamb_direction(x, m, v))]
        torch.testing.assert_close(
            sums, torch.stack(expected), rtol=1e-5 if form == "many" else 1e-12, atol=0
        )
        for n, (operand, was) in enumerate(zip(operands, kept, strict=True)):
            if stored and n >= 2:
                torch.testing.assert_close(operand.values, (m, v)[n - 2], rtol=1e-6, atol=1e-7)
            else:
                assert torch.equal(operand.values, was), f"operand {n} was written"


@pytest.mark.parametrize("form", ["many", "wide"])
def test_quantized_momentum_leaves_the_squares_of_its_update(kernels: Emulated, form: str) -> None:
    plain = F64 if form == "wide" else BF16
    sizes = ((1, 5, 8), (3, 257, 256), (7, 64, 16))
    jobs = [operands_of("gmg", *size, slice(0, size[0] * size[1]), plain) for size in sizes]
    numbers = [[operand.read().double() for operand in operands] for operands in jobs]
    found = summed(kernels, "momentum_squares", form, jobs, count=1, scalars=(0.9, 2.0, 1.0, *[0.0] * 9))
    for (g, m, _), (_, quantized, u), total in zip(numbers, jobs, found, strict=True):
        m = 0.9 * m + 2 * g
        torch.testing.assert_close(u.values.double(), 0.9 * m + 2 * g, rtol=2.0**-8, atol=1e-6)
        assert float((quantized.read().double() - m).norm() / m.norm()) < 0.02
        torch.testing.assert_close(total[0], u.values.double().square().sum(), rtol=1e-12, atol=0)


def test_sums_of_any_number_of_threads_to_a_block_are_close(kernels: Emulated) -> None:
    jobs = [operands_of("ggmv", 9, 300, 64, slice(0, 2700), BF16)]
    each = [summed(kernels, "lamb_norms_only", "many", jobs, lanes) for lanes in (4, 8, 16, 32)]
    for one in each[1:]:
        torch.testing.assert_close(one, each[0], rtol=1e-12, atol=0)
