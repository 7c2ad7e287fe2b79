"""The CUDA kernels, run on the host by the emulator, against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .compile import UNQUALIFIED_ARRIVE
from .driver import needs_compiler
from .emulator.library import Emulated, KernelFault
from .symmetric import Problem, pairs_of_tiles, run_mma, run_wgmma

pytestmark = needs_compiler
MMA = [
    Problem(1, 128, 64, same=True),
    Problem(2, 136, 200, same=True, addends=1),
    Problem(2, 77, 33, addends=2, odd_rows=True, shift=3),
    Problem(1, 131, 31, torch.float16, addends=1, same=True),
    Problem(3, 40, 129, torch.float16, addends=2, in_place=True, listed=True, live=True),
    Problem(1, 261, 45, addends=2, in_place=True, odd_rows=True),
    Problem(1, 72, 64, same=True, shift=1),
    Problem(1, 200, 8, addends=2, same=True),
    Problem(1, 257, 70, torch.float16, addends=2, odd_addends=True),
    Problem(1, 1, 1, addends=1),
    Problem(1, 40, 1100, addends=2, parts=3),
    Problem(2, 136, 200, torch.float16, same=True, addends=1, in_place=True, parts=2),
    Problem(1, 24, 70, odd_rows=True, parts=4),
]
WGMMA = [
    Problem(1, 256, 64, same=True),
    Problem(2, 200, 72, addends=2, same=True),
    Problem(1, 513, 331, addends=1, in_place=True),
    Problem(3, 65, 130, torch.float16, addends=2, listed=True, live=True),
    Problem(2, 391, 200, torch.float16, addends=1, blocks=5),
    Problem(1, 320, 640, blocks=1),
    Problem(1, 1032, 40, addends=1, blocks=4),
    Problem(3, 130, 392, torch.float16, blocks=2),
    Problem(2, 257, 64, addends=2, odd_addends=True, blocks=2),
    Problem(1, 1, 1),
]
SEEDS = (0, 1)


@pytest.fixture(scope="module")
def symmetric_mma(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated("symmetric_mma.cu", Path(tmp_path_factory.mktemp("symmetric_mma")))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("problem", MMA, ids=str)
def test_symmetric_mma_matches_float64_within_rounding(
    symmetric_mma: Emulated, problem: Problem, seed: int
) -> None:
    run_mma(symmetric_mma, problem, seed)


@pytest.fixture(scope="module")
def symmetric_wgmma(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated("symmetric_wgmma.cu", Path(tmp_path_factory.mktemp("symmetric_wgmma")))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("problem", WGMMA, ids=str)
def test_symmetric_wgmma_matches_float64_within_rounding(
    symmetric_wgmma: Emulated, problem: Problem, seed: int
) -> None:
    run_wgmma(symmetric_wgmma, problem, seed)


def test_both_forms_of_the_arrival_have_the_same_errors(symmetric_wgmma: Emulated, tmp_path: Path) -> None:
    """The emulator has one arrival for both: it orders everything, so no result may depend on the form."""
    first = '#include "swizzle.cuh"\n'
    edit = ("symmetric_wgmma.cu", first, f"#define {UNQUALIFIED_ARRIVE}\n{first}")
    unqualified = Emulated("symmetric_wgmma.cu", tmp_path, [edit])
    for problem in WGMMA[:2]:
        errors = [run_wgmma(library, problem) for library in (symmetric_wgmma, unqualified)]
        assert errors[0] == errors[1], problem


# The second block of the cluster has no tile here, and goes over each stage several times.
SKIPPED = Problem(2, 40, 8192, same=True, blocks=1)
TOGETHER = "__syncwarp();  // no lane still waits for this filling when the next one may begin"


def test_lanes_that_fall_behind_change_nothing(tmp_path: Path) -> None:
    library = Emulated("symmetric_wgmma.cu", tmp_path)
    library.let_lanes_lag()
    for problem in (SKIPPED, *WGMMA):
        run_wgmma(library, problem)


def test_lane_that_is_left_behind_a_skipped_stage_is_found(tmp_path: Path) -> None:
    library = Emulated("symmetric_wgmma.cu", tmp_path, [("symmetric_wgmma.cu", TOGETHER, "")])
    library.let_lanes_lag()
    with pytest.raises(KernelFault, match="deadlock"):
        run_wgmma(library, SKIPPED)


def test_pairs_cover_every_triangle_with_at_most_one_idle_tile() -> None:
    for down in range(1, 70):
        tiles, pairs = down * (down + 1) // 2, pairs_of_tiles(128 * down)
        assert 2 * pairs - tiles in (0, 1), down
        assert pairs == pairs_of_tiles(128 * down - 127)
