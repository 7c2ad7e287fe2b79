"""Every CUDA source compiles, spills nothing and holds the instructions it is made of."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from . import compile as compiler
from .compile import (
    ARCHITECTURES,
    SOURCES,
    UNQUALIFIED_ARRIVE,
    Cubin,
    Kernel,
    listing,
    loads_before_use,
)
from .driver import needs_nvrtc
from .kept import compiled

pytestmark = needs_nvrtc
PAIRS = [(source, architecture) for source, names in ARCHITECTURES.items() for architecture in names]
ELEMENTS = ["bfloat16", "float16"]
REGISTERS_OF_AN_SM = 65536
WRITE_ONLY = {"fill_normals"}
# Threads of a block, and how many blocks an SM has to hold at least.
OCCUPANCY = {
    "symmetric_mma": (256, 2),
    "symmetric_mma_part": (256, 2),
    "symmetric_mma_total": (256, 2),
    "symmetric_wgmma": (384, 1),
    "gram_product": (128, 3),
    "cholesky_factor": (128, 2),
    "cholesky_diagonal": (128, 2),
    "cholesky_below": (128, 2),
    "cholesky_solve": (128, 2),
    # Elementwise: two blocks with 8 chunks of 16 bytes a thread have 64 KiB under way.
    "few": (256, 2),
    "many": (256, 2),
    "wide": (256, 1),
    "add_pieces": (256, 1),
    "copy_few": (256, 4),
    "copy_many": (256, 4),
    "sum_messages": (256, 2),
    # By rows or columns of matrices.
    "slice": (256, 2),
    "fill_normals": (256, 2),
    "add_numbers": (256, 1),
    "lamb_factors": (256, 1),
    "update_factors": (256, 1),
}


def family(kernel: str) -> str:
    """What a kernel is counted as: its name without its element type, or the table of jobs that it takes."""
    form = kernel.rpartition("_")[2]
    if kernel in OCCUPANCY:
        return kernel
    if form in OCCUPANCY:
        return form
    stem = kernel.partition("_")[0]
    return stem if stem in OCCUPANCY else kernel.removesuffix("_bfloat16").removesuffix("_float16")


def only(source: str, architecture: str, name: str) -> Kernel:
    """One kernel of a source."""
    return compiled(source, architecture).kernels[name]


def test_table_names_every_source_and_no_other() -> None:
    assert PAIRS
    assert set(ARCHITECTURES) == {path.name for path in SOURCES.glob("*.cu")}


def assert_is_within_resources(cubin: Cubin) -> None:
    """Kernels that spill nothing, need no stack and fit their occupancy."""
    assert cubin.kernels
    for name, kernel in cubin.kernels.items():
        assert (kernel.stack, kernel.spill) == (0, 0), name
        assert kernel.count("LDL") + kernel.count("STL") == 0, name
        threads, blocks = OCCUPANCY[family(name)]
        assert 0 < kernel.registers <= REGISTERS_OF_AN_SM // (threads * blocks), name


def assert_addends_are_copied_during_products(cubin: Cubin, element: str) -> None:
    """Half an addend is copied to shared memory by the code of a stage: among the last products."""
    listed = listing(cubin.code)[f"symmetric_mma_{element}"]
    barriers = [at for at, text in enumerate(listed) if "BAR.SYNC" in text]
    products = [at for at, text in enumerate(listed) if "HMMA" in text]
    inside = [at for at, text in enumerate(listed) if "LDGSTS" in text and barriers[0] < at < products[-1]]
    assert len(inside) == 8, "two chunks of each operand and four of an addend"
    # What is not aligned is loaded by elements; none of those is needed for the addends that are.
    assert not [text for text in listed[products[-1] : barriers[1]] if "LDG" in text]


def assert_addends_are_loaded_before_a_wait(cubin: Cubin, element: str) -> None:
    """A lane has its share of a square loaded before it uses some; of the first one before the last wait."""
    listed = listing(cubin.code)[f"symmetric_wgmma_{element}"]
    # Four chunks of 16 bytes of two addends, for each of four squares.
    assert loads_before_use(listed, "LDG.E.128") == [8] * 4
    waits = [at for at, text in enumerate(listed) if "WARPGROUP.DEPBAR" in text]
    products = [at for at, text in enumerate(listed) if "HGMMA" in text]
    loads = [at for at, text in enumerate(listed) if "LDG.E.128" in text]
    assert len([at for at in loads if products[-1] < at < waits[-1]]) == 8


@pytest.mark.parametrize(("source", "architecture"), PAIRS)
def test_kernels_spill_nothing_and_fit_their_occupancy(source: str, architecture: str) -> None:
    assert_is_within_resources(compiled(source, architecture))


@pytest.mark.parametrize(("source", "architecture"), PAIRS)
def test_global_memory_is_reached_without_generic_addresses(source: str, architecture: str) -> None:
    for name, kernel in compiled(source, architecture).kernels.items():
        assert kernel.count("LDG") > 0 or name in WRITE_ONLY, name
        assert kernel.count("LD.") + kernel.count("ST.") == 0, name


@pytest.mark.parametrize("architecture", ARCHITECTURES["symmetric_mma.cu"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_symmetric_mma_is_unrolled_over_one_stage(architecture: str, element: str) -> None:
    kernel = only("symmetric_mma.cu", architecture, f"symmetric_mma_{element}")
    # A warp's 64 x 32 x 32 is 4 x 4 x 2 instructions of 16 x 8 x 16; more would be a second copy of the loop.
    assert kernel.count("HMMA") == 32
    # Per 16 columns 4 loads of left and 2 of right; one more reads the mirror, 8 read each of two addends.
    assert kernel.count("LDSM") == 13 + 16
    # Two chunks of each operand, before the loop and in it; four of half an addend there and behind it.
    assert kernel.count("LDGSTS") == 8 + 12
    # 16-byte stores of the tile and of its mirror.
    assert kernel.count("STG.E.128") == 2


@pytest.mark.parametrize("architecture", ARCHITECTURES["symmetric_mma.cu"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_symmetric_mma_parts_multiply_once_and_add_16_bytes_each(architecture: str, element: str) -> None:
    part = only("symmetric_mma.cu", architecture, f"symmetric_mma_part_{element}")
    total = only("symmetric_mma.cu", architecture, f"symmetric_mma_total_{element}")
    assert (part.count("HMMA"), total.count("HMMA")) == (32, 0)
    # 64 sums of a thread.
    assert (part.count("STG.E.128"), total.count("LDG.E.128")) == (16, 16)


@pytest.mark.parametrize("element", ELEMENTS)
def test_symmetric_wgmma_uses_tensor_copies_and_group_products(element: str) -> None:
    kernel = only("symmetric_wgmma.cu", "sm_90a", f"symmetric_wgmma_{element}")
    # 64 columns are 4 steps of 16, for two halves of a group's rows.
    assert kernel.count("HGMMA.64x128x16") == 8
    # A wait for products per block and one per tile; more would mean that the compiler took them one by one.
    assert kernel.count("WARPGROUP.DEPBAR") == 2
    # A half of left for both blocks, or two halves for one; and right.
    assert kernel.count("UTMALDG") == 4
    assert kernel.count("UTMALDG.3D.MULTICAST") == 1
    # All blocks of a cluster begin together and end together: they arrive, and they wait.
    assert kernel.count("UCGABAR") == 4
    # Four squares, and the mirror of each.
    assert kernel.count("UTMASTG") == 8
    assert kernel.count("USETMAXREG") == 2
    # Per square 4 times 16 columns, as they are and transposed.
    assert kernel.count("STSM") == 32
    # The same of two addends; a lane's share of one is 4 chunks of 16 bytes.
    assert kernel.count("LDSM") == 32
    assert kernel.count("LDG.E.128") == 32


@pytest.mark.parametrize("architecture", ARCHITECTURES["symmetric_mma.cu"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_symmetric_mma_copies_addends_during_its_products(architecture: str, element: str) -> None:
    assert_addends_are_copied_during_products(compiled("symmetric_mma.cu", architecture), element)


@pytest.mark.parametrize("element", ELEMENTS)
def test_symmetric_wgmma_loads_addends_before_it_waits(element: str) -> None:
    assert_addends_are_loaded_before_a_wait(compiled("symmetric_wgmma.cu", "sm_90a"), element)


def test_loads_in_a_row_end_where_one_of_them_is_needed() -> None:
    code = ["LDG.E.128 R4, desc[UR4][R2.64]", "@!P0 LDG.E.128 R8, [R2.64+0x10]", "IADD3 R3, R1, R0, RZ"]
    assert loads_before_use([*code, "STS.128 [R1], R8", code[0], "FMUL R9, R7, R1"], "LDG.E.128") == [2, 1]
    assert loads_before_use([code[0], "LDG.E.128 R8, [R6.64]"], "LDG.E.128") == [1, 1]
    assert loads_before_use([code[0], "LDG.E R7, [R2]", "FMUL R9, R8, R1", code[1]], "LDG.E.128") == [1, 1]
    assert loads_before_use(["LDG.E.U16 R4, [R2]", "LDG.E.U16 R5, [R2]", "PRMT R6, R4"], "LDG.E.U16") == [2]
    either = ["@P0 LDG.E.64 R4, [R2.64]", "@!P0 LDG.E.128 R4, [R12.64]", "HADD2.F32 R6, -RZ, R5.H0_H0"]
    assert loads_before_use([*either, either[0]], "LDG.E.64", "LDG.E.128") == [2, 1]
    assert loads_before_use(either, "LDG.E.64") == [1]


@pytest.mark.parametrize("macros", [(), (UNQUALIFIED_ARRIVE,)], ids=["as-is", "unqualified"])
def test_symmetric_wgmma_is_compiled_without_complaints(macros: tuple[str, ...]) -> None:
    cubin = compiled("symmetric_wgmma.cu", "sm_90a", None, macros)
    assert_is_within_resources(cubin)
    assert "Compiling entry function" in cubin.log
    assert "warning" not in cubin.log.lower()
    assert "serializ" not in cubin.log


def fences_among_products(cubin: Cubin, element: str) -> list[str]:
    """Returns the fences of the whole device in the main loop, which is what lies between two products."""
    listed = listing(cubin.code)[f"symmetric_wgmma_{element}"]
    products = [at for at, text in enumerate(listed) if "HGMMA" in text]
    last = next(at for at, text in enumerate(listed) if at > products[-1] and "BRA" in text)
    return [text for text in listed[products[0] : last + 1] if re.search(r"\bMEMBAR\b.*\.GPU\b", text)]


@pytest.mark.parametrize("element", ELEMENTS)
def test_unqualified_arrive_leaves_no_fence_of_the_device(element: str) -> None:
    default, unqualified = (
        compiled("symmetric_wgmma.cu", "sm_90a", None, macros) for macros in ((), (UNQUALIFIED_ARRIVE,))
    )
    name = f"symmetric_wgmma_{element}"
    assert len(fences_among_products(default, element)) == 1
    assert fences_among_products(unqualified, element) == []
    kernels = [cubin.kernels[name] for cubin in (default, unqualified)]
    assert [kernel.count("HGMMA") for kernel in kernels] == [8, 8]
    # Arrivals at the other block: of a skipped stage, in the main loop and behind it.
    assert [kernel.count("SYNCS.ARRIVE.TRANS64.RED") for kernel in kernels] == [3, 3]
    # What is left are the fences with which the blocks of a cluster begin and end together.
    assert [kernel.count("MEMBAR.ALL.GPU") for kernel in kernels] == [5, 2]


def test_command_compiles_one_source_with_a_macro(tmp_path: Path) -> None:
    command = [sys.executable, compiler.__file__, "--source", "symmetric_wgmma.cu"]
    folder = str(Path(compiler.nvrtc()._name).parent)
    made = []
    for macros in ([], ["--define", UNQUALIFIED_ARRIVE]):
        file = tmp_path / f"{len(macros)}.cubin"
        done = subprocess.run(
            [*command, "--out", str(file), "--nvrtc", folder, *macros],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "for sm_90a by NVRTC 13" in done.stdout
        made.append(file.read_bytes())
    assert [compiler.release(code) for code in made] == [compiler.version(compiler.nvrtc())] * 2
    fences = [sum("MEMBAR" in text for text in listing(code)["symmetric_wgmma_bfloat16"]) for code in made]
    assert fences[1] < fences[0]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "--source and --out: expected both or none" in refused.stderr


@pytest.mark.parametrize("architecture", ARCHITECTURES["gram.cu"])
def test_panel_products_are_three_tf32_products(architecture: str) -> None:
    # A warp's 32 x 32 x 32 is 2 x 4 x 4 instructions of 16 x 8 x 8, three times.
    stage = 96
    assert only("gram.cu", architecture, "gram_product").count("HMMA.1688.F32.TF32") == stage
    for name in ("cholesky_factor", "cholesky_below", "cholesky_solve"):
        # One stage of the product with earlier columns, one of the product with the inverse.
        assert only("cholesky.cu", architecture, name).count("HMMA.1688.F32.TF32") == 2 * stage
    diagonal = only("cholesky.cu", architecture, "cholesky_diagonal")
    assert diagonal.count("HMMA.1688.F32.TF32") == stage
