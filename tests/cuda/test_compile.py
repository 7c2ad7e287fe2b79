"""Every CUDA source compiles for its architectures, spills nothing and holds the instructions it is made of."""

from __future__ import annotations

import pytest

from .compile import ARCHITECTURES, SOURCES, compiled

PAIRS = [(source, architecture) for source, names in ARCHITECTURES.items() for architecture in names]
REGISTERS_OF_AN_SM = 65536
THREADS = {"symmetric_mma": 256}
BLOCKS_OF_AN_SM = {"symmetric_mma": 2}


def family(kernel: str) -> str:
    """Name of a kernel without its element type."""
    return kernel.removesuffix("_bfloat16").removesuffix("_float16")


def test_table_names_every_source_and_no_other() -> None:
    assert PAIRS
    assert set(ARCHITECTURES) == {path.name for path in SOURCES.glob("*.cu")}


@pytest.mark.parametrize(("source", "architecture"), PAIRS)
def test_kernels_spill_nothing_and_fit_their_occupancy(source: str, architecture: str) -> None:
    kernels = compiled(source, architecture).kernels
    assert kernels
    for name, kernel in kernels.items():
        assert (kernel.stack, kernel.spill) == (0, 0), name
        assert kernel.count("LDL") + kernel.count("STL") == 0, name
        limit = REGISTERS_OF_AN_SM // (THREADS[family(name)] * BLOCKS_OF_AN_SM[family(name)])
        assert 0 < kernel.registers <= limit, name


@pytest.mark.parametrize("architecture", ARCHITECTURES["symmetric_mma.cu"])
@pytest.mark.parametrize("element", ["bfloat16", "float16"])
def test_symmetric_mma_is_unrolled_over_one_stage(architecture: str, element: str) -> None:
    kernel = compiled("symmetric_mma.cu", architecture).kernels[f"symmetric_mma_{element}"]
    # A warp's 64 x 32 x 32 is 4 x 4 x 2 instructions of 16 x 8 x 16; more would be a second copy of the loop.
    assert kernel.count("HMMA") == 32
    # Per 16 columns 4 loads of left and 2 of right; one more reads the mirror.
    assert kernel.count("LDSM") == 13
    # Two chunks of each operand, before the loop and in it.
    assert kernel.count("LDGSTS") == 8
    # 16-byte stores of the tile and of its mirror.
    assert kernel.count("STG.E.128") == 2
