"""Launches and definitions of passes over 8-bit values, randomly rounded numbers, weights in two halves."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from support import code_books as book
from support.rounding import random_numbers, rounded

from .jobs import MOST_OPERANDS, MOST_SCALARS, PIECE, TYPES, Job, Scalars

QUANTIZED_THREADS, MOST_SPANS = 128, 4
MOST_QUANTIZED = {"many": 96, "wide": 32}
QUANTIZED_TYPE, MASTER = {True: 4, False: 5}, 6
GUARD = 4096


class Span(ctypes.Structure):
    """Mirror of ``Span``."""

    _fields_ = tuple((name, ctypes.c_longlong) for name in ("size", "start", "length"))


class Rounding(ctypes.Structure):
    """Mirror of ``Rounding``."""

    _fields_ = (
        ("key", ctypes.c_uint),
        ("spans", ctypes.c_int),
        ("first", ctypes.c_longlong),
        ("span", Span * MOST_SPANS),
    )


class QuantizedJob(ctypes.Structure):
    """Mirror of ``QuantizedJob``."""

    _fields_ = (
        ("plain", Job),
        ("scales", ctypes.c_void_p * MOST_OPERANDS),
        ("width", ctypes.c_longlong),
        *((name, ctypes.c_uint) for name in ("blocks", "in_row", "before", "share", "block", "lanes")),
        ("tag", ctypes.c_uint * MOST_OPERANDS),
        ("random", ctypes.c_uint),
        ("rounding", Rounding),
    )


def guarded(values: Tensor, dtype: torch.dtype, shift: int = 0) -> tuple[Tensor, Tensor]:
    """A copy of ``values`` between guards that must not change, ``shift`` elements off its alignment."""
    sentinel = {torch.uint8: 0xEE, torch.int16: 0x1111}.get(dtype, float("nan"))
    whole = torch.full((values.numel() + 2 * GUARD + shift,), sentinel, dtype=dtype)
    inside = whole[GUARD + shift : GUARD + shift + values.numel()]
    return inside.copy_(values.reshape(-1)), whole


@dataclass(frozen=True)
class Places:
    """Where the stored elements of a tensor are in the whole one, and the random bits that they have there.

    Attributes:
        key: The key of all random bits of a job.
        spans: Size, start and length of the part by dimension.
        first: The number of the job's first element among those that are stored.
    """

    key: int
    spans: Sequence[tuple[int, int, int]]
    first: int = 0

    def numbers(self, tag: int, count: int) -> Tensor:
        """The random bits of elements of a tensor, the first one first."""
        return random_numbers((self.key, tag), [self.place(at) for at in range(count)])

    def place(self, at: int) -> int:
        place, step = 0, 1
        for size, start, length in reversed(self.spans):
            place += (start + at % length) * step
            at, step = at // length, step * size
        return place


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
class Quantized:
    """An 8-bit operand: rows of ``width`` elements; a job covers those of ``part``."""

    values: Tensor
    scales: Tensor
    signed: bool
    width: int
    block: int
    part: slice
    whole: Tensor
    whole_scales: Tensor
    tag: int = 0
    places: Places | None = None

    @classmethod
    def of(
        cls, values: Tensor, signed: bool, block: int, part: slice, tag: int = 0, places: Places | None = None
    ) -> Quantized:
        """Of numbers; where they have places, they are stored at random."""
        found, scales = book.encode(values, block, signed=signed)
        (own, whole), (own_scales, whole_scales) = guarded(found, torch.uint8), guarded(scales, torch.float32)
        return cls(own, own_scales, signed, values.shape[1], block, part, whole, whole_scales, tag, places)

    def rows(self) -> tuple[Tensor, Tensor]:
        return self.values.view(-1, self.width), self.scales.view(-1, -(-self.width // self.block))

    def read(self) -> Tensor:
        return decoded(*self.rows(), self.block, self.signed).reshape(-1)[self.part]

    def store(self, x: Tensor) -> None:
        everything = decoded(*self.rows(), self.block, self.signed).reshape(-1)
        everything[self.part] = x.float()
        random = None
        if self.places is not None:
            random = self.places.numbers(self.tag, len(everything)).view(-1, self.width)
        rows = everything.view(-1, self.width)
        found, scales = book.encode(rows, self.block, signed=self.signed, random=random)
        # Elements outside the job keep their quantized values.
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
    """An operand of 16 bits that is rounded at random; a second moment stays positive."""

    tag: int = 0
    places: Places = field(default_factory=lambda: Places(1, []))
    stays_positive: bool = False

    def store(self, x: Tensor) -> None:
        first = self.places.first
        random = self.places.numbers(self.tag, first + len(x))[first:]
        self.values.copy_(rounded(x, random, self.values.dtype, stays_positive=self.stays_positive))


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


Operand = Plain | Quantized


def decoded(quantized: Tensor, scales: Tensor, block: int, signed: bool) -> Tensor:
    """Dequantized values, float32."""
    wide = scales.repeat_interleave(block, dim=-1)[..., : quantized.shape[-1]]
    return book.book(signed).float()[quantized.long()] * wide


def tell_rounding(job: QuantizedJob, operands: Sequence[Operand]) -> None:
    """Say which operands of a job are rounded at random, and by which numbers."""
    for n, operand in enumerate(operands):
        if not isinstance(operand, Quantized | Rounded) or operand.places is None:
            continue
        places = operand.places
        job.random |= 1 << n
        if isinstance(operand, Rounded) and operand.stays_positive:
            job.random |= 1 << MOST_OPERANDS + n
        job.tag[n], job.rounding.key, job.rounding.first = operand.tag, places.key, places.first
        job.rounding.spans = len(places.spans)
        for to, span in zip(job.rounding.span, places.spans, strict=False):
            to.size, to.start, to.length = span


def quantized_table(
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
    fields = (("scalars", Scalars), ("count", ctypes.c_int), ("job", QuantizedJob * MOST_QUANTIZED[form]))
    made = type("QuantizedJobs", (ctypes.Structure,), {"_fields_": fields})()
    made.scalars.value = (ctypes.c_double * MOST_SCALARS)(*scalars)
    made.count, end = len(jobs), 0
    for job, operands, factor in zip(made.job, jobs, factors, strict=False):
        length = len(operands[0].read())
        job.plain.live = live.data_ptr() if live is not None else None
        job.plain.length, job.plain.factor = length, (ctypes.c_double * 2)(*factor)
        quantized = [operand for operand in operands if isinstance(operand, Quantized)]
        block, width, first = 256, length, 0
        if quantized:
            block, width, first = quantized[0].block, quantized[0].width, quantized[0].part.start
        in_row = -(-width // block)
        number = first // width * in_row + first % width // block
        last = (first + length - 1) // width * in_row + (first + length - 1) % width // block
        longest = min(block, width)
        job.lanes = lanes or min(32, 1 << (-(-longest // 8) - 1).bit_length())
        together = QUANTIZED_THREADS // job.lanes
        job.share = max(1, PIECE // (longest * together)) * together
        job.width, job.block, job.in_row = width, block, in_row
        job.blocks, job.before = last + 1 - number, first % width // block
        for n, operand in enumerate(operands):
            start = operand.part.start if isinstance(operand, Quantized) else 0
            job.plain.operand[n] = operand.values.data_ptr() + start * operand.values.element_size()
            if isinstance(operand, Quantized):
                job.plain.type[n] = QUANTIZED_TYPE[operand.signed]
                job.scales[n] = operand.scales.data_ptr() + 4 * number
            elif isinstance(operand, Halves):
                job.plain.type[n], job.scales[n] = MASTER, operand.low.data_ptr()
            else:
                job.plain.type[n] = TYPES[operand.values.dtype]
        tell_rounding(job, operands)
        end += -(-job.blocks // job.share)
        job.plain.end = end
    return made, end
