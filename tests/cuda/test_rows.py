"""Passes over stacks of matrices on the host emulator, against float64."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from .emulator.library import Emulated, KernelFault
from .jobs import MOST, THREADS, Rate, table
from .operations import OPERATIONS, names
from .stacks import Stack, launch, scale
from .test_sums import FACTORS
from .test_updates import BF16, F16, F32, F64, GUARD, ROUNDOFF

#: Matrices of a stack, rows, columns, elements off the alignment.
SHAPES = (
    (1, 300, 130, 0),
    (3, 5, 7, 1),
    (2, 1, 64, 0),
    (2, 33, 1, 0),
    (1, 4, 260, 2),
    (2, 0, 5, 0),
    (1, 6, 0, 0),
)
LIVE = (0.3, 0.04)
Values = list[Tensor]


def _gradient_squares(x: Values, _s: Values, factor: float) -> tuple[Tensor, Tensor]:
    total = x[1].square().sum() if len(x) > 1 else torch.tensor(0.0, dtype=F64)
    return (factor * x[0]).square(), total


def _update_squares(x: Values, s: Values, factor: float) -> tuple[None, Tensor]:
    return None, (factor * x[0] * s[0]).square().sum()


def _residual(x: Values, s: Values, beta1: float) -> tuple[Tensor, Tensor]:
    u = LIVE[0] * x[0] * s[0]
    return (u - (beta1 * x[1] + (1 - beta1) * u)).square(), torch.tensor(0.0, dtype=F64)


def _step(x: Tensor, step: Tensor, decay: float, cautious: float) -> None:
    x.copy_(x - decay * x * ((x * step >= 0).double() if cautious else 1.0) - step)


def _scaled_apply(x: Values, s: Values, cautious: float, beta1: float) -> None:
    step = LIVE[0] * x[1] * s[0]
    if len(x) > 2:
        step = x[2].copy_(beta1 * x[2] + (1 - beta1) * step)
    _step(x[0], step, LIVE[1], cautious)


def _confident_apply(x: Values, s: Values, beta1: float, cautious: float, rate: float, decay: float) -> None:
    x[2].copy_(beta1 * x[2] + (1 - beta1) * LIVE[0] * x[1] * s[0])
    _step(x[0], rate * x[2] * s[1], decay, cautious)


#: Operands, scales, scalars, what it does; whether rows are summed, and whether something of its own.
CASES: dict[str, tuple[int, int, tuple[float, ...], Callable[..., object], bool]] = {
    "gradient_squares": (1, 0, (-0.5,), _gradient_squares, True),
    "gradient_and_parameter_squares": (2, 0, (0.5,), _gradient_squares, True),
    "update_squares": (1, 1, (0.5,), _update_squares, False),
    "residual": (2, 1, (0.9,), _residual, True),
    "scaled_apply": (2, 1, (0.0, float("nan")), _scaled_apply, False),
    "scaled_apply_averaged": (3, 1, (1.0, 0.9), _scaled_apply, False),
    "confident_apply": (3, 2, (0.9, 1.0, 0.02, 0.01), _confident_apply, False),
}
TYPES = {"few": (F32, F32, F32), "many": (BF16, F32, F16), "wide": (F64, F32, F64)}


def test_every_operation_on_rows_has_an_equation() -> None:
    assert set(CASES) == set(names("row"))
    assert {name: case[0] for name, case in CASES.items()} == {
        name: len(OPERATIONS[name].operands) for name in CASES
    }


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated("rows.cu", tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def totals(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated("totals.cu", tmp_path_factory.mktemp("totals"))


def guarded(shape: tuple[int, ...], dtype: torch.dtype, shift: int) -> tuple[Tensor, Tensor]:
    """Random numbers in the middle of NaN, and the whole."""
    count = torch.Size(shape).numel()
    whole = torch.full((count + 2 * GUARD + shift,), float("nan"), dtype=dtype)
    inside = whole[GUARD + shift : GUARD + shift + count].view(shape)
    return inside.copy_(torch.randn(shape)), whole


def stack_of(
    name: str, shape: tuple[int, int, int, int], form: str, by_element: bool
) -> tuple[Stack, Values]:
    *size, shift = shape
    operands, scales, _, _, summed = CASES[name]
    made = [guarded(tuple(size), dtype, shift) for dtype in TYPES[form][:operands]]
    dtype = F64 if form == "wide" else F32
    moments: list[tuple[Tensor | None, Tensor, Tensor | None]] = []
    for _ in range(scales):
        matrices, height, width = size
        col = torch.rand(matrices, width).to(dtype) + 0.1
        row, all_ = (torch.rand(shape).to(dtype) + 0.1 for shape in ((matrices, height), (matrices,)))
        moments.append((None, col, None) if by_element else (row, col, all_))
    live = torch.tensor(LIVE, dtype=F64)
    return Stack([x for x, _ in made], moments, live, summed), [whole for _, whole in made]


def check(name: str, what: Stack, before: Values, around: Values) -> None:
    _, _, scalars, equation, summed = CASES[name]
    expected = [x.double() for x in before]
    outcome = equation(expected, [scale(m, before[0].shape) for m in what.moments], *scalars)
    arithmetic = ROUNDOFF[F64 if any(x.dtype == F64 for x in before) else F32]
    for n, (x, want, whole) in enumerate(zip(what.operands, expected, around, strict=True)):
        bound = (
            ROUNDOFF[x.dtype] * want.abs() * 1.01
            + 64 * arithmetic * (1 + want.abs())
            + 1e-7 * (x.dtype == F16)
        )
        if x.numel():
            off = ((x.double() - want).abs() - bound).max()
            assert off <= 0, f"{name} operand {n} {tuple(x.shape)}: {off:e} above the bound"
        assert whole.isnan().sum() == whole.numel() - x.numel(), f"{name} operand {n}: memory around it"
    if outcome is None:
        return
    squares, total = outcome
    wanted = [total.reshape(1)]
    if summed:
        wanted = [squares.sum(2), squares.sum(1), squares.sum((1, 2)), *wanted]
    for own, want in zip(what.sums[-len(wanted) :], wanted, strict=True):
        torch.testing.assert_close(
            own, want, rtol=1000 * arithmetic, atol=1e-30, msg=lambda text: f"{name}: {text}"
        )


@pytest.mark.parametrize("form", TYPES)
@pytest.mark.parametrize("name", CASES)
def test_pass_equals_its_equation_on_matrices_of_any_shape(
    rows: Emulated, totals: Emulated, name: str, form: str
) -> None:
    torch.manual_seed(0)
    made = [stack_of(name, shape, form, by_element=False) for shape in SHAPES]
    made += [stack_of(name, (1, 1, 777, 0), form, by_element=True)]
    before = [[x.clone() for x in what.operands] for what, _ in made]
    launch(rows, totals, name, form, [what for what, _ in made], CASES[name][2])
    for (what, around), old in zip(made, before, strict=True):
        check(name, what, old, around)


def test_sums_depend_on_the_elements_alone(rows: Emulated, totals: Emulated) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 150, 140)
    shifted = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)  # element by element
    alone, again, off = (Stack([y], summed=True) for y in (x, x, shifted))
    launch(rows, totals, "gradient_squares", "few", [alone], (1.0,))
    launch(
        rows,
        totals,
        "gradient_squares",
        "few",
        [Stack([torch.randn(3, 5, 5)], summed=True), off, again],
        (1.0,),
    )
    for first, second, third in zip(alone.sums, again.sums, off.sums, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third)


@pytest.mark.parametrize("name", ["means", "squares"])
@pytest.mark.parametrize("form", ["few", "many"])
@pytest.mark.parametrize("counts", ["host", "device"])
def test_means_move_by_their_share(tmp_path: Path, name: str, form: str, counts: str) -> None:
    kernels = Emulated("means.cu", tmp_path / "means", kernels=[f"{name}_{form}"])
    torch.manual_seed(0)
    steps, exponent, epsilon, count, factor = (1.0, 7.0, 400.0), -0.8, 1e-3, 12.0, -0.5
    runs = [[torch.rand(n), torch.randn(n, dtype=F64 if name == "means" else BF16)] for n in (1, 50, 4099)]
    before = [[x.double() for x in run] for run in runs]
    shares = [step**exponent for step in steps]
    factors = [(share if counts == "host" else float("nan"), count) for share in shares]
    counters = [torch.tensor(step) for step in steps] if counts == "device" else []
    made, blocks = table(MOST[form], runs, (epsilon, exponent, factor, 1e300, *[0.0] * 8), factors, counters)
    kernels.launch(f"{name}_{form}", made, blocks=blocks, threads=THREADS, shared_bytes=0, readable=[])
    for (m, _), (old, new), share in zip(runs, before, shares, strict=True):
        target = new / count if name == "means" else (factor * new).square()
        want = (1 - share) * old + share * (target + epsilon)
        torch.testing.assert_close(m.double(), want, rtol=1e-6, atol=1e-7)


def test_finite_numbers_have_finite_means_exact_at_share_one(tmp_path: Path) -> None:
    kernels = Emulated("means.cu", tmp_path / "means", kernels=["means_few"])
    most = torch.finfo(F32).max
    new = torch.tensor([0.3, 1e60, float("inf"), float("nan")], dtype=F64)
    runs = [[torch.full((4,), 1e30), new]]
    made, blocks = table(MOST["few"], runs, (0.0, 0.0, 0.0, most, *[0.0] * 8), [(1.0, 1.0)], [])
    kernels.launch("means_few", made, blocks=blocks, threads=THREADS, shared_bytes=0, readable=[])
    assert runs[0][0][:2].tolist() == torch.tensor([0.3, most]).tolist()
    assert not bool(runs[0][0][2:].isfinite().any())


def test_squares_of_large_numbers_are_summed_in_float64(rows: Emulated, totals: Emulated) -> None:
    torch.manual_seed(0)
    stacks = [Stack([1e30 * torch.randn(2, 37, 21)], summed=True)]
    launch(rows, totals, "gradient_squares", "few", stacks, (1.0,))
    squares = stacks[0].operands[0].double().square()
    for own, want in zip(stacks[0].sums, [squares.sum(2), squares.sum(1), squares.sum((1, 2))], strict=False):
        torch.testing.assert_close(own.view_as(want), want, rtol=1e-6, atol=0)


class UpdateJob(ctypes.Structure):
    """Mirror of ``UpdateJob``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("updates", "param", "steps")),
        *((name, ctypes.c_double) for name in ("rate", "count")),
    )


class UpdateFactors(ctypes.Structure):
    """Mirror of ``UpdateFactors``."""

    _fields_ = (
        ("unit", Rate),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_double) for name in ("grad_factor", "threshold", "floor", "weight_decay")),
        *((name, ctypes.c_int) for name in ("count", "warms_up")),
        ("job", UpdateJob * FACTORS),
    )


@pytest.mark.parametrize("rate", ["host", "unit", "steps", "warm-up"])
@pytest.mark.parametrize("follows", [False, True])
def test_factors_of_updates_follow_from_sums_and_steps(tmp_path: Path, rate: str, follows: bool) -> None:
    kernels = Emulated("factors.cu", tmp_path / "factors", kernels=["update_factors"])
    updates = torch.tensor([0.5, 90.0, float("nan"), 9.0], dtype=F64)
    params, steps = torch.tensor([4.0, 1e-9, 25.0, 0.0], dtype=F64), torch.tensor([1.0, 4.0, 90_000.0, 2e8])
    out = torch.full((5, 2), float("nan"), dtype=F64)
    read = torch.tensor(0.5)
    unit = Rate.of(read if rate == "unit" else None)
    what = UpdateFactors(unit, out.data_ptr(), -0.5, 1.0, 1e-3, 0.1, 4, int(rate == "warm-up"))
    expected = []
    for i in range(4):
        own = 0.02 * (i + 1)
        job = UpdateJob(updates[i].data_ptr(), params[i].data_ptr() if follows else None, None, own, 9.0)
        if rate == "unit":
            own *= 0.5
        elif rate != "host":
            step = float(steps[i])
            job.steps, job.rate = steps[i].data_ptr(), float("nan")
            own = min(1e-6 * step if rate == "warm-up" else 1e-2, step**-0.5)
        what.job[i] = job
        if follows:
            own *= max(1e-3, (float(params[i]) / 9.0) ** 0.5)
        ratio = (float(updates[i]) / 9.0) ** 0.5
        expected.append([own * -0.5 / (1.0 if ratio < 1.0 else ratio), own * 0.1])
    kernels.launch("update_factors", what, blocks=1, threads=THREADS, shared_bytes=0, readable=[])
    torch.testing.assert_close(out[:4], torch.tensor(expected, dtype=F64), rtol=1e-12, atol=0, equal_nan=True)
    assert bool(out[4].isnan().all())


FAULTS = {
    "rows of a tile overlap": (
        "stacks.cuh",
        "tile_row * DOWN * tiling.slots;",
        "tile_row * (DOWN - 1) * tiling.slots;",
    ),
    "a column of another tile": (
        "stacks.cuh",
        "(tile_col * tiling.lanes + lane) * VECTOR;",
        "lane * VECTOR;",
    ),
    "sums of rows miss a lane": (
        "stacks.cuh",
        "other = tiling.lanes / 2; other > 0;",
        "other = tiling.lanes / 2; other > 1;",
    ),
    "the scale of another matrix": ("stacks.cuh", "matrix * job.cols + col + j", "col + j"),
    "columns are summed without a wait": (
        "stacks.cuh",
        "= below[j];\n        __syncthreads();",
        "= below[j];",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(totals: Emulated, fault: str, tmp_path: Path) -> None:
    kernels = Emulated("rows.cu", tmp_path / "faulty", [FAULTS[fault]], ["residual_few"])
    torch.manual_seed(0)
    made = [stack_of("residual", shape, "few", by_element=False) for shape in SHAPES]
    before = [[x.clone() for x in what.operands] for what, _ in made]

    def work() -> None:
        launch(kernels, totals, "residual", "few", [what for what, _ in made], CASES["residual"][2])
        for (what, around), old in zip(made, before, strict=True):
            check("residual", what, old, around)

    with pytest.raises((AssertionError, KernelFault), match="residual"):
        work()
