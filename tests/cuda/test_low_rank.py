"""The kernels of the optimizers with low-rank moments on the host emulator, against float64."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from oxidion._oxidion import fill_signs
from support.rounding import philox

from .emulator.library import Emulated, KernelFault
from .jobs import THREADS, TYPES, Rate
from .lines import (
    ChannelJob,
    ChannelOf,
    GuardJob,
    GuardOf,
    NormalJob,
    NormalScale,
    SignJob,
    SignOf,
    blocks_of,
    inside,
    launch,
    untouched,
)

F16, BF16, F32, F64 = TYPES
ROUNDOFF = {F16: 2.0**-11, BF16: 2.0**-8, F32: 2.0**-24, F64: 2.0**-53}
NUMBERS, GROWTH, TINY, NEGLIGIBLE = 4096, 1.01, 1e-8, 2.0**-11.5
SHAPES = [(1, 1), (40, 33), (3, 2100), (70, 64)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated("low_rank.cu", tmp_path_factory.mktemp("low_rank"))


def normals(
    kernels: Emulated, first: int, count: int, dtype: torch.dtype = F32, tag: int = 7
) -> torch.Tensor:
    whole = torch.full((1, count + 16), float("nan"), dtype=dtype)
    out = whole[0, 8 : 8 + count]
    job = NormalJob(out.data_ptr(), (1, 2, 3, tag), first, count, 0, TYPES[dtype])
    launch(kernels, "low_rank_normals", NormalScale(0.5), [(job, -(-(count + 6) // NUMBERS))])
    assert untouched(out, whole)
    return out.clone()


def test_normals_do_not_depend_on_the_part_and_are_normal(kernels: Emulated) -> None:
    whole = normals(kernels, 0, 3 * NUMBERS + 5)
    for first, count in ((0, 1), (3, 2), (5, NUMBERS), (NUMBERS - 1, 2 * NUMBERS), (7, NUMBERS + 3)):
        assert torch.equal(normals(kernels, first, count), whole[first : first + count])
    assert torch.equal(normals(kernels, 2, 50, BF16), whole[2:52].bfloat16())
    assert not (normals(kernels, 0, 64, tag=8) == whole[:64]).any()
    # Five standard errors of mean and variance; half of a standard normal number.
    assert abs(whole.mean()) < 2.5 / len(whole) ** 0.5
    assert abs(whole.var() - 0.25) < 5 * 0.25 * (2 / len(whole)) ** 0.5


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 7), (300, 8), (257, 20), (40, 145)])
def test_signs_are_those_of_the_cpu(kernels: Emulated, rows: int, cols: int) -> None:
    seed, index, tag, step = 3, 1, 7, 5
    expected = torch.zeros(rows, cols, dtype=F64)
    fill_signs(expected, seed, 9, tag, step, index)
    # The words that name the stream: a block of the generator, keyed by the seed.
    words = philox([9, 0, step, 0], [seed, 0])
    words[3] ^= tag
    whole = torch.full((1, rows * cols + 16), float("nan"), dtype=F64)
    out = whole[0, 8:-8].zero_()
    job = SignJob(out.data_ptr(), (ctypes.c_uint * 4)(*words), index * rows, rows, cols, 0)
    launch(kernels, "low_rank_signs", SignOf(), [(job, -(-rows // THREADS))])
    assert untouched(out, whole)
    assert torch.equal(out.view(rows, cols), expected)
    assert (expected.abs().sum(dim=1) == min(cols, 8)).all()
    assert rows * cols < 9 or 0 < (expected < 0).sum() < expected.count_nonzero()


@pytest.mark.parametrize("dtype", [F32, F64, BF16])
def test_only_a_basis_of_zeros_clears(kernels: Emulated, dtype: torch.dtype) -> None:
    bases = [
        torch.zeros(30, 20),
        torch.randn(3, 5),
        torch.zeros(30, 20),
        torch.zeros(1, 1),
        torch.zeros(9, 70),
    ]
    bases[2][29, 19], bases[4][8, 0] = 1e-20, float("nan")
    made = [inside(basis, dtype)[0] for basis in bases]
    outs = [torch.full((700,), float("nan"), dtype=dtype) for _ in made]
    jobs = [
        GuardJob(x.data_ptr(), out.data_ptr(), x.stride(0), 700, *x.shape, 0, TYPES[dtype], TYPES[dtype])
        for x, out in zip(made, outs, strict=True)
    ]
    launch(kernels, "low_rank_guard", GuardOf(), [(job, 1) for job in jobs])
    assert [bool((out == 0).all()) for out in outs] == [True, False, False, True, False]
    assert [bool(out.isnan().all()) for out in outs] == [False, True, True, False, True]


def check(
    kernels: Emulated, dtypes: tuple[torch.dtype, torch.dtype], *, by_row: int, common: bool, head: ChannelOf
) -> None:
    torch.manual_seed(4)
    lr = torch.tensor(0.5, dtype=F16)
    unit = 0.5 if head.cautious else 1.0
    head.by_row, head.unit = by_row, Rate.of(lr if head.cautious else None)
    jobs, made = [], []
    for at, shape in enumerate(SHAPES):
        x, x_whole = inside(torch.randn(shape), dtypes[0], at % 2)
        g, _ = inside(torch.randn(shape), dtypes[1])
        channels = shape[0 if by_row else 1]
        before, after = torch.rand(2, channels, dtype=F64)
        factors, norms, total = before.clone(), torch.zeros(2, dtype=F64), torch.zeros(1, dtype=F64)
        last, step = torch.tensor([0.01 * 10**at if at else 0.0]), torch.zeros(1, dtype=F64)
        blocks = blocks_of(*shape)
        partial = torch.full((blocks,), float("nan"), dtype=F64)
        job = ChannelJob(x.data_ptr(), g.data_ptr(), factors.data_ptr(), norms.data_ptr() if common else None)
        job.squares, job.total, job.last, job.step = (y.data_ptr() for y in (after, total, last, step))
        job.rate, job.stride, job.grad_stride = 0.3, x.stride(0), g.stride(0)
        (job.rows, job.cols), job.channels, job.pieces = shape, channels, blocks
        job.type, job.grad_type, job.last_type = TYPES[dtypes[0]], TYPES[dtypes[1]], TYPES[F32]
        jobs.append((job, blocks))
        made.append((x, x_whole, g, before, after, factors, norms, total, last, step, partial))
    old = [(x.double().clone(), last.double().item()) for x, *_, last, _, _ in made]
    one = [(job, 1) for job, _ in jobs]
    launch(kernels, "low_rank_ratios", head, one)
    for (job, _), (*_, partial) in zip(jobs, made, strict=True):
        job.squares = partial.data_ptr()
    launch(kernels, "low_rank_measure", head, jobs)
    launch(kernels, "low_rank_total", head, one)
    launch(kernels, "low_rank_limit", head, one)
    launch(kernels, "low_rank_step", head, jobs)
    factor = abs(head.factor)
    for at, ((x, x_whole, g, before, after, factors, norms, total, last, _, _), (old_x, was)) in enumerate(
        zip(made, old, strict=True)
    ):
        if common:
            torch.testing.assert_close(norms[0], after.sum())
            torch.testing.assert_close(norms[1], (factor**2 * before).sum())
            f = (norms[0].sqrt() / (norms[1].sqrt() + TINY)).expand(len(before))
        else:
            f = after.sqrt() / (factor * before.sqrt() + TINY)
            torch.testing.assert_close(factors, f, rtol=1e-14, atol=0)
        update = g.double() * (f[:, None] if by_row else f)
        torch.testing.assert_close(total[0], update.square().sum(), rtol=1e-12, atol=0)
        norm = update.norm().item() * factor
        limiter = 1.0 if was <= NEGLIGIBLE * norm else max(norm / (was + TINY), GROWTH) / GROWTH
        assert abs(last.item() - norm / limiter) <= 1e-6 * norm
        u = 0.3 * unit / limiter * head.factor * update
        y = old_x - u if head.late else old_x
        held = (y * u < 0).double() * head.cautious
        kept = y * (1 - head.decay * unit * (1 - held))
        want = kept if head.late else kept - u
        arithmetic = 8 * ROUNDOFF[F64 if F64 in dtypes else F32]
        error = (x.double() - want).abs() - 1.01 * ROUNDOFF[dtypes[0]] * want.abs()
        bound = arithmetic * (1 + old_x.abs() + u.abs()) + 1e-7 * (dtypes[0] == F16)
        assert (error <= bound).all(), f"matrix {at}"
        assert untouched(x, x_whole)


HEADS = [(1.0, 0.0, 0, 0), (-0.5, 0.1, 0, 0), (0.5, 0.1, 1, 0), (-1.0, 0.1, 0, 1), (1.0, 0.1, 1, 1)]


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (F16, F32), (F64, F64)])
@pytest.mark.parametrize("by_row", [0, 1])
@pytest.mark.parametrize("common", [False, True])
def test_channels_equal_their_equations(
    kernels: Emulated, dtypes: tuple[torch.dtype, torch.dtype], by_row: int, common: bool
) -> None:
    for factor, decay, cautious, late in HEADS:
        head = ChannelOf(Rate(), factor, decay, 0, cautious, late)
        check(kernels, dtypes, by_row=by_row, common=common, head=head)


FAULTS = {
    "the limiter forgets the norm before": (
        "low_rank.cu",
        "growth = norm / (before + TINY);",
        "growth = norm;",
    ),
    "a block leaves what one warp has": (
        "low_rank.cu",
        "sum = block.sum(sum);",
        "sum = Team(false).sum(sum);",
    ),
    "late decay comes first": ("low_rank.cu", "const C y = late ? x - u : x;", "const C y = x;"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault: str, tmp_path: Path) -> None:
    kernels = Emulated("low_rank.cu", tmp_path / "faulty", [FAULTS[fault]])
    with pytest.raises((AssertionError, KernelFault)):
        check(kernels, (F32, F32), by_row=1, common=False, head=ChannelOf(Rate(), 1.0, 0.1, 1, 0, 1))
