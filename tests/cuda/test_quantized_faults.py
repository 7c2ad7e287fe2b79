"""Faults planted in the kernels of 8-bit values and random rounding: the checks must find each."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import test_quantized as checks
from .emulator.library import Emulated, KernelFault

FAULTS = {
    "tiny numbers of either sign are 0": (
        "blocks.cuh",
        "+ static_cast<float>(random) >= 65536.0f",
        ">= 65536.0f",
    ),
    "the sign is lost": ("blocks.cuh", "q < 0.0f ? -found : found", "found"),
    "numbers are read before they are there": (
        "quantized.cuh",
        "own, STEP);\n        __syncwarp();",
        "own, STEP);",
    ),
    "the scale of some threads": (
        "quantized.cuh",
        "lane = segment.lanes / 2; lane > 0",
        "lane = segment.lanes / 2; lane > 1",
    ),
    "small scales are not scaled up": ("blocks.cuh", "scale < 1.0f / LARGE ? UP", "scale < 0.0f ? UP"),
    "a row begins with the rest of the one before": (
        "quantized.cuh",
        "row * job.width + col",
        "row * job.in_row * job.block + col",
    ),
    "the last block is taken for a whole one": (
        "quantized.cuh",
        "rest < job.block ? rest : job.block",
        "job.block",
    ),
    "a job begins at the first block of its row": ("quantized.cuh", "number + job.before", "number"),
    "numbers follow the job, not the tensor": ("rounding.cuh", "rounding.first + element", "element"),
    "every element has the first number": (
        "rounding.cuh",
        "const u64 at = place / 2",
        "const u64 at = 0 * place",
    ),
    "both numbers of a word are one": ("rounding.cuh", "is_upper ? x >> 16 : x & 0xFFFFu", "x & 0xFFFFu"),
    "all tensors have one tag": ("rounding.cuh", "x += tag +", "x += 0 * tag +"),
    "places above 2^33 begin again": ("rounding.cuh", "static_cast<u32>(at >> 32) * 0x9E3779B9u", "0u"),
    "quantized numbers are rounded to the nearest": (
        "quantized.cuh",
        "has_bits ? random.next(segment.start + i + j) : 1u << 15",
        "1u << 15",
    ),
    "a positive number has the code of 0": (
        "blocks.cuh",
        "min(max(found, 1), 255)",
        "min(max(found, 0), 255)",
    ),
    "half a unit of the random number is left out": ("blocks.cuh", " | 1u << (Cut - 17)", ""),
    "a second moment in float16 becomes 0": (
        "rounding.cuh",
        "max(min(cut, 0x7C00u), least)",
        "min(cut, 0x7C00u)",
    ),
    "subnormal float16 as the others": (
        "rounding.cuh",
        "is_small ? __fadd_rn(size, LEAST_NORMAL) : size",
        "size",
    ),
    "float16 takes all random bits": ("rounding.cuh", "(random >> 3)", "random"),
    "the outer dimensions begin at 0": ("rounding.cuh", "span.start + own", "own"),
    "every low half is at the start of its job": (
        "quantized.cuh",
        "job.scales[n])) + element",
        "job.scales[n]))",
    ),
    "a weight that was rounded up is not rounded back": ("master.cuh", "low < 0 ? 1u : 0u", "0u"),
    "a weight is cut off": ("master.cuh", "bits + 0x8000u", "bits"),
    "a zero with an old low half becomes NaN": ("master.cuh", "is_nan ? plain : bits", "bits"),
    "a nan among weights is rounded up": ("master.cuh", "is_nan ? bits >> 16 | 0x40u : bits", "bits"),
    "low halves are read where elements of the first block are": (
        "quantized.cuh",
        "low_halves(job, n, segment.start) : nullptr",
        "low_halves(job, n, 0) : nullptr",
    ),
    "a nan is rounded up": ("rounding.cuh", "> 0x7F800000u;", "> 0x7FFFFFFFu;"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault: str, tmp_path: Path) -> None:
    names = ["lion_quantized_many", "convert_quantized_many", "apply_quantized_many", "decay_quantized_many"]
    kernels = Emulated("quantized.cu", tmp_path / "faulty", [FAULTS[fault]], names)

    def work() -> None:
        checks.test_a_part_of_a_row_has_its_own_scales(kernels)
        checks.test_values_next_to_a_midpoint_take_the_nearest_entry(kernels, signed=True)
        checks.test_values_next_to_a_midpoint_take_the_nearest_entry(kernels, signed=False)
        checks.test_scales_of_any_size_and_nan(kernels, signed=True)
        checks.test_random_bits_follow_the_places_in_the_whole_tensor(kernels)
        checks.test_random_bits_of_quantization_follow_whole_tensor_places(kernels)
        checks.test_float16_of_any_size_is_rounded_at_random(kernels, positive=True)
        checks.test_float16_of_any_size_is_rounded_at_random(kernels, positive=False)
        checks.test_random_rounding_keeps_nan(kernels)
        checks.test_every_kind_of_weight_is_found_again(kernels)
        checks.test_weights_of_others_are_read_without_harm(kernels)

    with pytest.raises((AssertionError, KernelFault)):
        work()
