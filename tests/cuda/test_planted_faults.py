"""The emulator notices faults: each edit of a source has to fail at least one of a few launches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .emulator.library import Edit, Emulated, KernelFault
from .symmetric import Problem, run_mma

MMA_FAULTS: dict[str, tuple[str, str]] = {
    "waits for one stage too few": ("copy_async_wait<STAGES - 2>", "copy_async_wait<STAGES - 1>"),
    "reads a stage before all warps filled it": ("__syncthreads();  // the stage is full", "// the stage is full"),
    "fills the stage that is being read": ("load(block + STAGES - 1);", "load(block + STAGES);"),
    "writes the tile over stages in use": ("__syncthreads();  // the finished", "// the finished"),
    "reads a tile that is not finished": (
        "warp_col);\n    __syncthreads();\n    T* out",
        "warp_col);\n    T* out",
    ),
    "counts padding behind the last column": ("min(max(depth - col, 0), CHUNK)", "CHUNK"),
    "swaps halves of the left fragment": ("left_chunk = lane / 16;", "left_chunk = lane / 8 % 2;"),
    "takes rows of right in lane order": ("lane % 8 + (lane / 16) * 8", "lane % 16"),
    "mirror is off by a row": ("lane / 8 * 2 + lane % 2;", "lane / 8 * 2 + 1 - lane % 2;"),
    "mirror is off by a chunk": ("lane % 4 * CHUNK;", "(lane + 1) % 4 * CHUNK;"),
    "reads an addend transposed": (
        "row * p.addend[a].row_stride + col",
        "col * p.addend[a].row_stride + row",
    ),
    "keeps both halves of a diagonal tile": ("if (col > tile_row) continue;", ""),
    "writes columns that do not exist": ("min(size - col, CHUNK)", "CHUNK"),
    "takes a row that does not exist": ("first_row + tile_row < size;", "first_row + tile_row < size + 8;"),
    "takes an address for aligned by its start": ("(start | step)", "start"),
    "ignores live factors": ("factor.live ? *factor.live : factor.value", "factor.value"),
}
MMA_PROBLEMS = (
    Problem(1, 131, 165, addends=1, live=True),
    Problem(1, 270, 70, torch.float16),
    Problem(1, 21, 300, addends=2, odd_rows=True),
    Problem(2, 24, 43, addends=1),
)


def notices(library: Emulated, launches: list[Callable[[Emulated, int], object]]) -> bool:
    """Whether one of the launches fails."""
    for seed in range(3):
        for launch in launches:
            try:
                launch(library, seed)
            except (AssertionError, KernelFault):
                return True
    return False


def edit_of(source: str, old: str, new: str, root: Path) -> Edit:
    """The edit, in the source itself or in what it includes."""
    own = old in (root / source).read_text()
    return (source if own else "common.cuh", old, new)


@pytest.mark.parametrize("fault", MMA_FAULTS)
def test_fault_in_symmetric_mma_is_noticed(fault: str, tmp_path: Path) -> None:
    from .emulator.library import SOURCES

    library = Emulated("symmetric_mma.cu", tmp_path, [edit_of("symmetric_mma.cu", *MMA_FAULTS[fault], SOURCES)])
    launches = [lambda lib, seed, p=problem: run_mma(lib, p, seed) for problem in MMA_PROBLEMS]
    assert notices(library, launches), fault
