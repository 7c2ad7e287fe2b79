"""Sums over elements on the host emulator, and the factors that follow from them, against float64."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from .emulator.library import Emulated
from .jobs import (
    LAMB,
    LAMB_ARGUMENTS,
    LIVE_LAMB,
    MOST,
    PASSES,
    PIECE,
    THREADS,
    Rate,
    lamb_direction,
    lamb_moments,
    pieces,
    table,
)
from .test_updates import BF16, F32, F64, make

FACTORS = 384  # jobs of one launch


class SourceKernels:
    """The kernels of all three sources."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        sources = ("sums", "totals", "factors")
        self.sums, self.totals, self.factors = (
            Emulated(f"{source}.cu", tmp_path_factory.mktemp(source)) for source in sources
        )


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> SourceKernels:
    return SourceKernels(tmp_path_factory)


def launch(kernels: Emulated, name: str, what: ctypes.Structure, blocks: int, seed: int = 0) -> None:
    kernels.launch(name, what, blocks=blocks, threads=THREADS, shared_bytes=0, readable=[], seed=seed)


class PieceSums(ctypes.Structure):
    """Mirror of ``PieceSums``."""

    _fields_ = (
        ("partial", ctypes.c_void_p),
        ("factor", ctypes.c_double),
        ("total", ctypes.c_void_p * MOST["many"]),
        ("end", ctypes.c_uint * MOST["many"]),
        ("sums", ctypes.c_int),
    )


class Numbers(ctypes.Structure):
    """Mirror of ``Numbers``."""

    _fields_ = (("first", ctypes.c_void_p), ("count", ctypes.c_longlong))


class Addends(ctypes.Structure):
    """Mirror of ``Addends``."""

    _fields_ = (
        ("total", ctypes.c_void_p),
        ("count", ctypes.c_int),
        ("adds", ctypes.c_int),
        ("part", Numbers * MOST["many"]),
    )


class LambJob(ctypes.Structure):
    """Mirror of ``LambJob``."""

    _fields_ = (
        ("norms", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
        ("correction", ctypes.c_double * 2),
    )


class LambFactors(ctypes.Structure):
    """Mirror of ``LambFactors``."""

    _fields_ = (
        ("rate", Rate),
        ("out", ctypes.c_void_p),
        ("group", ctypes.c_void_p),
        *((name, ctypes.c_double) for name in ("max_grad_norm", "grad_factor", "lr", "low", "high")),
        *((name, ctypes.c_double) for name in ("trust_clip", "beta1", "beta2")),
        *((name, ctypes.c_int) for name in ("count", "adapts", "corrects_moments", "corrects_step")),
        ("job", LambJob * FACTORS),
    )


def summed(
    kernels: SourceKernels,
    name: str,
    form: str,
    runs: Sequence[list[Tensor]],
    count: int,
    factor: float = 1,
    seed: int = 0,
    scalars: Sequence[float] = LAMB,
) -> Tensor:
    """The sums of each job, by both kernels."""
    live = [torch.tensor(LIVE_LAMB, dtype=F64) for _ in runs]
    made, blocks = table(MOST[form], runs, scalars, [(0.0, 0.0)] * len(runs), live=live)
    partial = torch.full((blocks * count,), float("nan"), dtype=F64)
    fields = (("jobs", type(made)), ("partial", ctypes.c_void_p))
    jobs = type("SumJobs", (ctypes.Structure,), {"_fields_": fields})(made, partial.data_ptr())
    assert ctypes.sizeof(jobs) <= 32764
    launch(kernels.sums, f"{name}_{form}", jobs, blocks, seed)
    total = torch.full((len(runs), count), float("nan"), dtype=F64)
    what = PieceSums(partial.data_ptr(), factor, sums=count)
    for i in range(len(runs)):
        what.total[i], what.end[i] = total[i].data_ptr(), sum(pieces(len(run[0])) for run in runs[: i + 1])
    launch(kernels.totals, "add_pieces", what, len(runs), seed)
    return total


@pytest.mark.parametrize(
    ("name", "count"), [("sum_of_squares", 1), ("lamb_norms", 2), ("lamb_norms_only", 2)]
)
@pytest.mark.parametrize("form", ["few", "many", "wide"])
def test_sums_equal_float64_and_moments_are_written_where_due(
    kernels: SourceKernels, name: str, count: int, form: str
) -> None:
    case = PASSES["lamb"][0]
    of = (F64,) * 4 if form == "wide" else (F32, BF16, F32, F32)
    runs = [make("lamb", case, length, of, shift) for length, shift in ((5, 0), (3 * PIECE + 1, 0), (700, 1))]
    before = [[x.clone() for x, _ in operands] for operands in runs]
    operands = [[x for x, _ in run] for run in runs]
    total = summed(kernels, name, form, operands if count == 2 else [run[:1] for run in operands], count)
    for (x, *rest), now, sum_ in zip(before, operands, total, strict=True):
        wide = [y.double().clone() for y in (x, *rest)]
        expected = [wide[0].square().sum()]
        if count == 2:
            lamb_moments(wide, LAMB_ARGUMENTS)
            expected.append(lamb_direction(wide[0], wide[2], wide[3], LAMB_ARGUMENTS).square().sum())
        torch.testing.assert_close(
            sum_, torch.stack(expected), rtol=1e-6 if form != "wide" else 1e-13, atol=0
        )
        stored = name == "lamb_norms"
        for n in range(1, len(now)):
            if n == 1 or not stored:
                assert torch.equal(now[n], [x, *rest][n])
            else:
                torch.testing.assert_close(now[n].double(), wide[n], rtol=1e-6, atol=1e-7)


def test_sums_depend_on_the_elements_alone(kernels: SourceKernels) -> None:
    x, none = torch.randn(2 * PIECE + 100), torch.zeros(0)
    alone = summed(kernels, "sum_of_squares", "few", [[x]], 1)
    together = summed(kernels, "sum_of_squares", "few", [[torch.randn(50)], [none], [x], [none]], 1)
    assert torch.equal(alone[0], together[2])
    assert (together[1], together[3]) == (0, 0)
    assert torch.equal(summed(kernels, "sum_of_squares", "few", [[x]], 1, factor=-0.5), alone / 4)
    shifted = torch.empty(len(x) + 1)[1:].copy_(x)  # element by element
    assert torch.equal(summed(kernels, "sum_of_squares", "few", [[shifted]], 1), alone)


def test_numbers_in_many_places_are_added_up(kernels: SourceKernels) -> None:
    torch.manual_seed(0)
    numbers = [torch.randn(count, dtype=F64) for count in (1, 700, 0, 33)]
    total = torch.full((1,), float("nan"), dtype=F64)
    for adds in (0, 1):
        what = Addends(total.data_ptr(), len(numbers), adds)
        for to, part in zip(what.part, numbers, strict=False):
            to.first, to.count = part.data_ptr(), len(part)
        launch(kernels.totals, "add_numbers", what, 1)
    torch.testing.assert_close(total[0], 2 * torch.cat(numbers).sum(), rtol=1e-13, atol=1e-13)


NAN = float("nan")
RULES = {
    "plain": {"low": NAN, "high": NAN, "trust_clip": NAN, "adapts": 1, "corrects_moments": 1},
    "bounds": {"low": 0.5, "high": 2.0, "trust_clip": NAN, "adapts": 1, "corrects_step": 1},
    "clip": {"low": NAN, "high": NAN, "trust_clip": 1.5, "adapts": 1},
    "no ratio": {"low": 0.5, "high": 2.0, "trust_clip": 0.1, "adapts": 0, "corrects_step": 1},
}
NORMS = ((4.0, 1.0), (0.0, 3.0), (2.0, 0.0), (1e-4, 1e4), (NAN, 1.0), (9.0, 0.25))
STEPS = (1.0, 2.0, 7.0, 100.0, 3.0, 100_000.0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("counts", ["host", "device"])
@pytest.mark.parametrize("group", [None, 0.25, 100.0, NAN])
def test_factors_of_lamb_follow_from_norms_steps_and_the_group(
    kernels: SourceKernels, rule: str, counts: str, group: float | None
) -> None:
    own: dict[str, float] = {"corrects_moments": 0, "corrects_step": 0, **RULES[rule]}
    norms, counters = torch.tensor(NORMS, dtype=F64), torch.tensor(STEPS)
    out = torch.full((len(NORMS) + 1, 4), NAN, dtype=F64)
    whole = torch.tensor([NAN if group is None else group], dtype=F64)
    read = torch.tensor(0.5, dtype=F64)
    rate, lr = (Rate.of(read), 0.2) if counts == "device" else (Rate(), 0.1)
    at = whole.data_ptr() if group is not None else None
    what = LambFactors(rate, out.data_ptr(), at, 2.0, -0.5, lr, beta1=0.9, beta2=0.98)
    for name, value in own.items():
        setattr(what, name, int(value) if name in ("adapts", "corrects_moments", "corrects_step") else value)
    what.count = len(NORMS)
    expected = []
    clip = 2.0 / 10.0 if group == 100.0 else 1.0
    for i, ((squares_x, squares_u), step) in enumerate(zip(NORMS, STEPS, strict=True)):
        correction = 1 / (1 - 0.9**step), (1 - 0.98**step) ** -0.5
        what.job[i].norms = norms[i].data_ptr()
        if counts == "device":
            what.job[i].steps = counters[i].data_ptr()
        else:
            what.job[i].correction = (ctypes.c_double * 2)(*correction)
        x, u = squares_x**0.5, squares_u**0.5
        if own["low"] == own["low"]:
            x = min(max(own["low"], x), own["high"])
        ratio = x / u if own["adapts"] and not (x <= 0 or u <= 0) else 1.0
        if own["adapts"] and ratio > own["trust_clip"]:
            ratio = own["trust_clip"]
        if own["corrects_step"]:
            ratio *= correction[0] / correction[1]
        moments = correction if own["corrects_moments"] else (1.0, 1.0)
        expected.append([*moments, -0.5 * clip, 0.1 * ratio])
    launch(kernels.factors, "lamb_factors", what, 1)
    torch.testing.assert_close(
        out[:-1], torch.tensor(expected, dtype=F64), rtol=1e-12, atol=0, equal_nan=True
    )
    assert bool(out[-1].isnan().all())
