"""Rows made orthogonal by rotations, on the host emulator, against singular values of LAPACK."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.inputs import gaussian

from .driver import needs_compiler
from .emulator.library import Emulated, KernelFault
from .jacobi import DOUBLE, SWEEPS, check, rotated
from .test_planted_faults import built

pytestmark = needs_compiler

FAULTS = {
    "meets some blocks twice": (
        ("(round + others - pair) % others;", "(round + others - pair + 1) % others;"),
    ),
    "takes the larger angle": (("(zeta < 0.0 ? -1.0 : 1.0)", "(zeta < 0.0 ? 1.0 : -1.0)"),),
    "turns by the wrong sign": (
        ("s.cosine[pair] * a - s.sine[pair] * b;", "s.cosine[pair] * a + s.sine[pair] * b;"),
    ),
    "reads a chunk that is not full": (("__syncthreads();\n        multiply<CHUNK", "multiply<CHUNK"),),
    "fills a chunk that is being read": (("__syncthreads();  // the chunk before is read", ""),),
    "rotates before the angles are known": (
        ("s.sine[thread]);\n    }\n    __syncthreads();", "s.sine[thread]);\n    }"),
    ),
    "takes the second block for the first": (
        ("blocks.second * BLOCK + row - BLOCK", "blocks.first * BLOCK + row - BLOCK"),
    ),
    "stops after the first sweep": (("p.sweep > 0 && p.moved", "p.sweep > 0 || p.moved"),),
    "looks at the first matrix only": (("z) * p.sweeps + p.sweep - 1]", "0) * p.sweeps + p.sweep - 1]"),),
    "leaves J as it is": (("part < pairs ? p.w : p.j", "part < pairs ? p.w : p.w"),),
    "leaves what does not converge": (
        ("* p.sweeps + p.sweeps - 1] == 0.0) return;", "* p.sweeps] != 0.0) return;"),
    ),
    "takes what is not a number for small": (
        (
            "!(product <= bound * longer && product <= LARGEST)",
            "product > bound * longer",
        ),
    ),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated("jacobi.cu", tmp_path_factory.mktemp("jacobi"))


def conditioned(k: int, condition: float, seed: int) -> Tensor:
    """Singular values from 1 down to the inverse of the condition."""
    left, _, right = torch.linalg.svd(gaussian((k, k), seed))
    return (left * torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), k, dtype=DOUBLE)) @ right


def falling(x: Tensor) -> Tensor:
    """A triangle with the singular values of x whose rows fall in size, as the core hands it over."""
    return torch.linalg.qr(torch.linalg.qr(torch.linalg.qr(x).R.mT).R.mT).R


def kinds(k: int) -> Tensor:
    """Matrices that differ in all that could matter."""
    square = gaussian((k, k), 1)
    low = gaussian((k, 2), 2) @ gaussian((2, k), 3)
    reflection = torch.eye(k, dtype=DOUBLE) - 2.0 / k
    steep, zero = conditioned(k, 1e12, 4), torch.zeros(k, k, dtype=DOUBLE)
    diagonal = torch.diag(torch.arange(k, dtype=DOUBLE))
    general = [square, square @ square.mT, low, reflection, steep, steep @ steep.mT]
    return torch.stack([*map(falling, general), zero, diagonal])


@pytest.mark.parametrize("k", [1, 2, 33, 64, 65, 130])
def test_rows_become_orthogonal_by_an_orthogonal_matrix(kernels: Emulated, k: int) -> None:
    sweeps = check(kernels, kinds(k))
    assert sweeps.max() <= SWEEPS - 4
    assert sweeps[-2:].max() == 0, "zeros and diagonals need no turn"


def test_eigenvectors_of_a_positive_matrix_are_the_rows(kernels: Emulated) -> None:
    basis = torch.linalg.qr(gaussian((70, 70), 5)).Q
    values = torch.arange(70, 0, -1, dtype=DOUBLE)
    w, j, _ = rotated(kernels, ((basis * values) @ basis.mT)[None])
    order = w[0].norm(dim=1).argsort(descending=True)[:70]
    vectors = j[0, order, :70]
    assert ((vectors @ basis).abs() - torch.eye(70, dtype=DOUBLE)).abs().max() < 1e-12


def test_result_does_not_depend_on_what_else_is_there(kernels: Emulated) -> None:
    matrices = kinds(40)
    together = rotated(kernels, matrices, seed=3)
    for z in (0, 4, 5):
        alone = rotated(kernels, matrices[z : z + 1])
        assert torch.equal(alone[0][0], together[0][z])
        assert torch.equal(alone[1][0], together[1][z])


@pytest.mark.parametrize("k", [20, 64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_gives_no_numbers_and_spoils_no_other(
    kernels: Emulated, bad: float, k: int
) -> None:
    # Without zeros an infinite row has infinite products, and no others.
    matrices = torch.stack([gaussian((k, k), 1).abs(), kinds(k)[1]])
    matrices[0, 3, 4] = bad
    _, j, _ = rotated(kernels, matrices)
    assert j[0].isnan().all()
    assert torch.equal(j[1], rotated(kernels, matrices[1:])[1][0])


def test_what_has_not_converged_gives_no_numbers(kernels: Emulated) -> None:
    _, j, _ = rotated(kernels, kinds(100), sweeps=2)
    assert j[0].isnan().all()
    assert j[-2:].isfinite().all()


def noticed(kernels: Emulated) -> bool:
    """Whether one of a few checks fails."""
    matrices = torch.stack([gaussian((130, 130), 1), torch.diag(torch.arange(130, dtype=DOUBLE))]).flip([0])
    try:
        for seed in (0, 1, 2):
            check(kernels, matrices, seed=seed)
        nan = torch.full((1, 3, 3), float("nan"), dtype=DOUBLE)
        assert rotated(kernels, nan)[1].isnan().all()
        assert rotated(kernels, matrices[1:], sweeps=2)[1].isnan().all()
    except (AssertionError, KernelFault):
        return True
    return False


def test_sound_kernels_pass_the_checks_that_find_faults(kernels: Emulated) -> None:
    assert not noticed(kernels)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault: str, tmp_path: Path) -> None:
    assert noticed(built("jacobi.cu", FAULTS[fault], tmp_path))
