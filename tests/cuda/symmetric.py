"""Problems for the symmetric products, their float64 solution and a bound of what rounding may change."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .emulator.arrays import Guarded
from .emulator.library import Emulated
from .emulator.parameters import (
    Factor,
    MatrixBatch,
    SymmetricProduct,
    SymmetricTensorProduct,
    SymmetricTerms,
    TensorMap,
)

FLOAT32_ROUNDOFF = 2.0**-24
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Problem:
    """One launch.

    ``same``: right is left. ``in_place``: out is the first addend. ``listed``: matrices by pointers.
    ``live``: factors in memory. ``odd_rows``: row strides are odd; ``odd_addends``: those of addends.
    ``shift``: elements between an aligned address and the first matrix. ``parts``: of the depth, a launch of
    their sums and one of the total.
    """

    batch: int
    size: int
    depth: int
    dtype: torch.dtype = torch.bfloat16
    addends: int = 0
    same: bool = False
    odd_rows: bool = False
    odd_addends: bool = False
    shift: int = 0
    in_place: bool = False
    listed: bool = False
    live: bool = False
    blocks: int = 3
    parts: int = 1

    def __str__(self) -> str:
        names = ("same", "in_place", "listed", "live", "odd_rows", "odd_addends")
        flags = [name for name in names if getattr(self, name)]
        form = f"{self.batch}x{self.size}x{self.depth}-{element(self)}-{self.addends}"
        parts = [f"{self.parts}-parts"] if self.parts > 1 else []
        return "-".join([form, *flags, *(["shifted"] if self.shift else []), *parts])


@dataclass
class Arrays:
    """What a launch reads and writes."""

    left: Guarded
    right: Guarded
    addends: list[Guarded]
    out: Guarded
    alpha: float = 0.75
    beta: tuple[float, float] = (-1.25, 0.5)
    gamma: float = 3.0
    kept: list[object] = field(default_factory=list)  # what only a pointer names

    def batch(self, array: Guarded, *, listed: bool) -> MatrixBatch:
        """By stride, or as a list of pointers."""
        if not listed:
            return MatrixBatch.strided(array.matrices)
        made, pointers = MatrixBatch.listed(array.matrices)
        self.kept.append(pointers)
        return made

    def terms(self, problem: Problem) -> SymmetricTerms:
        """Addends and factors, by value or in memory of their own."""
        addends = [self.batch(array, listed=problem.listed) for array in self.addends]
        values = (self.alpha, *self.beta, self.gamma)
        scalars = [torch.tensor([value]) for value in values]
        self.kept.append(scalars)
        alpha, *beta, gamma = [
            Factor.of(scalar if problem.live else value)
            for scalar, value in zip(scalars, values, strict=True)
        ]
        addends += [MatrixBatch()] * (2 - len(addends))
        return SymmetricTerms((MatrixBatch * 2)(*addends), alpha, (Factor * 2)(*beta), gamma)


def element(problem: Problem) -> str:
    """The suffix of a kernel's name."""
    return str(problem.dtype).removeprefix("torch.")


def row_stride(cols: int, *, odd: bool) -> int:
    """An odd number, or the next multiple of 16 bytes."""
    return cols + (cols + 1) % 2 if odd else -(-cols // 8) * 8


def arrays(problem: Problem) -> Arrays:
    """Random matrices; the strict upper triangle of every addend is NaN, since no kernel may read it."""
    generator = torch.Generator().manual_seed(problem.size * 1000 + problem.depth)

    def random(rows: int, cols: int, *, lower: bool = False) -> Guarded:
        values = torch.randn(problem.batch, rows, cols, generator=generator)
        if lower:
            above = torch.ones(rows, cols, dtype=torch.bool).triu(1)
            values = values.masked_fill(above, float("nan"))
        stride = row_stride(cols, odd=problem.odd_rows or (lower and problem.odd_addends))
        return Guarded.filled(values, problem.dtype, row_stride=stride, shift=problem.shift)

    left = random(problem.size, problem.depth)
    right = left if problem.same else random(problem.size, problem.depth)
    addends = [random(problem.size, problem.size, lower=True) for _ in range(problem.addends)]
    stride = row_stride(problem.size, odd=problem.odd_rows)
    shape = (problem.batch, problem.size, problem.size)
    empty = Guarded.empty(*shape, problem.dtype, row_stride=stride, shift=problem.shift)
    return Arrays(left, right, addends, addends[0] if problem.in_place else empty)


def solution(data: Arrays) -> tuple[Tensor, Tensor]:
    """The product in float64 and, element by element, the most that one rounding and float32 sums may change.

    A sum of n float32 terms in any order is off by at most n roundoffs of the sum of magnitudes.
    """
    left, right = data.left.matrices.double(), data.right.matrices.double()
    exact = data.alpha * left @ right.mT
    magnitude = data.alpha * left.abs() @ right.abs().mT
    for beta, addend in zip(data.beta, data.addends, strict=False):
        exact += beta * addend.matrices.double()
        magnitude += abs(beta) * addend.matrices.double().abs()
    identity = data.gamma * torch.eye(exact.shape[-1], dtype=torch.float64)
    exact, magnitude = (exact + identity).tril(), (magnitude + identity).tril()
    exact, magnitude = (x + x.tril(-1).mT for x in (exact, magnitude))
    terms = left.shape[-1] + len(data.addends) + 3
    bound = ROUNDOFF[data.left.matrices.dtype] * exact.abs() + 1.01 * terms * FLOAT32_ROUNDOFF * magnitude
    return exact, bound


def check(data: Arrays, exact: Tensor, bound: Tensor) -> float:
    """Asserts values, symmetry and guards; returns the relative error in the Frobenius norm."""
    out = data.out.matrices
    error = (out.double() - exact).abs()
    assert bool((error <= bound).all()), f"error {error.max():.3g} where {bound.max():.3g} is allowed"
    assert torch.equal(out, out.mT)
    for array in (data.left, data.right, *data.addends, data.out):
        assert array.outside_is_untouched()
    return float(error.norm() / exact.norm())


MMA_TILE, MMA_THREADS, MMA_SHARED_BYTES = 128, 256, 4 * 16384


def run_mma(library: Emulated, problem: Problem, seed: int = 0) -> float:
    """Launches ``symmetric_mma``, or ``problem.parts`` of its depth and their total; checks what it wrote."""
    data = arrays(problem)
    exact, bound = solution(data)
    across = -(-problem.size // MMA_TILE)
    tiles = across * (across + 1) // 2
    batches = [data.batch(array, listed=problem.listed) for array in (data.left, data.right, data.out)]
    blocks, parts = tiles * problem.batch, problem.parts
    partial = torch.full((blocks * parts + 1, MMA_TILE**2), float("nan"))
    what = (problem.size, problem.depth, tiles, parts, partial.data_ptr())
    product = SymmetricProduct(*batches, data.terms(problem), *what)
    for share, times in (("_part", parts), ("_total", 1)) if parts > 1 else (("", 1),):
        library.launch(
            f"symmetric_mma{share}_{element(problem)}",
            product,
            blocks=blocks * times,
            threads=MMA_THREADS,
            shared_bytes=MMA_SHARED_BYTES,
            readable=[array.matrices for array in (data.left, data.right, *data.addends)],
            seed=seed,
        )
    assert bool(partial[-1].isnan().all())
    return check(data, exact, bound)


WGMMA_TILE, WGMMA_THREADS, CLUSTER = 128, 384, 2
WGMMA_SHARED_BYTES = 6 * 32768 + 4 * 8192 + 14 * 8
BOXES = ((64, 64), (128, 64), (64, 64))  # left, right, out


def pairs_of_tiles(size: int) -> int:
    """Pairs of neighbours in the rows of a triangle, and of what is left at their ends."""
    down = -(-size // WGMMA_TILE)
    neighbours = sum((row + 1) // 2 for row in range(down))
    left = sum((row + 1) % 2 for row in range(down))
    return neighbours + -(-left // 2)


def run_wgmma(library: Emulated, problem: Problem, seed: int = 0) -> float:
    """Launches ``symmetric_wgmma`` with ``problem.blocks`` clusters and checks what it wrote."""
    data = arrays(problem)
    exact, bound = solution(data)
    pairs = pairs_of_tiles(problem.size)
    boxed = list(zip((data.left, data.right, data.out), BOXES, strict=True))
    maps = [TensorMap.of(array.matrices, *box) for array, box in boxed]
    each = [TensorMap.array(array.matrices, *box) for array, box in boxed]
    if problem.listed:
        maps = [TensorMap()] * 3
    pointers = [ctypes.addressof(array) if problem.listed else None for array in each]
    library.launch(
        f"symmetric_wgmma_{element(problem)}",
        SymmetricTensorProduct(
            *maps, *pointers, data.terms(problem), problem.size, problem.depth, pairs, problem.batch
        ),
        blocks=CLUSTER * min(problem.blocks, pairs * problem.batch),
        threads=WGMMA_THREADS,
        shared_bytes=WGMMA_SHARED_BYTES,
        readable=[],
        seed=seed,
    )
    return check(data, exact, bound)
