"""The kernels that choose rows or columns on the host emulator, against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from .emulator.library import Emulated, KernelFault
from .jobs import THREADS, TYPES, Rate
from .lines import (
    ChoiceJob,
    ChoiceOf,
    Chosen,
    SliceJob,
    SliceMove,
    SumJob,
    SumOf,
    blocks_of,
    inside,
    launch,
    untouched,
)

F16, BF16, F32, F64 = TYPES
STRIP, CHUNK, MOVED = 128, 256, 32
ROUNDOFF = {F16: 2.0**-11, BF16: 2.0**-8, F32: 2.0**-24, F64: 2.0**-53}
SHAPES = [(1, 1), (40, 33), (3, 2100), (600, 130), (257, 5)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated("select.cu", tmp_path_factory.mktemp("select"))


def check_sums(kernels: Emulated, dtype: torch.dtype, rows: bool, absolute: bool, seed: int = 0) -> None:
    torch.manual_seed(1)
    made = [inside(torch.randn(shape), dtype, shift) for shift, shape in enumerate(SHAPES)]
    sums = [torch.full((x.shape[0 if rows else 1],), float("nan"), dtype=F64) for x, _ in made]
    pieces = [-(-x.shape[1] // STRIP) * -(-x.shape[0] // CHUNK) for x, _ in made]
    partial = [torch.full((count * STRIP,), float("nan"), dtype=F64) for count in pieces]
    jobs = []
    for (x, _), out, part in zip(made, sums, partial, strict=True):
        jobs.append(
            SumJob(x.data_ptr(), out.data_ptr(), part.data_ptr(), x.stride(0), *x.shape, 0, TYPES[dtype])
        )
    head = SumOf(absolute)
    if rows:
        launch(kernels, "slice_rows", head, [(j, blocks_of(j.rows, j.cols)) for j in jobs], seed)
    else:
        launch(kernels, "slice_columns", head, list(zip(jobs, pieces, strict=True)), seed)
        launch(kernels, "slice_chunks", head, [(j, -(-j.cols // THREADS)) for j in jobs], seed)
    for (x, _), out in zip(made, sums, strict=True):
        wide = x.double().abs() if absolute else x.double().square()
        torch.testing.assert_close(out, wide.sum(1 if rows else 0), rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("absolute", [True, False])
def test_sums_of_rows_and_columns_equal_float64(
    kernels: Emulated, dtype: torch.dtype, rows: bool, absolute: bool
) -> None:
    check_sums(kernels, dtype, rows, absolute)


def largest(scores: Tensor, wanted: int, room: int) -> Tensor:
    """What is chosen: by float32 values, NaN before all, of equal ones the first."""
    narrow = scores.float()
    order = sorted(
        range(len(scores)),
        key=lambda i: (not bool(narrow[i].isnan()), -float(narrow[i].nan_to_num(0, 3e38)), i),
    )
    found = torch.tensor(sorted(order[:wanted]), dtype=F64) + 1
    return torch.cat([found, torch.zeros(room - len(found), dtype=F64)])


def score_sets() -> list[Tensor]:
    torch.manual_seed(2)
    ties = torch.randint(0, 4, (1000,)).double()
    broken = torch.rand(700, dtype=F64)
    broken[[3, 500, 501]] = float("nan")
    broken[[2, 600]] = float("inf")
    close = 1.0 + torch.randint(0, 8, (300,)).double() * 2.0**-26  # equal in float32, or neighbours
    wild = torch.randn(513, dtype=F64) * 10.0 ** torch.randint(-50, 50, (513,)).double()
    return [
        torch.rand(1, dtype=F64),
        torch.rand(7, dtype=F64),
        torch.rand(4096, dtype=F64),
        torch.rand(65537, dtype=F64),
        torch.zeros(50, dtype=F64),
        ties,
        broken,
        close,
        wild,
    ]


def check_choice(kernels: Emulated, wanted: int, seed: int) -> None:
    scores = score_sets()
    chosen = [torch.full((wanted,), float("nan"), dtype=F64) for _ in scores]
    jobs = [
        ChoiceJob(x.data_ptr(), to.data_ptr(), len(x), wanted) for x, to in zip(scores, chosen, strict=True)
    ]
    launch(kernels, "slice_choice", ChoiceOf(wanted), [(job, 1) for job in jobs], seed)
    for x, found in zip(scores, chosen, strict=True):
        assert torch.equal(found, largest(x, min(wanted, len(x)), wanted)), f"{wanted} of {len(x)}"


@pytest.mark.parametrize("wanted", [1, 2, 17, 250, 1024, 65537])
def test_choice_takes_the_largest_scores_in_ascending_order(kernels: Emulated, wanted: int) -> None:
    check_choice(kernels, wanted, seed=wanted)


Numbers = tuple[list[int], int]
CHOICES: list[Numbers] = [([1, 3, 4, 9], -1), ([2, 0, 0], -1), ([3, 7, 8, 12, 40], 5), ([1], 0), ([0, 0], -1)]


def sliced(
    columns: bool, numbers: Numbers, length: int, dtypes: tuple[torch.dtype, torch.dtype], shift: int
) -> tuple[SliceJob, list[Tensor]]:
    """A matrix with 9 slices or more, U for the chosen ones, and a job for both."""
    chosen = torch.tensor(numbers[0], dtype=F64)
    first, slices = numbers[1], 9
    own = slices if first >= 0 else len(chosen)
    shapes = [(slices, length), (own, length)]
    if columns:
        shapes = [(length, slices), (length, own)]
    (x, x_whole), (u, u_whole) = [
        inside(torch.randn(shape), dtype, shift * at)
        for at, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    job = SliceJob(x.data_ptr(), u.data_ptr(), Chosen.of(chosen, first), x.stride(0), u.stride(0))
    (job.rows, job.cols), (job.update_rows, job.update_cols) = x.shape, u.shape
    job.type, job.update_type = TYPES[dtypes[0]], TYPES[dtypes[1]]
    return job, [x, x_whole, u, u_whole, chosen]


def pairs(numbers: Numbers) -> list[tuple[int, int]]:
    """A slice of the matrix and one of U."""
    chosen, first = numbers
    if first < 0:
        return [(n - 1, i) for i, n in enumerate(chosen) if n]
    return [(n - 1 - first,) * 2 for n in chosen if 0 <= n - 1 - first < 9]


def blocks(columns: bool, x: Tensor) -> int:
    rows, cols = x.shape
    return -(-rows // MOVED) * -(-cols // THREADS) if columns else blocks_of(rows, cols)


def run(
    kernels: Emulated,
    kernel: str,
    move: SliceMove,
    dtypes: tuple[torch.dtype, torch.dtype],
    unit: float = 1.0,
) -> None:
    torch.manual_seed(5)
    columns = bool(move.columns)
    cases = [(numbers, length) for numbers in CHOICES for length in (1, 37, 2060)]
    made = [sliced(columns, numbers, length, dtypes, at % 3) for at, (numbers, length) in enumerate(cases)]
    before = [(x.double().clone(), u.double().clone()) for _, (x, _, u, *_) in made]
    walked = 0 if kernel == "slice_apply" else 2
    launch(kernels, kernel, move, [(job, blocks(columns, tensors[walked])) for job, tensors in made])
    for (numbers, _), (_, (x, x_whole, u, u_whole, _)), (old_x, old_u) in zip(
        cases, made, before, strict=True
    ):
        assert untouched(x, x_whole)
        assert untouched(u, u_whole)
        x, u = (y.double().T if columns else y.double() for y in (x, u))
        old_x, old_u = (y.T if columns else y for y in (old_x, old_u))
        want_x, want_u = old_x.clone(), old_u.clone()
        decay = move.decay * unit
        if kernel == "slice_apply":
            want_x *= 1 - decay
        elif not move.give_back:
            want_u.zero_()
        for ours, theirs in pairs(numbers):
            if kernel == "slice_apply":
                held = (old_x[ours] * old_u[theirs] < 0).double() * move.cautious
                kept = 1 - decay * (1 - held)
                want_x[ours] = old_x[ours] * kept - move.rate * unit * old_u[theirs]
            elif move.give_back:
                want_x[ours] = old_u[theirs]
            else:
                want_u[theirs] = old_x[ours]
                want_x[ours] = old_x[ours] * move.keep
        for found, want, dtype in ((x, want_x, dtypes[0]), (u, want_u, dtypes[1])):
            arithmetic = 8 * ROUNDOFF[F64 if F64 in dtypes else F32]
            bound = 1.01 * ROUNDOFF[dtype] * want.abs() + arithmetic + 1e-7 * (dtype == F16)
            assert ((found - want).abs() <= bound).all(), f"{kernel} of {numbers}, {tuple(found.shape)}"


DTYPES = [(F32, F32), (BF16, F32), (F32, BF16), (F16, F16), (F64, F64)]


@pytest.mark.parametrize("columns", [0, 1])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("give_back", [0, 1])
def test_chosen_slices_are_moved(
    kernels: Emulated, columns: int, dtypes: tuple[torch.dtype, torch.dtype], give_back: int
) -> None:
    run(kernels, "slice_take", SliceMove(Rate(), 0.0, 0.0, 0.75, 0, columns, give_back), dtypes)


@pytest.mark.parametrize("columns", [0, 1])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize(("decay", "cautious"), [(0.1, 0), (0.1, 1), (0.0, 1)])
@pytest.mark.parametrize("unit", [None, 0.5])
def test_chosen_slices_are_applied_and_the_others_decay(
    kernels: Emulated,
    columns: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    decay: float,
    cautious: int,
    unit: float | None,
) -> None:
    rate = None if unit is None else torch.tensor(unit, dtype=BF16)
    move = SliceMove(Rate.of(rate), 0.3, decay, float("nan"), cautious, columns, 0)
    run(kernels, "slice_apply", move, dtypes, unit or 1.0)


FAULTS: dict[str, tuple[str, ...]] = {
    "sums are read before all warps left theirs": (
        "if (rank % 32 == 0) warps[rank / 32] = x;\n        __syncthreads();",
        "if (rank % 32 == 0) warps[rank / 32] = x;",
        "lines.cuh",
    ),
    "sums are left while those before are read": (
        "__syncthreads();  // the sums before are read",
        "",
        "lines.cuh",
    ),
    "slices count from 0": (
        "static_cast<int>(number(slice)) - 1 : -1",
        "static_cast<int>(number(slice)) : -1",
        "lines.cuh",
    ),
    "the end of the list is a number": (
        "if (found == 0 || found >= wanted)",
        "if (found >= wanted)",
        "lines.cuh",
    ),
    "ties are taken from the end": (
        "key == last && equal_before < rest",
        "key == last && equal_before >= all_equal - rest",
    ),
    "a digit is counted while it is summed": (
        "sums[thread] = all;\n        }\n        __syncthreads();\n        int digit",
        "sums[thread] = all;\n        }\n        int digit",
    ),
    "a scan without its first barrier": (
        "const int other = thread >= step ? sums[thread - step] : 0;\n        __syncthreads();",
        "const int other = thread >= step ? sums[thread - step] : 0;",
    ),
    "NaN is the smallest": ("return 0xFFFFFFFF;", "return 0;"),
    "places are not filled up": (
        "for (int i = wanted + thread; i < job.room; i += THREADS)",
        "for (int i = wanted + thread; i < 0; i += THREADS)",
    ),
    "chunks overlap": ("min((chunk + 1) * CHUNK, job.rows)", "min((chunk + 1) * CHUNK + 1, job.rows)"),
    "other slices do not decay": (
        "from < 0 ? x[a] * keep : step(x[a], u[a])",
        "from < 0 ? x[a] : step(x[a], u[a])",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault: str, tmp_path: Path) -> None:
    old, new, *file = FAULTS[fault]
    kernels = Emulated("select.cu", tmp_path / "faulty", [(file[0] if file else "select.cu", old, new)])

    def work() -> None:
        for seed in range(3):
            check_choice(kernels, 250, seed)
            check_sums(kernels, F32, rows=False, absolute=True, seed=seed)
            run(kernels, "slice_apply", SliceMove(Rate(), 0.3, 0.1, float("nan"), 0, 1, 0), (F32, F32))
            run(kernels, "slice_take", SliceMove(Rate(), 0.0, 0.0, 0.75, 0, 1, 0), (F32, F32))
        for seed in range(9):  # few orders of the warps show a missing barrier
            check_sums(kernels, F32, rows=True, absolute=True, seed=seed)

    with pytest.raises((AssertionError, KernelFault)):
        work()
