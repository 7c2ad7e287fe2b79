"""The emulator notices faults: each edit of a source has to fail at least one of a few launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from .compile import headers, texts
from .driver import needs_compiler
from .emulator.library import Emulated, KernelFault
from .faults import CHOLESKY_FAULTS, GRAM_FAULTS, MMA_FAULTS, WGMMA_FAULTS, Fault
from .panel_checks import (
    check_factor_and_solve,
    check_gram,
    check_left_out,
    check_not_finite,
    check_second_pass,
    check_shift,
    check_shift_of_failed_panels,
)
from .panels import Kernels
from .symmetric import Problem, run_mma, run_wgmma

pytestmark = needs_compiler
Launch = Callable[[], object]
SEEDS = (0, 1, 2)
MMA_PROBLEMS = (
    Problem(1, 131, 165, addends=1, live=True),
    Problem(1, 270, 70),
    Problem(1, 21, 300, addends=2, odd_rows=True),
    Problem(2, 24, 43, addends=1),
    Problem(1, 136, 170, addends=2),
    Problem(2, 40, 230, addends=1, parts=3),
)
WGMMA_PROBLEMS = (
    Problem(2, 72, 200, addends=1, blocks=1),
    Problem(1, 200, 72, addends=1, blocks=2),
    Problem(2, 260, 458, blocks=1),
    Problem(3, 260, 330, blocks=3),
    Problem(1, 390, 24, blocks=2),
    Problem(1, 136, 40, addends=2, odd_addends=True, blocks=1),
)


def passes(launches: Sequence[Launch]) -> bool:
    """Whether every launch gives the right result."""
    try:
        for launch in launches:
            launch()
    except (AssertionError, KernelFault):
        return False
    return True


def built(source: str, fault: Fault, folder: Path, kernels: Sequence[str] = ()) -> Emulated:
    """Kernels with the fault, in the source itself or in what it includes."""
    parts = {source: texts()[source], **headers()}
    edits = [(next(name for name in parts if old in parts[name]), old, new) for old, new in fault]
    return Emulated(source, folder, edits, kernels)


def mma_launches(fault: Fault, folder: Path) -> list[Launch]:
    """Symmetric products on mma.sync."""
    names = [f"symmetric_mma{share}_bfloat16" for share in ("", "_part", "_total")]
    library = built("symmetric_mma.cu", fault, folder, names)
    return [
        lambda problem=problem, seed=seed: run_mma(library, problem, seed)
        for seed in SEEDS
        for problem in MMA_PROBLEMS
    ]


def wgmma_launches(fault: Fault, folder: Path) -> list[Launch]:
    """Symmetric products of warpgroups."""
    library = built("symmetric_wgmma.cu", fault, folder, ["symmetric_wgmma_bfloat16"])
    return [
        lambda problem=problem, seed=seed: run_wgmma(library, problem, seed)
        for seed in SEEDS
        for problem in WGMMA_PROBLEMS
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("sound"))


@pytest.fixture(scope="module")
def sound_gram(folder: Path) -> Emulated:
    return Emulated("gram.cu", folder / "gram")


@pytest.fixture(scope="module")
def sound_cholesky(folder: Path) -> Emulated:
    return Emulated("cholesky.cu", folder / "cholesky")


def panel_launches(gram: Emulated, cholesky: Emulated) -> list[Launch]:
    """Gram product, factor and solve."""
    launches: list[Launch] = []
    for seed, by_columns in [*((seed, False) for seed in SEEDS), (0, True)]:
        kernels = Kernels(gram, cholesky, seed, by_columns)
        launches += [
            lambda kernels=kernels: check_gram(kernels, (1, 150, 33, True), 3),
            lambda kernels=kernels: check_not_finite(kernels),
            lambda kernels=kernels: check_second_pass(kernels),
            lambda kernels=kernels: check_shift(kernels),
            lambda kernels=kernels: check_shift_of_failed_panels(kernels),
            lambda kernels=kernels: check_left_out(kernels),
            lambda kernels=kernels: check_factor_and_solve(kernels, (1, 140, 128, False)),
        ]
    return launches


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("symmetric_mma.cu", MMA_FAULTS),
        ("symmetric_wgmma.cu", WGMMA_FAULTS),
        ("gram.cu", GRAM_FAULTS),
        ("cholesky.cu", CHOLESKY_FAULTS),
    ],
)
def test_texts_that_faults_replace_are_in_the_sources(source: str, faults: dict[str, Fault]) -> None:
    parts = [texts()[source], *headers().values()]
    replaced = [old for fault in faults.values() for old, _ in fault]
    assert [old for old in replaced if not any(old in part for part in parts)] == []


def test_sound_sources_pass_the_same_launches(
    tmp_path: Path, sound_gram: Emulated, sound_cholesky: Emulated
) -> None:
    assert passes(mma_launches((), tmp_path / "mma"))
    assert passes(wgmma_launches((), tmp_path / "wgmma"))
    assert passes(panel_launches(sound_gram, sound_cholesky))


@pytest.mark.parametrize("fault", MMA_FAULTS)
def test_fault_in_symmetric_mma_is_noticed(fault: str, tmp_path: Path) -> None:
    assert not passes(mma_launches(MMA_FAULTS[fault], tmp_path))


@pytest.mark.parametrize("fault", WGMMA_FAULTS)
def test_fault_in_symmetric_wgmma_is_noticed(fault: str, tmp_path: Path) -> None:
    assert not passes(wgmma_launches(WGMMA_FAULTS[fault], tmp_path))


@pytest.mark.parametrize("fault", GRAM_FAULTS)
def test_fault_in_gram_product_is_noticed(fault: str, tmp_path: Path, sound_cholesky: Emulated) -> None:
    faulty = built("gram.cu", GRAM_FAULTS[fault], tmp_path)
    assert not passes(panel_launches(faulty, sound_cholesky))


@pytest.mark.parametrize("fault", CHOLESKY_FAULTS)
def test_fault_in_cholesky_is_noticed(fault: str, tmp_path: Path, sound_gram: Emulated) -> None:
    faulty = built("cholesky.cu", CHOLESKY_FAULTS[fault], tmp_path)
    assert not passes(panel_launches(sound_gram, faulty))
