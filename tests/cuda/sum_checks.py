"""What kernels of sums, factors and means must compute, on tables that reach every loop and every bound."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import test_rows as rows
from . import test_sums as sums
from .emulator.library import Emulated
from .jobs import LAMB_ARGUMENTS, MOST, PIECE, THREADS, Rate, lamb_direction, lamb_moments, table
from .stacks import Stack

F32, F64 = torch.float32, torch.float64
NAN = float("nan")
#: Sums of exact products in float64: n terms in any order are off by n roundoffs of their sum.
EXACT = PIECE * 2.0**-53
#: One rounding to float32, of a value that float64 arithmetic left.
ONCE = 2.0**-24 * (1 + 1e-6)


@dataclass(frozen=True)
class Kernels:
    """Kernels that compute sums; one source may differ from the package's."""

    sums: Emulated
    totals: Emulated


def _run(length: int, shift: int, size: float = 1.0) -> torch.Tensor:
    """Numbers off their alignment, in the middle of NaN."""
    whole = torch.full((length + 128 + shift,), NAN)
    return whole[64 + shift : 64 + shift + length].copy_(torch.randn(length) * size)


def check_squares(kernels: Kernels) -> None:
    """Sums over any length and alignment, whose squares may be above float32, are those of float64."""
    torch.manual_seed(0)
    runs = [
        _run(length, shift, size)
        for length, shift, size in (
            *((1, 0, 1.0), (PIECE + 5, 0, 1.0), (0, 0, 1.0), (2 * PIECE, 0, 1e25)),
            *((1023, 1, 1e-3), (PIECE - 2, 1, 1.0), (4 * THREADS + 3, 0, 1.0)),
        )
    ]
    total = sums.summed(kernels, "sum_of_squares", "few", [[x] for x in runs], 1, factor=-0.5)
    wanted = torch.stack([x.double().square().sum() / 4 for x in runs])
    torch.testing.assert_close(total[:, 0], wanted, rtol=EXACT, atol=0)


def check_norms(kernels: Kernels, seed: int = 0) -> None:
    """Both sums of LAMB of every job."""
    torch.manual_seed(1)
    jobs = [
        [*(_run(length, shift) for _ in range(3)), _run(length, shift).abs_()]
        for length, shift in ((7, 1), (PIECE + 9, 0), (900, 0), (1, 0), (300, 0))
    ]
    expected = []
    for operands in jobs:
        x, g, m, v = [operand.double() for operand in operands]
        lamb_moments([x, g, m, v], LAMB_ARGUMENTS)
        expected += [x.square().sum(), lamb_direction(x, m, v, LAMB_ARGUMENTS).square().sum()]
    found = sums.summed(kernels, "lamb_norms_only", "few", jobs, 2, seed=seed)
    wanted = torch.stack(expected).view(-1, 2)
    torch.testing.assert_close(found[:, 0], wanted[:, 0], rtol=EXACT, atol=0)
    torch.testing.assert_close(found[:, 1], wanted[:, 1], rtol=1e-6, atol=0)  # float32 before it is summed


def check_momentum(kernels: Kernels, form: str = "few") -> None:
    """The momentum and its update, and the sums of the squares of what is stored of that."""
    torch.manual_seed(8)
    arithmetic = F64 if form == "wide" else F32
    for stored, nesterov in ((torch.bfloat16, 1), (torch.float16, 0), (F32, 1), (F64, 1)):
        jobs = [
            [_run(n, shift).bfloat16(), _run(n, shift).to(arithmetic), torch.full((n,), NAN, dtype=stored)]
            for n, shift in ((5, 1), (PIECE + 9, 0), (1023, 0))
        ]
        before = [[x.double().clone() for x in job[:2]] for job in jobs]
        scalars = (0.95, -0.5, float(nesterov), *[0.0] * 9)
        found = sums.summed(kernels, "momentum_squares", form, jobs, 1, scalars=scalars)
        for (g, m), job, total in zip(before, jobs, found, strict=True):
            m = 0.95 * m - 0.5 * g
            u = 0.95 * m - 0.5 * g if nesterov else m
            for x, want in ((job[1], m), (job[2], u)):
                epsilon = torch.finfo(x.dtype).eps + torch.finfo(arithmetic).eps
                torch.testing.assert_close(x.double(), want, rtol=epsilon, atol=4 * epsilon)
            torch.testing.assert_close(total[0], job[2].double().square().sum(), rtol=EXACT, atol=0)


def check_pieces(totals: Emulated) -> None:
    """Totals of jobs with no piece, one, a few, and more than a block has threads."""
    torch.manual_seed(2)
    counts = (3, 0, 1, THREADS + 44, 2 * THREADS, 7)
    partial = torch.randn(sum(counts), 2, dtype=F64) * 1e200  # above float32
    found = torch.full((len(counts) + 1, 2), NAN, dtype=F64)
    what, end = sums.PieceSums(partial.data_ptr(), -0.5, sums=2), 0
    expected = []
    for i, count in enumerate(counts):
        expected.append(partial[end : end + count].sum(0) / 4)
        end += count
        what.total[i], what.end[i] = found[i].data_ptr(), end
    sums.launch(totals, "add_pieces", what, len(counts))
    torch.testing.assert_close(found[:-1], torch.stack(expected), rtol=1e-12, atol=1e188)
    assert bool(found[-1].isnan().all())


def check_numbers(totals: Emulated) -> None:
    """The total of numbers in many places, added to what is there or not."""
    torch.manual_seed(3)
    numbers = [torch.randn(count, dtype=F64) * 1e200 for count in (1, THREADS, 0, 2 * THREADS + 33)]
    for adds in (0, 1):
        total = torch.tensor([2e200, NAN], dtype=F64)
        what = sums.Addends(total.data_ptr(), len(numbers), adds)
        for to, part in zip(what.part, numbers, strict=False):
            to.first, to.count = part.data_ptr(), len(part)
        sums.launch(totals, "add_numbers", what, 1)
        wanted = torch.cat(numbers).sum() + 2e200 * adds
        torch.testing.assert_close(total[0], wanted, rtol=0, atol=1e188)
        assert bool(total[1].isnan())


def check_stacks(pass_: Emulated, totals: Emulated) -> None:
    """Sums by row, by column, by matrix and of all, of stacks of several matrices with several tiles each."""
    torch.manual_seed(4)
    made = []
    for shape in ((3, 140, 300), (2, 1, 129), (1, 300, 5), (4, 3, 3)):
        parts = [rows.guarded(shape, F32, shift)[0] for shift in (0, 1)]
        made.append(Stack(parts, summed=True))
    rows.launch(pass_, totals, "gradient_and_parameter_squares", "few", made, (0.5,))
    for what in made:
        squares = (0.5 * what.operands[0].double()).square()
        total = what.operands[1].double().square().sum().reshape(1)
        wanted = [squares.sum(2), squares.sum(1), squares.sum((1, 2))]
        for own, want in zip(what.sums, wanted, strict=False):
            torch.testing.assert_close(own, want, rtol=1e-6, atol=0)  # squares are float32
        torch.testing.assert_close(what.sums[-1], total, rtol=EXACT, atol=0)


def check_lamb_factors(factors: Emulated) -> None:
    """Factors of more jobs than a block has threads; a NaN norm propagates."""
    torch.manual_seed(5)
    count = THREADS + 44
    norms = torch.rand(count, 2, dtype=F64) + 0.1
    norms[7, 0], norms[8, 1], norms[9] = 0.0, 0.0, NAN
    steps = torch.arange(1.0, count + 1)
    group = torch.tensor([101.0], dtype=F64)
    out = torch.full((count + 1, 4), NAN, dtype=F64)
    what = sums.LambFactors(Rate(), out.data_ptr(), group.data_ptr(), 3.0, -0.5, 0.1, NAN, NAN, 1.25)
    what.beta1, what.beta2, what.count, what.adapts, what.corrects_moments = 0.9, 0.98, count, 1, 1
    for i in range(count):
        what.job[i].norms, what.job[i].steps = norms[i].data_ptr(), steps[i].data_ptr()
    sums.launch(factors, "lamb_factors", what, 2)
    x, u = norms.sqrt().unbind(1)
    ratio = torch.where((x <= 0) | (u <= 0), 1.0, x / u)
    ratio = torch.where(ratio > 1.25, 1.25, ratio)
    counted = steps.double()
    first, second = 1 / (1 - 0.9**counted), (1 - 0.98**counted).rsqrt()
    wanted = torch.stack([first, second, torch.full_like(x, -0.5 * 3.0 / 101.0**0.5), 0.1 * ratio], dim=1)
    torch.testing.assert_close(out[:-1], wanted, rtol=1e-12, atol=0, equal_nan=True)
    assert bool(out[-1].isnan().all())


def check_update_factors(factors: Emulated) -> None:
    """The same of Adafactor's factors."""
    torch.manual_seed(6)
    count = THREADS + 3
    updates, params = torch.rand(2, count, dtype=F64) * 30
    updates[4], updates[5], params[6] = NAN, 1e-9, 0.0
    out = torch.full((count + 1, 2), NAN, dtype=F64)
    what = rows.UpdateFactors(Rate(), out.data_ptr(), -0.5, 1.0, 1e-3, 0.1, count, 0)
    sizes = torch.arange(1.0, count + 1, dtype=F64)
    for i in range(count):
        job = rows.UpdateJob(updates[i].data_ptr(), params[i].data_ptr(), None, 0.02, float(sizes[i]))
        what.job[i] = job
    sums.launch(factors, "update_factors", what, 2)
    rate = 0.02 * (params / sizes).sqrt().clamp_min(1e-3)
    ratio = (updates / sizes).sqrt()
    wanted = torch.stack([rate * -0.5 / torch.where(ratio < 1.0, 1.0, ratio), rate * 0.1], dim=1)
    torch.testing.assert_close(out[:-1], wanted, rtol=1e-12, atol=0, equal_nan=True)
    assert bool(out[-1].isnan().all())


def check_means(means: Emulated, name: str) -> None:
    """Running means, rounded once: by the host's share, and by the steps that the device counts."""
    torch.manual_seed(7)
    lengths, counts = (5, PIECE + 77, 1022, 2 * PIECE), (3.0, 12.0, 700.0, 5.0)
    epsilon, exponent, factor, most = 1e-3, -0.8, -0.5, 1e300
    for on_device in (False, True):
        runs = [[_run(n, s).abs_(), _run(n, s)] for n, s in zip(lengths, (0, 0, 1, 0), strict=True)]
        before = [[x.double() for x in run] for run in runs]
        steps = [torch.tensor(float(7 + i)) for i in range(len(runs))]
        shares = [float(step) ** exponent for step in steps]
        own = [(NAN if on_device else share, n) for share, n in zip(shares, counts, strict=True)]
        scalars = (epsilon, exponent, factor, most, *[0.0] * 8)
        made, blocks = table(MOST["few"], runs, scalars, own, steps if on_device else ())
        means.launch(f"{name}_few", made, blocks=blocks, threads=THREADS, shared_bytes=0, readable=[])
        for (m, x), (old, new), share, n in zip(runs, before, shares, counts, strict=True):
            target = new / n if name == "means" else (factor * new).square()
            want = (1 - share) * old + share * (target + epsilon)
            off = ((m.double() - want).abs() - ONCE * want.abs() - 1e-15).max()
            assert off <= 0, f"{name}: {off:e} above one rounding"
            assert torch.equal(x.double(), new)
            around = m.as_strided((len(m) + 128,), (1,), m.storage_offset() - 64)
            assert int(around.isnan().sum()) == 128, f"{name}: memory around it was written"
