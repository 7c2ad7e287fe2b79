"""Machine code of the elementwise kernels: memory moves 16 bytes at a time."""

from __future__ import annotations

import re

import pytest

from .compile import ARCHITECTURES, SOURCES
from .driver import needs_nvrtc
from .emulator.library import KERNELS
from .jobs import PASSES
from .kept import compiled

pytestmark = [pytest.mark.equipment, needs_nvrtc]
AHEAD = 2  # vectors that a thread has under way


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


@pytest.mark.parametrize(
    "source", ["updates.cu", "sums.cu", "totals.cu", "factors.cu", "rows.cu", "means.cu", "coded.cu"]
)
def test_every_kernel_is_emulated_too(source: str) -> None:
    assert set(compiled(source, "sm_90a").kernels) == set(KERNELS[source])


@pytest.mark.parametrize("architecture", ARCHITECTURES["updates.cu"])
@pytest.mark.parametrize("operation", PASSES)
def test_float32_moves_in_chunks_of_16_bytes(operation: str, architecture: str) -> None:
    for form in ("few", "many"):
        kernel = compiled("updates.cu", architecture).kernels[f"{operation}_{form}"]
        assert kernel.count("LDG.E.128") == AHEAD * bits(operation, "READS")
        assert kernel.count("STG.E.128") == AHEAD * bits(operation, "WRITES")
