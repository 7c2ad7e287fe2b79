"""The emulator notices faults: each edit of a source has to fail at least one of a few launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from .emulator.library import SOURCES, Emulated, KernelFault
from .faults import MMA_FAULTS, WGMMA_FAULTS, Fault
from .symmetric import Problem, run_mma, run_wgmma

MMA_PROBLEMS = (
    Problem(1, 131, 165, addends=1, live=True),
    Problem(1, 270, 70),
    Problem(1, 21, 300, addends=2, odd_rows=True),
    Problem(2, 24, 43, addends=1),
)
WGMMA_PROBLEMS = (
    Problem(2, 72, 200, addends=1, blocks=1),
    Problem(1, 200, 72, addends=1, blocks=2),
    Problem(2, 260, 330, blocks=3),
)
Launch = Callable[[Emulated, int], object]


def passes(library: Emulated, launches: list[Launch]) -> bool:
    """Whether every launch gives the right result under every seed."""
    for seed in range(3):
        for launch in launches:
            try:
                launch(library, seed)
            except (AssertionError, KernelFault):
                return False
    return True


def built(source: str, kernel: str, fault: Fault, folder: Path) -> Emulated:
    """The kernel with the fault, in the source itself or in what it includes."""
    texts = {path.name: path.read_text() for path in SOURCES.glob("*.cu*")}
    edits = []
    for old, new in fault:
        name = source if old in texts[source] else next(name for name in texts if old in texts[name])
        edits.append((name, old, new))
    return Emulated(source, folder, edits, [kernel])


def run_each(problems: tuple[Problem, ...], run: Callable[[Emulated, Problem, int], float]) -> list[Launch]:
    """Launches of all problems."""
    return [partial(lambda problem, library, seed: run(library, problem, seed), problem) for problem in problems]


MMA_LAUNCHES = run_each(MMA_PROBLEMS, run_mma)
WGMMA_LAUNCHES = run_each(WGMMA_PROBLEMS, run_wgmma)


def test_sources_without_a_fault_pass_the_same_launches(tmp_path: Path) -> None:
    assert passes(built("symmetric_mma.cu", "symmetric_mma_bfloat16", (), tmp_path / "mma"), MMA_LAUNCHES)
    assert passes(built("symmetric_wgmma.cu", "symmetric_wgmma_bfloat16", (), tmp_path / "wgmma"), WGMMA_LAUNCHES)


@pytest.mark.parametrize("fault", MMA_FAULTS)
def test_fault_in_symmetric_mma_is_noticed(fault: str, tmp_path: Path) -> None:
    library = built("symmetric_mma.cu", "symmetric_mma_bfloat16", MMA_FAULTS[fault], tmp_path)
    assert not passes(library, MMA_LAUNCHES)


@pytest.mark.parametrize("fault", WGMMA_FAULTS)
def test_fault_in_symmetric_wgmma_is_noticed(fault: str, tmp_path: Path) -> None:
    library = built("symmetric_wgmma.cu", "symmetric_wgmma_bfloat16", WGMMA_FAULTS[fault], tmp_path)
    assert not passes(library, WGMMA_LAUNCHES)
