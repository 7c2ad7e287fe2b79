"""Machine code of the passes over codes: the tables of the definition, and arithmetic that is not fused."""

from __future__ import annotations

import pytest

from support import codes as book

from .compile import ARCHITECTURES, listing, loads_before_use
from .driver import needs_nvrtc
from .kept import compiled

pytestmark = needs_nvrtc
SOURCE = "coded.cu"
WITH_ROOTS = ("adamw", "ademamix", "direction", "lamb", "scaled", "take_apart", "temper", "whiten")


@pytest.mark.parametrize("architecture", ARCHITECTURES[SOURCE])
@pytest.mark.parametrize("signed", [True, False])
def test_tables_are_those_of_the_definition(architecture: str, signed: bool) -> None:
    code, entries = compiled(SOURCE, architecture).code, book.book(signed).float()
    assert entries.numpy().tobytes() in code


@pytest.mark.parametrize("architecture", ARCHITECTURES[SOURCE])
def test_products_and_sums_of_the_operations_are_not_fused(architecture: str) -> None:
    kernels = compiled(SOURCE, architecture).kernels
    # What is fused is the search for an entry, which every kernel has.
    search = kernels["convert_coded_many"].count("FFMA")
    names = [name for name in kernels if not name.startswith(WITH_ROOTS)]
    assert len(names) > 10
    for name in names:
        assert (kernels[name].count("FFMA"), kernels[name].count("DFMA")) == (search, 0), name


@pytest.mark.parametrize("architecture", ARCHITECTURES[SOURCE])
def test_plain_float32_moves_in_chunks_of_16_bytes(architecture: str) -> None:
    kernels = compiled(SOURCE, architecture).kernels
    for name, reads in (("adamw", 4), ("adamw_largest", 5), ("lion", 3), ("momentum_alone", 2)):
        # Two vectors of each operand are under way, whatever it is.
        assert kernels[f"{name}_coded_many"].count("LDG.E.128") == 2 * reads


@pytest.mark.parametrize("architecture", ARCHITECTURES[SOURCE])
def test_all_vectors_are_loaded_before_one_is_decoded(architecture: str) -> None:
    """Loads of 4, 8 and 16 bytes stand there for each vector, and the operand's type chooses one."""
    listed = listing(compiled(SOURCE, architecture).code)
    for name, reads in (("adamw", 4), ("lion", 3)):
        runs = loads_before_use(listed[f"{name}_coded_many"], "LDG.E", "LDG.E.64", "LDG.E.128")
        # Two vectors of each operand; that an address takes a register of an earlier load ends a run, too.
        assert max(runs) >= 2 * reads, name
