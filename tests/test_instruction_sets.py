"""The CPU kernels of every instruction set that this machine has: the same results."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from oxidion._oxidion import cpu_features
from support.instruction_sets import ELEMENTWISE, MATRICES, ORTHONORMAL, SHAPES

SCRIPT = Path(__file__).with_name("support") / "instruction_sets.py"
LIMITS = {"baseline": 0, "avx2": 1, "avx512": 2, "avx512_bf16": 3}
"""How many of the features are left."""

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")


def python(limit: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own; what kernels may use is settled at the first one."""
    environment = {key: value for key, value in os.environ.items() if key != "OXIDION_MAX_CPU_ISA"}
    if limit is not None:
        environment["OXIDION_MAX_CPU_ISA"] = limit
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, dict[str, Any]]:
    """What each limit gives; None is no limit."""
    folder, found = tmp_path_factory.mktemp("steps"), {}
    for limit in (None, *LIMITS):
        path = folder / f"{limit}.pt"
        done = python(limit, str(SCRIPT), str(path))
        assert done.returncode == 0, done.stderr
        found[limit] = torch.load(path)
    return found


def test_limit_is_kept(steps: dict[str | None, dict[str, Any]]) -> None:
    every = cpu_features()
    assert steps[None]["features"] == every
    for limit, count in LIMITS.items():
        assert steps[limit]["features"] == every[:count]


@pytest.mark.parametrize("name", [f"{name}{dtype}" for name in ELEMENTWISE for dtype in ("", "-bfloat16")])
@pytest.mark.parametrize("limit", LIMITS)
def test_elementwise_steps_have_the_same_bits(
    steps: dict[str | None, dict[str, Any]], limit: str, name: str
) -> None:
    pairs = list(zip(steps[limit][name], steps[None][name], strict=True))
    assert len(pairs) > 2 * len(SHAPES)
    # A few numbers that are rounded at random may all be unchanged.
    assert all(way.any() for way, _ in pairs[: len(SHAPES)] if way.numel() > 10)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("name", ORTHONORMAL)
@pytest.mark.parametrize("limit", LIMITS)
def test_orthonormal_steps_are_the_same_but_for_rounding(
    steps: dict[str | None, dict[str, Any]], limit: str, name: str
) -> None:
    ways = [steps[which][name][: len(MATRICES)] for which in (limit, None)]
    errors = [float((one - other).norm() / other.norm()) for one, other in zip(*ways, strict=True)]
    # A polynomial passes rounding on 160 times; in bfloat16 Dion2 may choose between rows that are as strong.
    # Rounding of the parameters takes the way of a full Dion 1.5e-4 from the one in float64, with every set.
    bound = 0.1 if name.endswith("bfloat16") else 3e-4 if name == "Dion-full-float32" else 1e-4
    assert max(errors) <= bound


def test_golden_trajectories_without_any_of_them() -> None:
    done = python("baseline", "-m", "pytest", "-q", str(Path(__file__).with_name("test_golden.py")))
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def test_name_of_none_is_refused() -> None:
    done = python("sse9", "-c", "import torch, oxidion")
    assert done.returncode != 0
    assert "ValueError: OXIDION_MAX_CPU_ISA must be one of baseline, avx2, avx512" in done.stderr
    assert "got sse9" in done.stderr
