"""Launches of passes over codes, randomly rounded numbers and weights in two halves, and definitions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from support import codes as book

from .jobs import MOST_OPERANDS, MOST_SCALARS, PIECE, TYPES, Job, Scalars

CODED_THREADS, MOST_SPANS = 128, 4
MOST_CODED = {"many": 96, "wide": 32}
CODES, ROUNDED, MASTER = {True: 4, False: 5}, 6, 7
GUARD = 4096


class Span(ctypes.Structure):
    """Mirror of ``Span``."""

    _fields_ = tuple((name, ctypes.c_longlong) for name in ("size", "start", "length"))


class Rounding(ctypes.Structure):
    """Mirror of ``Rounding``."""

    _fields_ = (
        ("key", ctypes.c_uint * 4),
        ("first", ctypes.c_longlong),
        ("spans", ctypes.c_int),
        ("span", Span * MOST_SPANS),
    )


class CodedJob(ctypes.Structure):
    """Mirror of ``CodedJob``."""

    _fields_ = (
        ("plain", Job),
        ("scales", ctypes.c_void_p * MOST_OPERANDS),
        ("width", ctypes.c_longlong),
        *((name, ctypes.c_uint) for name in ("blocks", "in_row", "before", "share", "block", "lanes")),
        ("rounding", Rounding),
    )


def guarded(values: Tensor, dtype: torch.dtype, shift: int = 0) -> tuple[Tensor, Tensor]:
    """A copy of ``values`` in the middle of what nobody may touch, ``shift`` elements off its alignment."""
    sentinel = {torch.uint8: 0xEE, torch.int16: 0x1111}.get(dtype, float("nan"))
    whole = torch.full((values.numel() + 2 * GUARD + shift,), sentinel, dtype=dtype)
    inside = whole[GUARD + shift : GUARD + shift + values.numel()]
    return inside.copy_(values.reshape(-1)), whole


@dataclass
class Plain:
    """An operand of numbers; the flat elements of a job."""

    values: Tensor
    whole: Tensor

    @classmethod
    def of(cls, values: Tensor, dtype: torch.dtype, shift: int = 0) -> Plain:
        return cls(*guarded(values, dtype, shift))

    def read(self) -> Tensor:
        return self.values.clone()

    def store(self, x: Tensor) -> None:
        self.values.copy_(x)

    def untouched(self) -> bool:
        return int(self.whole.isnan().sum()) >= len(self.whole) - len(self.values)


@dataclass
class Codes:
    """An operand of codes: rows of ``width`` elements, of which a job has those of ``part``."""

    values: Tensor
    scales: Tensor
    signed: bool
    width: int
    block: int
    part: slice
    whole: Tensor
    whole_scales: Tensor

    @classmethod
    def of(cls, values: Tensor, signed: bool, block: int, part: slice) -> Codes:
        found, scales = encoded(values, block, signed)
        (own, whole), (own_scales, whole_scales) = guarded(found, torch.uint8), guarded(scales, torch.float32)
        return cls(own, own_scales, signed, values.shape[1], block, part, whole, whole_scales)

    def rows(self) -> tuple[Tensor, Tensor]:
        return self.values.view(-1, self.width), self.scales.view(-1, -(-self.width // self.block))

    def read(self) -> Tensor:
        return decoded(*self.rows(), self.block, self.signed).reshape(-1)[self.part]

    def store(self, x: Tensor) -> None:
        everything = decoded(*self.rows(), self.block, self.signed).reshape(-1)
        everything[self.part] = x.float()
        found, scales = encoded(everything.view(-1, self.width), self.block, self.signed)
        # What is not in the job keeps its codes.
        mine = torch.zeros(self.values.numel(), dtype=torch.bool)
        mine[self.part] = True
        inside = torch.stack([part.any(dim=1) for part in mine.view(-1, self.width).split(self.block, 1)], 1)
        self.values.copy_(torch.where(mine, found.reshape(-1), self.values))
        self.scales.copy_(torch.where(inside.reshape(-1), scales.reshape(-1), self.scales))

    def untouched(self) -> bool:
        rest = len(self.whole) - len(self.values)
        kept = int((self.whole == 0xEE).sum()) >= rest
        return kept and int(self.whole_scales.isnan().sum()) >= len(self.whole_scales) - len(self.scales)


@dataclass
class Rounded(Plain):
    """A bfloat16 operand that is rounded at random: a part of a tensor that is cut as ``spans`` say."""

    key: tuple[int, int, int, int] = (1, 2, 3, 4)
    spans: Sequence[tuple[int, int, int]] = field(default_factory=list)
    first: int = 0

    def store(self, x: Tensor) -> None:
        numbers = random_numbers(self.key, [self.place(self.first + i) for i in range(len(x))])
        self.values.copy_(rounded(x.float(), numbers))

    def place(self, at: int) -> int:
        place, step = 0, 1
        for size, start, length in reversed(self.spans):
            place += (start + at % length) * step
            at, step = at // length, step * size
        return place


@dataclass
class Halves(Plain):
    """float32 weights: the bfloat16 numbers next to them, and their low halves elsewhere."""

    low: Tensor = field(default_factory=Tensor)
    whole_low: Tensor = field(default_factory=Tensor)

    @classmethod
    def weights(cls, values: Tensor, shift: int = 0, low_shift: int = 0) -> Halves:
        high, low = halves(values.float().reshape(-1))
        return cls(*guarded(high, torch.bfloat16, shift), *guarded(low, torch.int16, low_shift))

    def read(self) -> Tensor:
        high = self.values.view(torch.int16).long() - (self.low < 0).long()
        bits = (high << 16 | self.low.long() & 0xFFFF) & 0xFFFFFFFF
        found = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
        return torch.where(found.isnan(), self.values.float(), found)

    def store(self, x: Tensor) -> None:
        for to, half in zip((self.values, self.low), halves(x.float()), strict=True):
            to.copy_(half)

    def untouched(self) -> bool:
        rest = len(self.whole_low) - len(self.low)
        return super().untouched() and int((self.whole_low == 0x1111).sum()) >= rest


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 numbers nearest to weights, ties away from zero, and the low halves of the weights."""
    bits = x.view(torch.int32).long() & 0xFFFFFFFF
    high = torch.where(x.isnan(), bits >> 16 | 0x40, bits + 0x8000 >> 16)
    low = torch.where(x.isnan(), 0, bits & 0xFFFF)
    high, low = (torch.where(half >= 1 << 15, half - (1 << 16), half).to(torch.int16) for half in (high, low))
    return high.view(torch.bfloat16), low


Operand = Plain | Codes


def encoded(x: Tensor, block: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of the blocks of each row, in float32 as the core scales."""
    found, scales = [], []
    for part in x.float().split(block, dim=-1):
        scale = part.abs().amax(dim=-1, keepdim=True)
        power = torch.where(scale < 2.0**-60, 2.0**64, torch.where(scale > 2.0**60, 2.0**-64, 1.0))
        q = (part * power) * (1.0 / (scale * power))
        lost = (scale == 0) | ~scale.isfinite()
        code = book.nearest(torch.where(lost, 0.0, q), signed)
        found.append(code)
        scales.append(scale)
    return torch.cat(found, dim=-1).to(torch.uint8), torch.cat(scales, dim=-1)


def decoded(codes: Tensor, scales: Tensor, block: int, signed: bool) -> Tensor:
    """What codes stand for, float32."""
    wide = scales.repeat_interleave(block, dim=-1)[..., : codes.shape[-1]]
    return book.book(signed).float()[codes.long()] * wide


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """One block of Philox4x32-10, in whole numbers of any size."""
    (a, b, c, d), (k, j), word = counter, key, 1 << 32
    for _ in range(10):
        one, two = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = two // word ^ b ^ k, two % word, one // word ^ d ^ j, one % word
        k, j = (k + 0x9E3779B9) % word, (j + 0xBB67AE85) % word
    return [a, b, c, d]


def random_numbers(key: Sequence[int], places: Sequence[int]) -> Tensor:
    """The 16 random bits of each place."""
    blocks = {place // 8 for place in places}
    made = {n: philox([n % 2**32, n >> 32, key[2], key[3]], key[:2]) for n in blocks}
    return torch.tensor([made[p // 8][p % 8 // 2] >> 16 * (p % 2) & 0xFFFF for p in places])


def rounded(x: Tensor, numbers: Tensor) -> Tensor:
    """float32 to bfloat16, up where the random bits carry."""
    bits = x.view(torch.int32).long() & 0xFFFFFFFF
    up = (bits + numbers & 0xFFFFFFFF) >> 16
    up = torch.where(x.isnan(), bits >> 16 | 0x40, up)
    return torch.where(up >= 1 << 15, up - (1 << 16), up).to(torch.int16).view(torch.bfloat16)


def coded_table(
    form: str,
    jobs: Sequence[Sequence[Operand]],
    scalars: Sequence[float],
    factors: Sequence[tuple[float, float]],
    lanes: int = 0,
    live: Tensor | None = None,
) -> tuple[ctypes.Structure, int]:
    """The parameter of a launch, and its blocks. ``lanes`` sets how many threads work on a block.

    ``live`` has the factors of all jobs that a kernel left.
    """
    fields = (("scalars", Scalars), ("count", ctypes.c_int), ("job", CodedJob * MOST_CODED[form]))
    made = type("CodedJobs", (ctypes.Structure,), {"_fields_": fields})()
    made.scalars.value = (ctypes.c_double * MOST_SCALARS)(*scalars)
    made.count, end = len(jobs), 0
    for job, operands, factor in zip(made.job, jobs, factors, strict=False):
        length = len(operands[0].read())
        job.plain.live = live.data_ptr() if live is not None else None
        job.plain.length, job.plain.factor = length, (ctypes.c_double * 2)(*factor)
        coded = [operand for operand in operands if isinstance(operand, Codes)]
        block, width, first = 256, length, 0
        if coded:
            block, width, first = coded[0].block, coded[0].width, coded[0].part.start
        in_row = -(-width // block)
        number = first // width * in_row + first % width // block
        last = (first + length - 1) // width * in_row + (first + length - 1) % width // block
        longest = min(block, width)
        job.lanes = lanes or min(32, 1 << (-(-longest // 8) - 1).bit_length())
        together = CODED_THREADS // job.lanes
        job.share = max(1, PIECE // (longest * together)) * together
        job.width, job.block, job.in_row = width, block, in_row
        job.blocks, job.before = last + 1 - number, first % width // block
        for n, operand in enumerate(operands):
            start = operand.part.start if isinstance(operand, Codes) else 0
            job.plain.operand[n] = operand.values.data_ptr() + start * operand.values.element_size()
            if isinstance(operand, Codes):
                job.plain.type[n] = CODES[operand.signed]
                job.scales[n] = operand.scales.data_ptr() + 4 * number
            elif isinstance(operand, Halves):
                job.plain.type[n], job.scales[n] = MASTER, operand.low.data_ptr()
            elif isinstance(operand, Rounded):
                job.plain.type[n] = ROUNDED
                job.rounding.key = (ctypes.c_uint * 4)(*operand.key)
                job.rounding.first, job.rounding.spans = operand.first, len(operand.spans)
                for to, span in zip(job.rounding.span, operand.spans, strict=False):
                    to.size, to.start, to.length = span
            else:
                job.plain.type[n] = TYPES[operand.values.dtype]
        end += -(-job.blocks // job.share)
        job.plain.end = end
    return made, end
