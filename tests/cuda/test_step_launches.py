"""Launches of a step of Muon with GPT-2's shapes: a bound on how many a plan may have."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from .driver import needs_nvrtc, run

pytestmark = needs_nvrtc

STEP = """
D = 136  # a width from which kernels multiply
matrices = parameters((3 * D, D), (D, D), (4 * D, D), (D, 4 * D))
vectors = parameters(*[(D,)] * 100)
groups = [{"params": matrices}, {"params": vectors, "algorithm": "adamw"}]
optimizer = oxidion.Muon(groups, lr=0.02, weight_decay=0.1, orth_dtype="float16")
optimizer.step()
kernels = ("momentum", "add_pieces", "divided", "symmetric", "apply", "adamw")
launched = lambda: {kernel: driver.emulator_launches_of(kernel.encode()) for kernel in kernels}
before, all_before = launched(), driver.emulator_launches()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    optimizer.step()
counts = {kernel: count - before[kernel] for kernel, count in launched().items()}
counts["all"] = driver.emulator_launches() - all_before
counts |= {event.key: event.count for event in profile.key_averages()}
print(counts)
"""
KERNELS = {"momentum": 4, "add_pieces": 4, "divided": 4, "symmetric": 58, "apply": 4, "adamw": 1}
"""One for each of the four shapes, but for the products: 10 in the standard form, 16 in the Gram form."""
LIBTORCH = {"aten::bmm": 11, "aten::copy_": 6}
COPIES_FOR_A_PRODUCT = 3
"""On the emulated device libtorch multiplies float16 matrices as float32: of two operands and the result."""
PAGE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "performance.md"


def test_step_of_muon_launches_as_many_kernels_as_the_page_says(environment: dict[str, str]) -> None:
    counts = ast.literal_eval(run(environment, STEP))
    assert {kernel: counts[kernel] for kernel in KERNELS} == KERNELS
    assert counts["all"] == sum(KERNELS.values())
    counts["aten::copy_"] -= COPIES_FOR_A_PRODUCT * counts["aten::bmm"]
    assert {operation: counts[operation] for operation in LIBTORCH} == LIBTORCH
    computed = ("cat", "sqrt", "add", "mul", "clamp_min", "reciprocal", "div")
    assert not {f"aten::{operation}" for operation in computed} & set(counts)


def test_page_has_the_counts_of_launches() -> None:
    section = PAGE.read_text().split("\n## Launches on a device\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?:libtorch's )?`(\w+)` \| (\d+) \|", section, re.MULTILINE)
    found = {name: int(count) for name, count in rows}
    assert found == KERNELS | {name.removeprefix("aten::"): count for name, count in LIBTORCH.items()}
    own = sum(KERNELS.values())
    assert f"These are {own + sum(LIBTORCH.values())} launches, {own} of them of the package's" in section
