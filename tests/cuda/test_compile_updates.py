"""Machine code of the elementwise kernels: nothing is spilled, memory moves 16 bytes at a time."""

from __future__ import annotations

import re

import pytest

from .compile import ARCHITECTURES, SOURCES, compiled
from .emulator.library import KERNELS
from .jobs import PASSES

AHEAD = 2
REGISTERS = 65536 // (2 * 256)
WIDE_REGISTERS = 65536 // 256


def bits(operation: str, what: str) -> int:
    """How many operands an operation of updates.cuh or lamb.cuh reads or writes."""
    text = "".join((SOURCES / name).read_text() for name in ("updates.cuh", "lamb.cuh"))
    entry = re.search(rf"^UPDATE\({operation}, (\w+)\)", (SOURCES / "updates.cu").read_text(), re.MULTILINE)
    assert entry is not None
    name = "AdamWith" if entry[1].startswith("AdamW") else entry[1]
    body = text[text.index(f"struct {name} {{") :]
    found = re.search(rf"{what} = (?:Largest \? )?0b(\d+)(?: : 0b(\d+))?;", body)
    assert found is not None
    return (found[1] if operation != "adamw" or found[2] is None else found[2]).count("1")


@pytest.mark.parametrize("architecture", ARCHITECTURES["updates.cu"])
@pytest.mark.parametrize("source", ["updates.cu", "sums.cu"])
def test_elementwise_kernels_spill_nothing_and_leave_room_for_two_blocks(
    source: str, architecture: str
) -> None:
    kernels = compiled(source, architecture).kernels
    assert set(kernels) == set(KERNELS[source])
    for name, kernel in kernels.items():
        assert (kernel.stack, kernel.spill) == (0, 0), name
        assert kernel.registers <= (WIDE_REGISTERS if name.endswith("_wide") else REGISTERS), name


@pytest.mark.parametrize("architecture", ARCHITECTURES["updates.cu"])
@pytest.mark.parametrize("operation", PASSES)
def test_float32_moves_in_chunks_of_16_bytes(operation: str, architecture: str) -> None:
    for form in ("few", "many"):
        kernel = compiled("updates.cu", architecture).kernels[f"{operation}_{form}"]
        assert kernel.count("LDG.E.128") == AHEAD * bits(operation, "READS")
        assert kernel.count("STG.E.128") == AHEAD * bits(operation, "WRITES")
