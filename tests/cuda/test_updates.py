"""The elementwise kernels on the host emulator, against their equations in float64."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.cases import DERIVED

from .emulator.library import Emulated, KernelFault
from .jobs import MOST, PASSES, PIECE, POSITIVE, THREADS, Pass, Rate, table
from .operations import names

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
GUARD = 64
ROUNDOFF = {F16: 2.0**-11, BF16: 2.0**-8, F32: 2.0**-24, F64: 2.0**-53}
# The types of operands in turn: those of a parameter, its gradient and its states.
MIXED = (F32, BF16, F32, F16, F32)
LENGTHS = (1, 1023, 4096, PIECE + 7)
CASES = [(name, case) for name, cases in PASSES.items() for case in range(len(cases))]


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated("updates.cu", tmp_path_factory.mktemp("updates"))


def test_operations_without_an_equation_are_optimizer_updates() -> None:
    """`test_launch_cases.py` compares the steps of those on the emulator with those on the CPU."""
    assert set(PASSES) <= set(names("elementwise"))
    assert set(names("elementwise")) - set(PASSES) <= {cls._ALGORITHM for cls in DERIVED}


def guarded(values: Tensor, dtype: torch.dtype, shift: int) -> tuple[Tensor, Tensor]:
    """A copy of ``values`` in the middle of NaN, ``shift`` elements off its alignment, and the whole."""
    whole = torch.full((len(values) + 2 * GUARD + shift,), float("nan"), dtype=dtype)
    inside = whole[GUARD + shift : GUARD + shift + len(values)]
    return inside.copy_(values), whole


def make(
    name: str, case: Pass, length: int, types: tuple[torch.dtype, ...], shift: int
) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(length + shift)
    made = []
    for n in range(case.operands):
        values = torch.randn(length, dtype=F64)
        values = values.abs() if n in POSITIVE.get(name, ()) else values
        made.append(guarded(values, types[n], shift if n % 2 == 0 else 0))
    return made


def check(name: str, case: Pass, runs: list[list[tuple[Tensor, Tensor]]], before: list[list[Tensor]]) -> None:
    for operands, old in zip(runs, before, strict=True):
        expected = [x.double() for x in old]
        case.compute(expected)
        # Arithmetic rounds in float32 unless an operand is float64, and stored values again in their type. A
        # difference is small compared with its terms, which are of size 1.
        arithmetic = ROUNDOFF[F64 if any(x.dtype == F64 for x, _ in operands) else F32]
        for n, ((x, whole), want) in enumerate(zip(operands, expected, strict=True)):
            bound = ROUNDOFF[x.dtype] * want.abs() * 1.01 + 64 * arithmetic + 1e-7 * (x.dtype == F16)
            off = ((x.double() - want).abs() - bound).max()
            assert off <= 0, f"{name} operand {n} of {len(x)} {x.dtype}: {off:e} above the bound"
            assert whole.isnan().sum() == len(whole) - len(x), (
                f"{name} operand {n}: memory around it was written"
            )


def launch(
    kernels: Emulated, name: str, form: str, case: Pass, runs: list[list[Tensor]], live: bool = False
) -> None:
    scalars, (first, second) = list(case.scalars), case.factors
    rate = torch.tensor(0.25, dtype=(F16, BF16, F32, F64)[len(name) % 4]) if live else None
    if rate is not None:  # a step at a rate that the kernel reads: its arguments are per unit of the rate
        for scalar in case.per_rate:
            scalars[scalar] /= 0.25
        first /= 0.25 if case.factor_too else 1.0
    left = [torch.tensor(case.live, dtype=F64) for _ in runs] if case.live else []
    read = Rate.of(rate, case.per_rate)
    made, blocks = table(MOST[form], runs, scalars, [(first, second)] * len(runs), live=left, rate=read)
    readable = [x for run in runs for x in run]
    kernels.launch(
        f"{name}_{form}", made, blocks=blocks, threads=THREADS, shared_bytes=0, readable=readable[:1]
    )


@pytest.mark.parametrize(("name", "number"), CASES)
@pytest.mark.parametrize("types", ["float32", "mixed", "float64"])
def test_pass_equals_its_equation_on_runs_of_any_length(
    updates: Emulated, name: str, number: int, types: str
) -> None:
    case = PASSES[name][number]
    of = {"float32": (F32,) * 5, "mixed": MIXED, "float64": (F64, F32, F64, BF16, F64)}[types]
    runs = [make(name, case, length, of, shift) for length, shift in zip(LENGTHS, (0, 1, 0, 0), strict=True)]
    before = [[x.clone() for x, _ in operands] for operands in runs]
    form = "wide" if types == "float64" else "few"
    launch(updates, name, form, case, [[x for x, _ in operands] for operands in runs], live=types == "mixed")
    check(name, case, runs, before)


def test_full_table_gives_every_job_its_own_factors(updates: Emulated) -> None:
    runs = [[torch.zeros(3), torch.ones(3), torch.zeros(3), torch.zeros(3)] for _ in range(MOST["many"])]
    # Without bias in m and with v unused: x = -rate m / (epsilon) grows with the number of the job.
    scalars = (0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0)
    made, blocks = table(MOST["many"], runs, scalars, [(float(i), 1.0) for i in range(len(runs))])
    assert ctypes.sizeof(made) <= 32764
    updates.launch("adamw_many", made, blocks=blocks, threads=THREADS, shared_bytes=0, readable=[])
    assert torch.equal(torch.stack([run[0][0] for run in runs]), -torch.arange(float(len(runs))))


@pytest.mark.parametrize("name", ["adamw", "adamw_largest", "direction"])
def test_factors_follow_the_steps_that_the_device_counts(updates: Emulated, name: str) -> None:
    case, counts, rate = PASSES[name][0], [1.0, 7.0, 1000.0, 1_000_003.0], 0.02
    beta1, beta2 = case.values["beta1"], case.values["beta2"]
    counters = [torch.tensor(count) for count in counts]
    runs = [make(name, case, 40, (F64,) * 5, 0) for _ in counts]
    before = [[x.clone() for x, _ in operands] for operands in runs]
    operands = [[x for x, _ in run] for run in runs]
    made, blocks = table(MOST["wide"], operands, case.scalars, [(rate, 1.0)] * len(counts), counters)
    updates.launch(f"{name}_wide", made, blocks=blocks, threads=THREADS, shared_bytes=0, readable=[])
    for count, run, old in zip(counts, runs, before, strict=True):
        factors = rate / (1 - beta1**count), (1 - beta2**count) ** -0.5
        case.compute(old, factors)
        for (x, _), want in zip(run, old, strict=True):
            assert (x - want).abs().max() <= 1e-12 * (1 + want.abs().max())


WRITTEN = """struct Momentum {
    static constexpr int OPERANDS = 3;
    static constexpr u32 READS = 0b011;
    static constexpr u32 WRITES = 0b110;
"""
FAULTS = {
    "a job begins with the piece before it": (
        "jobs.cuh",
        "end_of(table.job[job - 1]) : 0",
        "end_of(table.job[job - 1]) - 1 : 0",
    ),
    "pieces overlap": (
        "jobs.cuh",
        "static_cast<long long>(number) * PIECE",
        "static_cast<long long>(number) * (PIECE - 1)",
    ),
    "the rest of a run is left out": (
        "jobs.cuh",
        "int i = done + thread;",
        "int i = done + VECTOR + thread;",
    ),
    "a wide load without alignment": (
        "jobs.cuh",
        "is_aligned = is_aligned && run[n]",
        "is_aligned = is_aligned || run[n]",
    ),
    "halves are swapped": (
        "jobs.cuh",
        "const u32 pair = word[j / 2];",
        "const u32 pair = word[1 - j / 2];",
    ),
    "an operand too few is written": ("each_elementwise.cuh", WRITTEN, WRITTEN.replace("0b110", "0b100")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault: str, tmp_path: Path) -> None:
    kernels = Emulated("updates.cu", tmp_path / "faulty", [FAULTS[fault]], ["momentum_few"])
    case = PASSES["momentum"][0]
    runs = [
        make("momentum", case, length, (F32, BF16, F32), shift) for length, shift in ((7, 1), (PIECE + 5, 0))
    ]
    before = [[x.clone() for x, _ in operands] for operands in runs]

    def work() -> None:
        launch(kernels, "momentum", "few", case, [[x for x, _ in operands] for operands in runs])
        check("momentum", case, runs, before)

    with pytest.raises((AssertionError, KernelFault), match=r"operand|momentum"):
        work()
