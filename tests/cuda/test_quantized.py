"""Passes over 8-bit values, randomly rounded numbers and weights in two halves, on the emulator.

Nothing is fused or estimated on the host, so the defining equations in float32 give the
same 8-bit values exactly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from support import code_books as book

from .emulator.library import Emulated
from .jobs import LAMB_ARGUMENTS, PASSES, PIECE, Pass
from .operations import OPERATIONS, names
from .quantized import (
    MOST_QUANTIZED,
    QUANTIZED_THREADS,
    Halves,
    Operand,
    Places,
    Plain,
    Quantized,
    Rounded,
    decoded,
    quantized_table,
)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
WIDTHS = (1, 7, 255, 256, 257, 1000)


def _root(x: Tensor) -> Tensor:
    # torch's own in float32 is off by a unit now and then.
    return x.double().sqrt().to(x.dtype)


def _adamw(x: list[Tensor], s: SimpleNamespace) -> None:
    w, g, m, v, *most = x
    g = s.grad_factor * g
    m.copy_(m + ((1 - s.beta1) * g - (1 - s.beta1) * m))
    v.copy_(s.beta2 * v + (1 - s.beta2) * (g * g))
    second = most[0].copy_(torch.maximum(most[0], v)) if most else v
    rate, inverse_root = s.factors
    w.copy_(w * (1 - s.decay) - rate * m / (_root(second) * inverse_root + s.epsilon))


def _direction(x: list[Tensor], s: SimpleNamespace) -> None:
    r, m, v = x
    g = s.grad_factor * r
    m.copy_(m + ((1 - s.beta1) * g - (1 - s.beta1) * m))
    v.copy_(s.beta2 * v + (1 - s.beta2) * (g * g))
    rate, inverse_root = s.factors
    r.copy_(rate * m / (_root(v) * inverse_root + s.epsilon))


def lamb_direction(x: Tensor, m: Tensor, v: Tensor, s: SimpleNamespace = LAMB_ARGUMENTS) -> Tensor:
    """Direction of LAMB in the order of the kernel."""
    first, second, *_ = s.live
    return (m * first) / (_root(v) * second + s.epsilon) + s.weight_decay * x


def lamb_moments(g: Tensor, m: Tensor, v: Tensor, s: SimpleNamespace = LAMB_ARGUMENTS) -> None:
    """Updates both moments of LAMB in the order of the kernel."""
    g = s.live[2] * g
    m.copy_(s.beta1 * m + s.blend * g)
    v.copy_(s.beta2 * v + (1 - s.beta2) * (g * g))


def _lamb(x: list[Tensor], s: SimpleNamespace) -> None:
    w, g, m, v = x
    lamb_moments(g, m, v)
    w.sub_(s.live[3] * lamb_direction(w, m, v))


def _lamb_along(x: list[Tensor], s: SimpleNamespace) -> None:
    x[0].sub_(s.live[3] * lamb_direction(*x))


#: Equations in the order of the kernel, where those in float64 have another.
IN_ORDER: dict[str, Callable[[list[Tensor], SimpleNamespace], None]] = {
    "adamw": _adamw,
    "adamw_largest": _adamw,
    "direction": _direction,
    "lamb": _lamb,
    "lamb_along": _lamb_along,
}
#: By what an operand holds: rounded, plain, quantized with a sign, quantized without one.
#: Moments of 16 bits that are rounded at random are "M" and "V".
KINDS = {"param": "x", "plain": "g", "signed": "m", "unsigned": "v"}


@dataclass(frozen=True)
class Case:
    """What each operand is (x: rounded, g: plain, m: signed, v: unsigned), which are written, and how."""

    name: str

    @property
    def plain(self) -> Pass:
        """The arguments of the pass."""
        return PASSES[self.name][0]

    @property
    def kinds(self) -> str:
        """One letter for each operand."""
        return "".join(KINDS[content] for content in OPERATIONS[self.name].contents)

    @property
    def writes(self) -> tuple[int, ...]:
        """Numbers of the operands that are written."""
        return OPERATIONS[self.name].written()

    def compute(self, x: list[Tensor]) -> None:
        """The equation, on what is stored."""
        IN_ORDER.get(self.name, self.plain.equation)(x, self.plain.arguments())


CASES = {name: Case(name) for name in names("elementwise", encoded=True) if name in PASSES}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated("quantized.cu", tmp_path_factory.mktemp("quantized"))


def operands_of(
    kinds: str,
    rows: int,
    width: int,
    block: int,
    part: slice,
    plain: torch.dtype = F32,
    shift: int = 0,
    narrow: torch.dtype = BF16,
) -> list[Operand]:
    """Operands with values of many sizes; the job covers the elements of ``part``."""
    torch.manual_seed(width + block + shift)
    length, numel = part.stop - part.start, rows * width
    # Rows of a tensor of more rows, from the third one on; the same places for all operands.
    places = Places(7 + shift, [(numel + 5 * width, 3 * width, numel)], part.start)
    made: list[Operand] = []
    for tag, kind in enumerate(kinds):
        values = torch.randn(rows, width) * 10.0 ** torch.empty(rows, width).uniform_(-4, 0)
        own = (values.abs() if kind in "vV" else values).reshape(-1)[part]
        if kind in "mv":
            every = values.abs() if kind == "v" else values
            made.append(Quantized.of(every, kind == "m", block, part, tag, places))
        elif kind == "w":
            made.append(Halves.weights(own, shift, len(made) + shift))
        elif kind in "MV" or (kind == "x" and plain != F64):
            one = Plain.of(own, narrow if kind in "MV" else BF16, shift)
            made.append(Rounded(one.values, one.whole, tag, places, kind == "V"))
        else:
            made.append(Plain.of(own, plain, shift))
        assert len(made[-1].read()) == length
    return made


def launch(
    kernels: Emulated, name: str, form: str, jobs: Sequence[Sequence[Operand]], lanes: int = 0, seed: int = 0
) -> None:
    plain = CASES[name].plain
    live = torch.tensor(plain.live, dtype=F64)
    made, blocks = quantized_table(form, jobs, plain.scalars, [plain.factors] * len(jobs), lanes, live)
    kernels.launch(
        f"{name}_quantized_{form}",
        made,
        blocks=blocks,
        threads=QUANTIZED_THREADS,
        shared_bytes=0,
        readable=[],
        seed=seed,
    )


def same(one: Tensor, two: Tensor) -> bool:
    """Whether all bits are equal, NaN aside."""
    if one.dtype == torch.uint8:
        return torch.equal(one, two)
    return torch.equal(one.isnan(), two.isnan()) and torch.equal(one.nan_to_num(), two.nan_to_num())


def check(
    kernels: Emulated, name: str, form: str, jobs: list[list[Operand]], lanes: int = 0, seed: int = 0
) -> None:
    expected = copy.deepcopy(jobs)
    case = CASES[name]
    for operands in expected:
        x = [operand.read().to(F64 if form == "wide" else F32) for operand in operands]
        case.compute(x)
        for n in case.writes:
            operands[n].store(x[n])
    launch(kernels, name, form, jobs, lanes, seed)
    for operands, wanted in zip(jobs, expected, strict=True):
        for n, (operand, want) in enumerate(zip(operands, wanted, strict=True)):
            what = f"{name} operand {n} of {len(operand.values)}"
            assert operand.untouched(), f"{what}: memory around it was written"
            if isinstance(operand, Halves):
                # Float32 numbers: roots and orders of summation may make them differ by a unit.
                torch.testing.assert_close(
                    operand.read(), want.read(), rtol=2.0**-22, atol=2.0**-22, equal_nan=True, msg=what
                )
                again = Halves.weights(operand.read())
                assert same(again.values, operand.values), f"{what}: other halves"
                assert torch.equal(again.low, operand.low), f"{what}: other halves"
                continue
            if type(operand) is Plain:
                units = 2 * torch.finfo(operand.values.dtype).eps
                torch.testing.assert_close(
                    operand.values, want.values, rtol=units, atol=units, equal_nan=True, msg=what
                )
                continue
            assert same(operand.values, want.values), f"{what}: other values"
            if isinstance(operand, Quantized) and isinstance(want, Quantized):
                assert same(operand.scales, want.scales), f"{what}: another scale"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("types", ["float32", "float16", "float64"])
def test_pass_equals_its_equation_and_quantizes_equally(kernels: Emulated, name: str, types: str) -> None:
    plain = getattr(torch, types)
    jobs = []
    for width in WIDTHS:
        rows = 5 if width < 100 else 3
        # From the second row to the end.
        part = slice(width, rows * width)
        jobs.append(operands_of(CASES[name].kinds, rows, width, 256, part, plain, shift=width % 2))
    check(kernels, name, "wide" if types == "float64" else "many", jobs)


@pytest.mark.parametrize("name", [name for name in CASES if "x" in CASES[name].kinds])
@pytest.mark.parametrize("types", ["float32", "bfloat16", "float64"])
def test_weights_in_two_halves_are_read_and_written(kernels: Emulated, name: str, types: str) -> None:
    """With low halves in the parameter's layout and in another; with 8-bit operands and alone."""
    plain, kinds = getattr(torch, types), CASES[name].kinds.replace("x", "w")
    jobs = []
    for at, width in enumerate(WIDTHS):
        rows = 5 if width < 100 else 3
        part = slice(width, rows * width)
        jobs.append(operands_of(kinds, rows, width, 256, part, plain, shift=at % 3))
    check(kernels, name, "wide" if types == "float64" else "many", jobs)


def test_every_kind_of_weight_is_found_again(kernels: Emulated) -> None:
    """Ties, what rounds to infinity, zeros of either sign, subnormal numbers, infinities; a NaN stays one."""
    lows = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    highs = torch.cat(
        [torch.arange(0, 0x10000, 257), torch.tensor([0x7F7F, 0x7F80, 0xFF7F, 0xFF80, 0x8000, 0])]
    )
    bits = (highs[:, None] << 16 | lows).reshape(-1)
    weights = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(F32)
    one = Halves.weights(torch.zeros_like(weights))
    jobs: list[list[Operand]] = [[Plain.of(weights, F32), one]]
    made, blocks = quantized_table("many", jobs, (1.0,), [(0.0, 0.0)])
    kernels.launch(
        "convert_quantized_many", made, blocks=blocks, threads=QUANTIZED_THREADS, shared_bytes=0, readable=[]
    )
    assert one.untouched()
    wanted = Halves.weights(weights)
    assert torch.equal(one.low, wanted.low)
    assert torch.equal(one.values.view(torch.int16), wanted.values.view(torch.int16))
    back = Plain.of(torch.zeros_like(weights), F32)
    made, blocks = quantized_table("many", [[one, back]], (1.0,), [(0.0, 0.0)])
    kernels.launch(
        "convert_quantized_many", made, blocks=blocks, threads=QUANTIZED_THREADS, shared_bytes=0, readable=[]
    )
    kept = ~weights.isnan()
    assert torch.equal(back.values.isnan(), weights.isnan())
    assert torch.equal(back.values[kept].view(torch.int32), weights[kept].view(torch.int32))


def test_weights_of_others_are_read_without_harm(kernels: Emulated) -> None:
    """Zeros, infinities and NaN with any low half."""
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0] * 50)
    one = Halves.weights(special)
    one.low.copy_(torch.arange(-150, 150) * 200)
    to = Plain.of(torch.zeros(300), F32)
    made, blocks = quantized_table("many", [[one, to]], (1.0,), [(0.0, 0.0)])
    kernels.launch(
        "convert_quantized_many", made, blocks=blocks, threads=QUANTIZED_THREADS, shared_bytes=0, readable=[]
    )
    assert same(to.values, one.read())
    assert torch.equal(to.values.isnan(), special.isnan())


@pytest.mark.parametrize("block", [8, 16, 64, 128, 512])
@pytest.mark.parametrize("name", ["lion", "adamw"])
def test_blocks_of_any_length_are_encoded_alone(kernels: Emulated, name: str, block: int) -> None:
    kinds = CASES[name].kinds
    jobs = [operands_of(kinds, 3, width, block, slice(0, 3 * width)) for width in (block, 7, 60, 523)]
    check(kernels, name, "many", jobs, seed=block)


@pytest.mark.parametrize("lanes", [32, 16])
def test_any_number_of_threads_finds_the_same(kernels: Emulated, lanes: int) -> None:
    jobs = [operands_of("gm", 2, width, 256, slice(0, 2 * width)) for width in (3, 40, 128, 250)]
    check(kernels, "momentum_alone", "many", jobs, lanes)


def test_a_part_of_a_row_has_its_own_scales(kernels: Emulated) -> None:
    width = 1000
    ends = [(width + 512, 2 * width), (256, 512), (0, width), (2 * width + 256, 2 * width + 512)]
    parts = [slice(start, end) for start, end in ends]
    check(kernels, "lion", "many", [operands_of("xgm", 3, width, 256, part) for part in parts])


def test_long_jobs_and_full_tables_are_cut_into_pieces(kernels: Emulated) -> None:
    jobs = [operands_of("gm", 1, width, 256, slice(0, width)) for width in (2 * PIECE + 300, 5)]
    jobs += [operands_of("gm", 2, 9, 256, slice(0, 18)) for _ in range(MOST_QUANTIZED["many"] - len(jobs))]
    check(kernels, "momentum_alone", "many", jobs)


def converted(kernels: Emulated, x: Tensor, signed: bool) -> tuple[Quantized, Tensor, Tensor]:
    """The 8-bit values of float32 rows, by the kernel and by the definition."""
    zeros = torch.zeros_like(x)
    made = Quantized.of(zeros, signed, 256, slice(0, x.numel()))
    jobs: list[list[Operand]] = [[Plain.of(x, F32), made]]
    table, blocks = quantized_table("many", jobs, (1.0,), [(0.0, 0.0)])
    kernels.launch(
        "convert_quantized_many", table, blocks=blocks, threads=QUANTIZED_THREADS, shared_bytes=0, readable=[]
    )
    return made, *book.encode(x, 256, signed=signed)


@pytest.mark.parametrize("signed", [True, False])
def test_values_next_to_a_midpoint_take_the_nearest_entry(kernels: Emulated, signed: bool) -> None:
    entries = book.book(signed).float()
    middles = ((entries[1:].double() + entries[:-1].double()) / 2).float()
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    near = torch.cat([entries, middles, middles.nextafter(up), middles.nextafter(down), -entries])
    near = torch.cat([near, 10.0 ** torch.empty(6000).uniform_(-9, 0)])
    near = near if signed else near.abs()
    rows = torch.cat([near, torch.zeros(-len(near) % 255)]).view(-1, 255)
    # The scale is 1, so that numbers are divided by it exactly.
    x = torch.cat([rows, torch.ones(len(rows), 1)], dim=1)
    made, quantized, scales = converted(kernels, x, signed)
    assert torch.equal(made.values, quantized.reshape(-1))
    assert torch.equal(made.scales, scales.reshape(-1))


@pytest.mark.parametrize("signed", [True, False])
def test_scales_of_any_size_and_nan(kernels: Emulated, signed: bool) -> None:
    values = torch.randn(14, 300).abs() + 1e-3
    values[::2] *= -1.0 if signed else 1.0
    sizes = (1e-45, 1e-42, 1e-38, 2.0**-60, 0.9 * 2.0**-60, 1e-20, 1e20, 1.1 * 2.0**60, 1e37)
    x = values * torch.tensor([*sizes, *[1.0] * 5])[:, None]
    x[9] = 0.0
    x[10, 3], x[11, 280], x[12, 0], x[13, 299] = torch.nan, torch.inf, -torch.inf, -torch.nan
    made, quantized, scales = converted(kernels, x, signed)
    assert same(made.values, quantized.reshape(-1))
    assert same(made.scales, scales.reshape(-1))
    assert same(made.read(), decoded(quantized, scales, 256, signed).reshape(-1))


LAYOUTS = [
    [(4000, 37, 1500)],
    [(20, 3, 10), (300, 0, 150)],
    [(9, 2, 3), (7, 5, 2), (500, 123, 250)],
    [(5, 1, 3), (4, 2, 2), (3, 1, 1), (700, 1, 250)],
    [(2**40, 2**39 + 5, 1500)],
]
"""By dimension: size, start and length of the part."""


def test_random_bits_follow_the_places_in_the_whole_tensor(kernels: Emulated) -> None:
    jobs: list[list[Operand]] = []
    for n, spans in enumerate(LAYOUTS):
        for first, shift in ((0, 0), (5, 1), (252, 2)):
            one = Plain.of(torch.randn(1500 - first), BF16, shift)
            places = Places(2**32 - 1 - n, spans, first)
            of_job = Rounded(one.values, one.whole, first + 4, places)
            jobs.append([of_job, Plain.of(torch.randn(1500 - first), F32)])
    check(kernels, "apply", "many", jobs)


def test_random_bits_of_quantization_follow_whole_tensor_places(kernels: Emulated) -> None:
    for signed in (False, True):
        jobs: list[list[Operand]] = []
        for n, spans in enumerate(LAYOUTS):
            for start in (0, 750, 1250):
                # Rows of 250 with blocks of 64, some of their numbers below the smallest entry.
                part = slice(start, 1500)
                values = torch.randn(6, 250) * 10.0 ** torch.empty(6, 250).uniform_(-8, 0)
                values = values if signed else values.square()
                made = Quantized.of(values * 0.5, signed, 64, part, n + 17, Places(n, spans, start))
                jobs.append([Plain.of(values.reshape(-1)[part], F32), made])
        check(kernels, "convert", "many", jobs)


@pytest.mark.parametrize("name", [name for name in CASES if {"m", "v"} & set(CASES[name].kinds)])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_moments_of_16_bits_are_rounded_at_random(kernels: Emulated, name: str, dtype: torch.dtype) -> None:
    """Alone, with 8-bit operands, and by tags of their own."""
    jobs = []
    for width in (7, 257, 1000):
        kinds = CASES[name].kinds.replace("m", "M")
        for own in (kinds, kinds.replace("v", "V")):
            part = slice(width, 3 * width)
            jobs.append(operands_of(own, 3, width, 256, part, shift=width % 2, narrow=dtype))
    check(kernels, name, "many", jobs)


@pytest.mark.parametrize("positive", [True, False])
def test_float16_of_any_size_is_rounded_at_random(kernels: Emulated, positive: bool) -> None:
    """Subnormal numbers, smaller ones, the largest ones, infinity and NaN."""
    most = torch.tensor([0.0, 65504.0, 65519.0, 65536.0])
    sizes = torch.cat([10.0 ** torch.linspace(-12, 5.2, 4000), most])
    border = 2.0**-14 * (1 + torch.arange(-40.0, 40.0) * 2.0**-13)
    special = torch.tensor([torch.inf, torch.nan, 2.0**-24, 2.0**-25, 1e-44])
    x = torch.cat([sizes, border, special])
    x = x if positive else torch.cat([x, -x])
    one = Plain.of(torch.zeros_like(x), F16)
    to = Rounded(one.values, one.whole, 17, Places(9, [(2 * len(x), 3, len(x))]), positive)
    check(kernels, "convert", "many", [[Plain.of(x, F32), to]])
    assert bool((to.values[x > 0] > 0).all()) == positive


def test_random_rounding_keeps_nan(kernels: Emulated) -> None:
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3.3895e38, -3.3895e38, 1e-40] * 40)
    one, places = Plain.of(special, BF16), Places(1, [(320, 0, 320)])
    x = Rounded(one.values, one.whole, 4, places)
    check(kernels, "decay", "many", [[x]])
    assert torch.equal(x.values.isnan(), special.isnan())
    # Of a float32 nan whose bits are all ones, the sum with random bits is no nan any more.
    last = torch.full((320,), -1, dtype=torch.int32).view(F32)
    zeros = Plain.of(torch.zeros(320), BF16)
    x = Rounded(zeros.values, zeros.whole, 4, places)
    check(kernels, "apply", "many", [[x, Plain.of(last, F32)]])
    assert x.values.isnan().all()
