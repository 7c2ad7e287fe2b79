"""Machine code of the elementwise kernels: memory moves 16 bytes at a time."""

from __future__ import annotations

import pytest

from .compile import ARCHITECTURES, listing, loads_before_use
from .driver import needs_nvrtc
from .emulator.library import KERNELS
from .kept import compiled
from .operations import OPERATIONS, names

pytestmark = needs_nvrtc
AHEAD = 2  # vectors that a thread has under way


@pytest.mark.parametrize(
    "source", ["updates.cu", "sums.cu", "totals.cu", "factors.cu", "rows.cu", "means.cu", "quantized.cu"]
)
def test_every_kernel_is_emulated_too(source: str) -> None:
    assert set(compiled(source, "sm_90a").kernels) == set(KERNELS[source])


@pytest.mark.parametrize("architecture", ARCHITECTURES["updates.cu"])
@pytest.mark.parametrize("operation", names("elementwise"))
def test_float32_moves_in_chunks_of_16_bytes(operation: str, architecture: str) -> None:
    for form in ("few", "many"):
        kernel = compiled("updates.cu", architecture).kernels[f"{operation}_{form}"]
        assert kernel.count("LDG.E.128") == AHEAD * sum(OPERATIONS[operation].reads)
        assert kernel.count("STG.E.128") == AHEAD * sum(OPERATIONS[operation].writes)


@pytest.mark.parametrize("architecture", ARCHITECTURES["updates.cu"])
def test_all_vectors_are_loaded_before_one_is_converted(architecture: str) -> None:
    """An operand has a load of 16 bytes and one of 8; its type predicates one of them off."""
    listed = listing(compiled("updates.cu", architecture).code)
    for operation in names("elementwise"):
        under_way = AHEAD * sum(OPERATIONS[operation].reads)
        for form in ("few", "many"):
            code = listed[f"{operation}_{form}"]
            assert 2 * under_way in loads_before_use(code, "LDG.E.64", "LDG.E.128"), (operation, form)
            assert max(loads_before_use(code, "LDG.E.64")) >= under_way / AHEAD, (operation, form)
