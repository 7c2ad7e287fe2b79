"""The kernel of random normal numbers on the host emulator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .emulator.library import Emulated, KernelFault
from .jobs import TYPES
from .lines import NormalJob, NormalScale, launch, untouched

_, BF16, F32, _ = TYPES
NUMBERS = 4096


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated("normals.cu", tmp_path_factory.mktemp("normals"))


def normals(
    kernels: Emulated, first: int, count: int, dtype: torch.dtype = F32, tag: int = 7
) -> torch.Tensor:
    whole = torch.full((1, count + 16), float("nan"), dtype=dtype)
    out = whole[0, 8 : 8 + count]
    job = NormalJob(out.data_ptr(), (1, 2, 3, tag), first, count, 0, TYPES[dtype])
    launch(kernels, "fill_normals", NormalScale(0.5), [(job, -(-(count + 6) // NUMBERS))])
    assert untouched(out, whole)
    return out.clone()


def test_normals_do_not_depend_on_the_part_and_are_normal(kernels: Emulated) -> None:
    whole = normals(kernels, 0, 3 * NUMBERS + 5)
    for first, count in ((0, 1), (3, 2), (5, NUMBERS), (NUMBERS - 1, 2 * NUMBERS), (7, NUMBERS + 3)):
        assert torch.equal(normals(kernels, first, count), whole[first : first + count])
    assert torch.equal(normals(kernels, 2, 50, BF16), whole[2:52].bfloat16())
    assert not (normals(kernels, 0, 64, tag=8) == whole[:64]).any()
    # Five standard errors of mean and variance; half of a standard normal number.
    assert abs(whole.mean()) < 2.5 / len(whole) ** 0.5
    assert abs(whole.var() - 0.25) < 5 * 0.25 * (2 / len(whole)) ** 0.5


FAULTS = {
    "a part begins at a block of the generator": (
        "4 * block + lane - job.first",
        "4 * block + lane - first * 4",
    ),
    "numbers behind the part are written": ("at < 0 || at >= job.count", "at < 0 || at > job.count"),
    "blocks of the generator are counted twice": (
        "k * THREADS + threadIdx.x",
        "k / 2 * THREADS + threadIdx.x",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault: str, tmp_path: Path) -> None:
    kernels = Emulated("normals.cu", tmp_path / "faulty", [("normals.cu", *FAULTS[fault])])
    with pytest.raises((AssertionError, KernelFault)):
        test_normals_do_not_depend_on_the_part_and_are_normal(kernels)
