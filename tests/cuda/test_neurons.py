"""The kernels that normalize neurons on the host emulator, against their equations in float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from .emulator.library import Emulated, KernelFault
from .jobs import TYPES
from .lines import Chosen, NeuronJob, NeuronMean, blocks_of, inside, launch, teams, untouched

F16, BF16, F32, F64 = TYPES
BETA2 = 0.9
ROUNDOFF = {F16: 2.0**-11, BF16: 2.0**-8, F32: 2.0**-24, F64: 2.0**-53}


@dataclass
class Case:
    """A matrix of neurons: those of a row, elements of each, how many share a norm, which rows of V."""

    rows: int
    across: int
    length: int
    group: int
    chosen: list[int] | None = None  # numbers from 1
    first: int = -1
    shift: int = 0


MATRIX = Case(37, 1, 45, 37)
CASES = [
    Case(1, 1, 1, 1),
    MATRIX,
    Case(5, 1, 2051, 5, shift=1),
    Case(300, 1, 8, 300),
    Case(6, 10, 3, 10),
    Case(4, 70, 5, 35),
    Case(5, 1, 12, 5, [2, 3, 7, 8, 0]),
    Case(5, 4, 12, 2, [1, 4, 6, 0, 0], shift=3),
    Case(8, 1, 40, 8, [1, 4, 9, 10, 13, 30], first=3),
    Case(8, 2, 40, 2, [4, 11, 0, 0, 0, 0], first=3),
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated("neurons.cu", tmp_path_factory.mktemp("neurons"))


def owners(case: Case) -> list[int]:
    """The row of V that each row of U has, or -1."""
    if case.chosen is None:
        return list(range(case.rows))
    if case.first < 0:
        return [case.chosen[row] - 1 for row in range(case.rows)]
    return [row if row + case.first + 1 in case.chosen else -1 for row in range(case.rows)]


def check(kernels: Emulated, cases: list[Case], dtype: torch.dtype, v_dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    jobs, made = [], []
    for case in cases:
        update, around = inside(torch.randn(case.rows, case.across * case.length), dtype, case.shift)
        neurons = case.rows * case.across
        groups = -(-neurons // case.group)
        variance, beside = inside(torch.rand(max(owners(case)) + 1 or 1, case.across), v_dtype)
        squares, totals = (torch.full((n,), float("nan"), dtype=F64) for n in (neurons, 2 * groups))
        numbers = None if case.chosen is None else torch.tensor(case.chosen, dtype=F64)
        job = NeuronJob(update.data_ptr(), variance.data_ptr(), squares.data_ptr(), totals.data_ptr())
        job.chosen = Chosen.of(numbers, case.first)
        job.stride, job.variance_stride = update.stride(0), variance.stride(0)
        job.rows, job.across, job.length = case.rows, case.across, case.length
        job.group, job.groups = case.group, groups
        job.type, job.variance_type = TYPES[dtype], TYPES[v_dtype]
        jobs.append((job, (neurons, case.length, groups, case.group)))
        made.append((case, update, around, variance, beside, squares, totals, numbers))
    before = [(update.clone(), variance.clone()) for _, update, _, variance, *_ in made]
    mean = NeuronMean(BETA2, 50.0)
    lines = [(job, blocks_of(neurons, length)) for job, (neurons, length, _, _) in jobs]
    launch(kernels, "neuron_squares", mean, lines, seed)
    sums = [(job, teams(groups, group > 32)) for job, (_, _, groups, group) in jobs]
    launch(kernels, "neuron_variance", mean, sums, seed)
    launch(kernels, "neuron_scale", mean, lines, seed)
    for (case, update, around, variance, beside, squares, totals, _), old in zip(made, before, strict=True):
        wide, expected_v = old[0].double().reshape(case.rows, case.across, case.length), old[1].double()
        expected = wide.square().sum(-1)
        own = owners(case)
        part = torch.tensor([row >= 0 for row in own])
        expected[~part] = 0
        torch.testing.assert_close(squares, expected.flatten(), rtol=1e-12, atol=0)
        of = torch.tensor(own)[part]
        expected_v[of] += (1 - BETA2) * (expected[part] / 50 - expected_v[of])
        bound = 1.01 * ROUNDOFF[v_dtype] * expected_v.abs() + 1e-7 * (v_dtype == F16) + 1e-15
        assert ((variance.double() - expected_v).abs() <= bound).all()
        factor = torch.zeros_like(expected)
        factor[part] = 1 / (variance.double()[of].sqrt() + 1e-8)
        pairs = torch.stack([expected.flatten(), (expected * factor.square()).flatten()])
        groups = [pairs[:, i : i + case.group].sum(1) for i in range(0, pairs.shape[1], case.group)]
        torch.testing.assert_close(totals, torch.cat(groups), rtol=1e-12, atol=0)
        norms = [(a.sqrt() / b.sqrt().clamp_min(1e-8)).repeat(case.group) for a, b in groups]
        scale = factor * torch.cat(norms)[: expected.numel()].view_as(expected)
        scaled = torch.where(part[:, None, None], wide * scale[..., None], wide).view_as(old[0])
        error = (update.double() - scaled).abs()
        arithmetic = 2 * ROUNDOFF[F64 if dtype == F64 else F32]
        bound = 1.01 * (ROUNDOFF[dtype] + arithmetic) * scaled.abs() + 1e-7 * (dtype == F16)
        assert (error <= bound + 1e-14).all(), f"update of {case}"
        assert untouched(update, around)
        assert untouched(variance, beside)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("dtype", "v_dtype"), [(F32, F32), (BF16, F32), (F16, BF16), (F64, F64), (F32, F16)])
def test_neurons_equal_their_equations(
    kernels: Emulated, dtype: torch.dtype, v_dtype: torch.dtype, seed: int
) -> None:
    check(kernels, CASES, dtype, v_dtype, seed)


def test_results_do_not_depend_on_what_else_is_in_the_table(kernels: Emulated) -> None:
    for cases in ([MATRIX], [Case(3, 1, 9, 3), MATRIX, MATRIX]):
        check(kernels, cases, F32, F32, 3)


FAULTS = {
    "sums are read before all warps left theirs": (
        "lines.cuh",
        "if (rank % 32 == 0) warps[rank / 32] = x;\n        __syncthreads();",
        "if (rank % 32 == 0) warps[rank / 32] = x;",
    ),
    "sums are left while those before are read": (
        "lines.cuh",
        "__syncthreads();  // the sums before are read",
        "",
    ),
    "slices count from 0": (
        "lines.cuh",
        "static_cast<int>(number(slice)) - 1 : -1",
        "static_cast<int>(number(slice)) : -1",
    ),
    "the end of the list is a number": (
        "lines.cuh",
        "if (found == 0 || found >= wanted)",
        "if (found >= wanted)",
    ),
    "V as it was is divided by": (
        "neurons.cu",
        "sqrt(load<double>(run, 0)) + EPSILON;",
        "sqrt(old) + EPSILON;",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault: str, tmp_path: Path) -> None:
    kernels = Emulated("neurons.cu", tmp_path / "faulty", [FAULTS[fault]])

    def work() -> None:
        for seed in range(4):
            check(kernels, CASES, F32, F32, seed)

    with pytest.raises((AssertionError, KernelFault)):
        work()
