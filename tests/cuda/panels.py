"""Launches of the Gram product, the Cholesky factor and the panel solve on batches of panels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from .emulator.arrays import Guarded
from .emulator.library import Emulated
from .emulator.parameters import (
    CholeskyFactor,
    CholeskySolve,
    Factor,
    GramProduct,
    MatrixBatch,
    PanelStatus,
    Selection,
)

FLOAT32_ROUNDOFF = 2.0**-24
TILE, THREADS = 64, 128
GRAM_SHARED_BYTES = 3 * 2 * 32 * 72 * 4
CHOLESKY_SHARED_BYTES = (3 * 2 * 64 * 36 + 2 * 64 * 68 + 2 * 64) * 4


class Which(IntEnum):
    """Mirror of ``Which``."""

    EVERY = 0
    ILL_CONDITIONED = 1
    FAILED = 2
    ILL_CONDITIONED_OR_FAILED = 3


@dataclass
class Kernels:
    """The two libraries, the order in which warps take turns, and whether several blocks factor a matrix."""

    gram: Emulated
    cholesky: Emulated
    seed: int = 0
    by_columns: bool = False


@dataclass
class Status:
    """Outcomes of a batch."""

    entries: Tensor  # int32 [B, 2]

    @classmethod
    def empty(cls, batch: int) -> Status:
        """Unwritten outcomes: -1, which no panel has."""
        return cls(torch.full((batch, 2), -1, dtype=torch.int32))

    @property
    def info(self) -> list[int]:
        """0, or 1 + the first bad column."""
        return self.entries[:, 0].tolist()

    @property
    def ratio(self) -> Tensor:
        """Smallest over largest pivot."""
        return self.entries[:, 1].contiguous().view(torch.float32)

    def select(self, which: Which, threshold: float) -> Selection:
        """Panels by these outcomes."""
        return Selection(self.entries.data_ptr(), threshold, which)


@dataclass
class Factored:
    """What ``cholesky_factor`` leaves."""

    factor: Guarded
    inverses: Guarded
    status: Status


EVERYTHING = Selection(None, 0.0, Which.EVERY)
assert len(PanelStatus._fields_) == 2


def batch_of(matrices: Tensor, *, listed: bool) -> tuple[MatrixBatch, Tensor | None]:
    """By stride or by pointers, and what has to live as long."""
    return MatrixBatch.listed(matrices) if listed else (MatrixBatch.strided(matrices), None)


def gram(
    kernels: Kernels,
    panels: Guarded,
    parts: int = 1,
    selection: Selection = EVERYTHING,
    *,
    listed: bool = False,
) -> Guarded:
    """The Gram matrices [B * parts, r, r] of panels; NaN where nothing is written."""
    matrices, _pointers = batch_of(panels.matrices, listed=listed)
    batch, rows, cols = panels.matrices.shape
    out = Guarded.empty(batch * parts, cols, cols, torch.float32, row_stride=cols)
    across = -(-cols // TILE)
    tiles = across * (across + 1) // 2
    parameters = GramProduct(matrices, out.matrices.data_ptr(), selection, rows, cols, tiles, parts)
    kernels.gram.launch(
        "gram_product",
        parameters,
        blocks=batch * parts * tiles,
        threads=THREADS,
        shared_bytes=GRAM_SHARED_BYTES,
        readable=[panels.matrices],
        seed=kernels.seed,
    )
    assert out.outside_is_untouched()
    return out


def factor(
    kernels: Kernels,
    grams: Guarded,
    parts: int = 1,
    selection: Selection = EVERYTHING,
    shift: float | Tensor = 0.0,
    left_out: float = 0.0,
) -> Factored:
    """Lower factors of Gram matrices given in parts, by a block each or column by column."""
    total, size, _ = grams.matrices.shape
    batch, tiles = total // parts, -(-size // TILE)
    made = Factored(
        Guarded.empty(batch, size, size, torch.float32, row_stride=size),
        Guarded.empty(batch * tiles, TILE, TILE, torch.float32, row_stride=TILE),
        Status.empty(batch),
    )
    parameters = CholeskyFactor(
        grams.matrices.data_ptr(),
        made.factor.matrices.data_ptr(),
        made.inverses.matrices.data_ptr(),
        made.status.entries.data_ptr(),
        selection,
        Factor.of(shift),
        left_out,
        size,
        parts,
        0,
    )
    launches = [("cholesky_factor", 0, batch)]
    if kernels.by_columns:
        launches = [
            (name, column, blocks)
            for column in range(tiles)
            for name, blocks in (
                ("cholesky_diagonal", batch),
                ("cholesky_below", batch * (tiles - 1 - column)),
            )
            if blocks
        ]
    for name, column, blocks in launches:
        parameters.column = column
        kernels.cholesky.launch(
            name,
            parameters,
            blocks=blocks,
            threads=THREADS,
            shared_bytes=CHOLESKY_SHARED_BYTES,
            readable=[made.factor.matrices],
            seed=kernels.seed,
        )
    assert made.factor.outside_is_untouched()
    assert made.inverses.outside_is_untouched()
    return made


def solve(
    kernels: Kernels,
    panels: Guarded,
    made: Factored,
    out: Guarded,
    selection: Selection = EVERYTHING,
    *,
    listed: bool = False,
) -> None:
    """Writes panels times the inverse transposed factors; ``out`` may be ``panels``."""
    batch, rows, cols = panels.matrices.shape
    tiles = -(-rows // TILE)
    read, _read_pointers = batch_of(panels.matrices, listed=listed)
    written, _written_pointers = batch_of(out.matrices, listed=listed)
    parameters = CholeskySolve(
        read,
        written,
        made.factor.matrices.data_ptr(),
        made.inverses.matrices.data_ptr(),
        made.status.entries.data_ptr(),
        selection,
        rows,
        cols,
        tiles,
    )
    kernels.cholesky.launch(
        "cholesky_solve",
        parameters,
        blocks=batch * tiles,
        threads=THREADS,
        shared_bytes=CHOLESKY_SHARED_BYTES,
        readable=[out.matrices, made.factor.matrices],
        seed=kernels.seed,
    )
    assert panels.outside_is_untouched()
    assert out.outside_is_untouched()


def signs(size: int) -> Tensor:
    """A matrix of 1 and -1 with orthogonal columns; ``size`` is a power of 2."""
    made = torch.ones(1, 1, dtype=torch.float64)
    while len(made) < size:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return made


def panels_of_condition(conditions: list[float], rows: int, cols: int, *, odd_rows: bool = False) -> Guarded:
    """Panels with singular values from 1 down to 1 / condition, in random directions.

    Infinity: columns of signs, orthogonal but for the middle one, which repeats the first: its pivot is 0.
    """
    generator = torch.Generator().manual_seed(rows + cols)
    made = []
    for condition in conditions:
        left = torch.linalg.qr(torch.randn(rows, cols, generator=generator, dtype=torch.float64)).Q
        right = torch.linalg.qr(torch.randn(cols, cols, generator=generator, dtype=torch.float64)).Q
        if condition == float("inf"):
            panel = signs(rows)[:, :cols].clone()
            panel[:, cols // 2] = panel[:, 0]
        else:
            panel = left * torch.logspace(0, -torch.tensor(condition).log10().item(), cols) @ right
        made.append(panel)
    stride = cols + (cols + 1) % 2 if odd_rows else -(-cols // 4) * 4
    return Guarded.filled(torch.stack(made), torch.float32, row_stride=stride)


def orthogonality_error(panel: Tensor) -> float:
    """Norm of Q^T Q - I per column, in float64."""
    q = panel.double()
    cols = q.shape[-1]
    return float((q.mT @ q - torch.eye(cols, dtype=torch.float64)).norm() / cols**0.5)
