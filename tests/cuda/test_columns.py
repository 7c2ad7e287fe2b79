"""The passes over the columns of thin matrices on the host emulator, against float64."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from .columns import MOST_MATRICES, ROWS, ColumnJobs, Matrix, launch, sum_squares
from .driver import needs_compiler
from .emulator.arrays import Guarded
from .emulator.library import Edit, Emulated, KernelFault

pytestmark = needs_compiler
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
ROUNDOFF = {F16: 2.0**-11, BF16: 2.0**-8, F32: 2.0**-24, F64: 2.0**-53}
SHAPES = ((1, 1), (ROWS + 1, 33), (700, 7), (40, 70), (3, 200))
# Types of a matrix and of its kept columns.
KINDS = {"float32": (F32, F32), "mixed": (F32, BF16), "bfloat16": (BF16, F16), "float64": (F64, F32)}
EPSILON, FACTOR = 0.125, -0.75
# Share of the norm at which a column is noise, where it is not that of float32.
DEAD = {BF16: 2.0**-8, F16: 2.0**-11}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated("columns.cu", tmp_path_factory.mktemp("columns"))


def guarded(values: Tensor, dtype: torch.dtype, *, wider: int = 0, shift: int = 1) -> Guarded:
    """One matrix among NaN, off its alignment; its rows may be ``wider`` elements apart."""
    return Guarded.filled(values[None], dtype, row_stride=values.shape[1] + wider, shift=shift)


def form_of(dtype: torch.dtype) -> str:
    """What the passes for a type are called."""
    return "wide" if dtype == F64 else "few"


def check_sums(kernels: Emulated, kind: str, seed: int = 0) -> None:
    """Sums are exact but for float64's rounding; what is scaled is rounded once; nothing else is written."""
    dtype = KINDS[kind][0]
    torch.manual_seed(1)
    xs = [guarded(torch.randn(shape, dtype=F64), dtype, shift=i) for i, shape in enumerate(SHAPES)]
    scaled = [guarded(torch.full(shape, torch.nan), dtype) for shape in SHAPES]
    sums = [guarded(torch.full((1, cols), torch.nan), F64) for _, cols in SHAPES]
    triples = zip(xs, sums, scaled, strict=True)
    matrices = [Matrix(x.matrices[0], s.matrices[0, 0], y.matrices[0]) for x, s, y in triples]
    sum_squares(kernels, form_of(dtype), matrices, FACTOR, seed)
    for matrix in matrices:
        assert matrix.scaled is not None
        wide = matrix.x.double()
        torch.testing.assert_close(matrix.sums, wide.square().sum(0), rtol=1e-13, atol=0)
        # The product is exact in float32 up to its own rounding.
        off = (matrix.scaled.double() - FACTOR * wide).abs() - 1.01 * ROUNDOFF[dtype] * wide.abs()
        assert off.max() <= 0
    assert all(array.outside_is_untouched() for array in (*xs, *sums, *scaled))


def check_normalized(kernels: Emulated, kind: str) -> None:
    """Columns divided by their norms, the kept ones of them in ``q``; dead columns keep it."""
    dtype, kept = KINDS[kind]
    torch.manual_seed(2)
    arrays, matrices, before = [], [], []
    for rows, cols in SHAPES:
        values = torch.randn(rows, cols, dtype=F64)
        # Noise beside the others, which would be none beside epsilon alone; or nothing.
        values[:, cols // 2] *= 1e-6 / values[:, cols // 2].norm() if cols > 1 else 0.0
        first, end = (cols // 5, cols - cols // 7) if cols > 7 else (0, cols)
        x, scaled = guarded(values, dtype), guarded(torch.full_like(values, torch.nan), dtype, shift=0)
        q = guarded(torch.randn(rows, end - first), kept, wider=3)
        sums = x.matrices[0].double().square().sum(0)
        arrays += [x, scaled, q]
        matrices.append(Matrix(x.matrices[0], sums, scaled.matrices[0], q.matrices[0], first))
        before.append(q.matrices[0].clone())
    name, unit = f"normalize_columns_{form_of(dtype)}", torch.tensor(0.5)
    launch(kernels, name, matrices, epsilon=EPSILON, factor=2 * FACTOR, unit=unit)
    arithmetic = ROUNDOFF[F64 if dtype == F64 else F32]
    for matrix, old in zip(matrices, before, strict=True):
        assert matrix.q is not None
        assert matrix.scaled is not None
        norm = matrix.sums.sqrt()
        dead = norm <= DEAD.get(dtype, 2.0**-19) * max(norm.norm().item(), EPSILON)
        assert int(dead.sum()) == 1
        unit = (matrix.x.double() / (norm + EPSILON)).masked_fill(dead, 0.0)
        assert bool((matrix.scaled[:, dead] == 0).all())
        bound = (ROUNDOFF[dtype] + 4 * arithmetic) * unit.abs()
        assert ((matrix.scaled.double() - FACTOR * unit).abs() <= bound).all()
        own = slice(matrix.first, matrix.first + matrix.q.shape[1])
        expected = torch.where(dead[own], old.double(), unit[:, own])
        # Small float16 numbers are rounded to multiples of 2^-24.
        bound = (ROUNDOFF[kept] + 4 * arithmetic) * expected.abs() + 2.0**-24 * (kept == F16)
        assert ((matrix.q.double() - expected).abs() <= bound).all()
    assert all(array.outside_is_untouched() for array in arrays)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_and_scaled_copies_equal_float64(kernels: Emulated, kind: str, seed: int) -> None:
    check_sums(kernels, kind, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_are_divided_by_their_norms_and_dead_ones_keep_q(kernels: Emulated, kind: str) -> None:
    check_normalized(kernels, kind)


def test_column_that_is_not_a_number_shows(kernels: Emulated) -> None:
    x, q, scaled = torch.ones(5, 40), torch.zeros(5, 40), torch.zeros(5, 40)
    x[2, 35] = float("nan")
    matrix = Matrix(x, x.double().square().sum(0), scaled, q)
    launch(kernels, "normalize_columns_few", [matrix])
    assert bool(scaled[:, 35].isnan().all() and q[:, 35].isnan().all())
    others = [j for j in range(40) if j != 35]
    torch.testing.assert_close(q[:, others], x[:, others] / 5**0.5)


def test_unit_columns_take_any_scale_in_place(kernels: Emulated) -> None:
    torch.manual_seed(3)
    made = torch.randn(300, 40)
    scales = torch.tensor([0.0, 1e-36, 1e-20, 1e20, 1e36]).repeat(8)
    x = guarded(made * scales, F32)
    inside = x.matrices[0]
    inside[7, 11], inside[9, 12] = float("inf"), float("nan")
    matrix = Matrix(inside, torch.empty(40, dtype=F64))
    wide = inside.double()
    sum_squares(kernels, "few", [matrix])
    launch(kernels, "unit_columns", [Matrix(inside, matrix.sums, inside)])
    assert bool(inside[:, [11, 12]].isnan().all())
    good = [j for j in range(40) if j not in (11, 12)]
    norm = wide.norm(dim=0)
    expected = (wide / norm.masked_fill(norm == 0, 1.0))[:, good]
    assert ((inside[:, good].double() - expected).abs() <= 1.01 * ROUNDOFF[F32] * expected.abs()).all()
    assert x.outside_is_untouched()


def test_full_table_gives_every_matrix_its_own_sums(kernels: Emulated) -> None:
    assert ctypes.sizeof(ColumnJobs) <= 32764
    generator = torch.Generator().manual_seed(4)
    shapes = [(1 + number * 7 % 300, 1 + number % 37) for number in range(MOST_MATRICES)]
    xs = [torch.randn(shape, generator=generator) for shape in shapes]
    matrices = [Matrix(x, torch.zeros(x.shape[1], dtype=F64)) for x in xs]
    sum_squares(kernels, "few", matrices)
    for matrix in matrices:
        torch.testing.assert_close(matrix.sums, matrix.x.double().square().sum(0), rtol=1e-13, atol=0)
        alone = Matrix(matrix.x, torch.zeros_like(matrix.sums))
        if len(matrix.x) > ROWS:
            sum_squares(kernels, "few", [alone], seed=5)
            assert torch.equal(alone.sums, matrix.sums)


FAULTS: dict[str, tuple[str, str]] = {
    "a matrix begins with the block before it": (
        "piece_of(jobs, job, block)",
        "piece_of(jobs, job, job ? block + 1 : block)",
    ),
    "parts of the rows overlap": ("first = piece * ROWS;", "first = piece * (ROWS - 1);"),
    "rows and columns of blocks are swapped": (
        "piece = share.number / tiles;",
        "piece = share.number % tiles;",
    ),
    "reads rows that do not exist": (
        "rows = min(job.rows - first, ROWS);",
        "rows = min(job.rows - first, ROWS) + 1;",
    ),
    "adds sums of warps that are not written": (
        "    sums[warp][lane] = sum;\n    __syncthreads();",
        "    sums[warp][lane] = sum;",
    ),
    "leaves out a warp": ("for (int w = 1; w < WARPS; ++w) sum", "for (int w = 2; w < WARPS; ++w) sum"),
    "leaves out a piece": ("first < job.rows; first += ROWS", "first + ROWS < job.rows; first += ROWS"),
    "takes the norm of no warp": (
        "for (int w = 0; w < WARPS; ++w) total",
        "for (int w = 0; w < 0; ++w) total",
    ),
    "a dead column is stepped along": (
        "const C factor = is_dead ? C(0) :",
        "const C factor = is_dead ? C(1) :",
    ),
    "a dead column loses its q": ("const bool keeps = is_dead || patch", "const bool keeps = patch"),
    "keeps columns of others": ("patch.col >= job.own[1];", "false;"),
    "q is taken for contiguous": (
        "row * static_cast<int>(job.q_stride)",
        "row * (job.own[1] - job.own[0])",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault: str, tmp_path: Path) -> None:
    edit: Edit = ("columns.cu", *FAULTS[fault])
    faulty = Emulated("columns.cu", tmp_path / "faulty", [edit])

    def work() -> None:
        for seed in (0, 1, 2):
            check_sums(faulty, "float32", seed)
        check_normalized(faulty, "mixed")
        check_normalized(faulty, "float32")  # noise in float16 is zero

    with pytest.raises((AssertionError, KernelFault)):
        work()
