"""Machine code of the passes over 8-bit values: the tables of the definition, and unfused arithmetic."""

from __future__ import annotations

import re

import pytest

from support import code_books as book

from .compile import ARCHITECTURES, listing
from .driver import needs_nvrtc
from .kept import compiled

pytestmark = needs_nvrtc
SOURCE = "quantized.cu"
DECODING = re.compile(r"\b(LDS|HADD2|FADD|FMUL|FFMA|MUFU)\b")
WITH_ROOTS = ("adamw", "ademamix", "direction", "lamb", "scaled", "schedule_free_begin", "temper", "whiten")


@pytest.mark.parametrize("architecture", ARCHITECTURES[SOURCE])
@pytest.mark.parametrize("signed", [True, False])
def test_tables_are_those_of_the_definition(architecture: str, signed: bool) -> None:
    code, entries = compiled(SOURCE, architecture).code, book.book(signed).float()
    assert entries.numpy().tobytes() in code


@pytest.mark.parametrize("architecture", ARCHITECTURES[SOURCE])
def test_products_and_sums_of_the_operations_are_not_fused(architecture: str) -> None:
    kernels = compiled(SOURCE, architecture).kernels
    # What is fused is the search for an entry, which every kernel has.
    search = kernels["convert_quantized_many"].count("FFMA")
    names = [name for name in kernels if not name.startswith(WITH_ROOTS)]
    assert len(names) > 10
    for name in names:
        assert (kernels[name].count("FFMA"), kernels[name].count("DFMA")) == (search, 0), name


@pytest.mark.parametrize("architecture", ARCHITECTURES[SOURCE])
def test_plain_float32_moves_in_chunks_of_16_bytes(architecture: str) -> None:
    kernels = compiled(SOURCE, architecture).kernels
    for name, reads in (("adamw", 4), ("adamw_largest", 5), ("lion", 3), ("momentum_alone", 2)):
        # Two vectors of each operand are under way, whatever it is.
        assert kernels[f"{name}_quantized_many"].count("LDG.E.128") == 2 * reads


@pytest.mark.parametrize("architecture", ARCHITECTURES[SOURCE])
def test_all_vectors_are_loaded_before_one_is_decoded(architecture: str) -> None:
    """Nothing is looked up or computed between the first and the last of the loads of 16 bytes."""
    listed = listing(compiled(SOURCE, architecture).code)
    for name, reads in (("adamw", 4), ("adamw_largest", 5), ("ademamix", 5), ("lion", 3)):
        code = listed[f"{name}_quantized_many"]
        loads = [at for at, text in enumerate(code) if "LDG.E.128" in text]
        assert len(loads) == 2 * reads
        decoding = [at for at, text in enumerate(code) if DECODING.search(text)]
        assert any(at > loads[-1] for at in decoding)
        assert not [at for at in decoding if loads[0] < at < loads[-1]], name
