"""What Cholesky QR of panels has to satisfy, against float64."""

from __future__ import annotations

import torch
from torch import Tensor

from .emulator.arrays import Guarded
from .panels import (
    FLOAT32_ROUNDOFF,
    TILE,
    Kernels,
    Which,
    factor,
    gram,
    orthogonality_error,
    panels_of_condition,
    solve,
)

# Twice float32's error for one product of two split operands: what 3xTF32 leaves out and rounds.
SPLIT_ERROR = 4 * FLOAT32_ROUNDOFF
THRESHOLD = 0.05
Shape = tuple[int, int, int, bool]  # panels, rows, columns, odd row strides


def lower_triangle(matrices: Tensor) -> Tensor:
    """True on and below the diagonals."""
    return torch.ones_like(matrices, dtype=torch.bool).tril()


def check_gram(kernels: Kernels, shape: Shape, parts: int) -> None:
    """The sum of all parts is off by float32 rounding, and nothing is written above the diagonal."""
    batch, rows, cols, odd_rows = shape
    panels = panels_of_condition([3.0] * batch, rows, cols, odd_rows=odd_rows)
    written = gram(kernels, panels, parts).matrices.double()
    got = written.view(batch, parts, cols, cols).sum(1)
    exact = panels.matrices.double()
    magnitude = exact.abs().mT @ exact.abs()
    bound = (SPLIT_ERROR + (rows + 8) * FLOAT32_ROUNDOFF) * magnitude
    assert bool(((got - exact.mT @ exact).abs() <= bound)[lower_triangle(bound)].all())
    assert torch.equal(written.isnan(), ~lower_triangle(written))
    listed = gram(kernels, panels, parts, listed=True).matrices.double()
    assert torch.equal(listed.nan_to_num(), written.nan_to_num())


def check_factor_and_solve(kernels: Kernels, shape: Shape) -> None:
    """Residuals of factor, inverses and solve are rounding errors, and Q is orthonormal."""
    batch, rows, cols, odd_rows = shape
    panels = panels_of_condition([10.0] * batch, rows, cols, odd_rows=odd_rows)
    grams = gram(kernels, panels, 2)
    made = factor(kernels, grams, 2)
    assert made.status.info == [0] * batch

    parts = grams.matrices.double().view(batch, 2, cols, cols).sum(1).tril()
    whole = parts + parts.tril(-1).mT
    written = made.factor.matrices
    assert torch.equal(written.isnan(), ~lower_triangle(written))
    lower = written.double().tril()
    # Backward error of Cholesky: (cols + 1) roundoffs of |L| |L|^T; four times that for the inverted tiles.
    bound = 4 * (cols + 8) * FLOAT32_ROUNDOFF * (lower.abs() @ lower.abs().mT)
    assert bool(((lower @ lower.mT - whole).abs() <= bound).all())

    pivots = lower.diagonal(dim1=1, dim2=2) / whole.diagonal(dim1=1, dim2=2).sqrt()
    expected = pivots.amin(1) / pivots.amax(1)
    assert torch.allclose(made.status.ratio.double(), expected, rtol=1e-5, atol=0)

    tiles = -(-cols // TILE)
    inverses = made.inverses.matrices.double().view(batch, tiles, TILE, TILE)
    for j in range(tiles):
        end = min(cols, (j + 1) * TILE)
        diagonal = torch.eye(TILE, dtype=torch.float64).repeat(batch, 1, 1)
        diagonal[:, : end - j * TILE, : end - j * TILE] = lower[:, j * TILE : end, j * TILE : end]
        error = (inverses[:, j] @ diagonal - torch.eye(TILE, dtype=torch.float64)).abs()
        assert bool((error <= 4 * TILE * FLOAT32_ROUNDOFF * (inverses[:, j].abs() @ diagonal.abs())).all())

    out = Guarded.empty(batch, rows, cols, torch.float32, row_stride=panels.matrices.stride(1))
    solve(kernels, panels, made, out)
    q = out.matrices.double()
    bound = 4 * (cols + 8) * FLOAT32_ROUNDOFF * (q.abs() @ lower.abs().mT)
    assert bool(((q @ lower.mT - panels.matrices.double()).abs() <= bound).all())
    assert max(orthogonality_error(panel) for panel in out.matrices) < 2e-5
    solve(kernels, panels, made, panels, listed=True)
    assert torch.equal(panels.matrices, out.matrices)


def check_second_pass(kernels: Kernels) -> None:
    """A second pass works on ill-conditioned panels and leaves the others as they are."""
    panels = panels_of_condition([2.0, 800.0, float("inf")], 128, 70)
    made = factor(kernels, gram(kernels, panels))
    solve(kernels, panels, made, panels)  # in place
    first = panels.matrices.clone()
    assert made.status.info[:2] == [0, 0]
    assert made.status.info[2] == 70 // 2 + 1
    assert made.status.ratio[0] > THRESHOLD > made.status.ratio[1]
    assert orthogonality_error(first[0]) < 1e-6
    assert orthogonality_error(first[1]) > 1e-4

    ill = made.status.select(Which.ILL_CONDITIONED, THRESHOLD)
    grams = gram(kernels, panels, selection=ill)
    again = factor(kernels, grams, selection=ill)
    assert bool(grams.matrices[[0, 2]].isnan().all())
    assert torch.equal(again.status.entries[[0, 2]], made.status.entries[[0, 2]])
    solve(kernels, panels, again, panels, selection=ill)
    assert torch.equal(panels.matrices[[0, 2]], first[[0, 2]])
    assert orthogonality_error(panels.matrices[1]) < 1e-6


def check_shift(kernels: Kernels) -> None:
    """A shift factors what failed, and two more passes orthonormalize it."""
    panels = panels_of_condition([2.0, 3e5], 120, 70)
    first = factor(kernels, gram(kernels, panels))
    solve(kernels, panels, first, panels)
    assert first.status.info[0] == 0
    assert first.status.info[1] > 0
    kept = panels.matrices[0].clone()

    failed = first.status.select(Which.FAILED, THRESHOLD)
    # 70 columns, each with float32's rounding: the condition after it is about 1000, which two passes mend.
    shift = torch.tensor([70 * 1.2e-7])
    for by in (shift, 0.0, 0.0):
        made = factor(kernels, gram(kernels, panels, selection=failed), selection=failed, shift=by)
        assert made.status.info == [0, 0]
        assert made.status.ratio[0] == first.status.ratio[0]
        solve(kernels, panels, made, panels, selection=failed)
    assert orthogonality_error(panels.matrices[1]) < 1e-6
    assert torch.equal(panels.matrices[0], kept)


def check_left_out(kernels: Kernels) -> None:
    """Columns of zeros, and dependent ones where it is asked for, become zero; others are orthonormal."""
    panels = panels_of_condition([2.0, float("inf"), 2.0], 128, 70)
    panels.matrices[2][:, [0, 40]] = 0.0
    panels.matrices[1][:, 66] = panels.matrices[1][:, 3]
    first = factor(kernels, gram(kernels, panels))
    assert first.status.info == [0, 70 // 2 + 1, 0]
    assert first.status.ratio[2] > THRESHOLD
    solve(kernels, panels, first, panels)
    kept = panels.matrices[[0, 2]].clone()

    failed = first.status.select(Which.FAILED, THRESHOLD)
    made = factor(kernels, gram(kernels, panels, selection=failed), selection=failed, left_out=1e-5)
    assert made.status.info == [0, 0, 0]
    assert made.status.ratio[1] > THRESHOLD
    solve(kernels, panels, made, panels, selection=failed)
    assert torch.equal(panels.matrices[[0, 2]], kept)
    for z, empty in ((1, [35, 66]), (2, [0, 40])):
        panel = panels.matrices[z]
        assert panel.abs().amax(0).eq(0).nonzero().flatten().tolist() == empty
        assert orthogonality_error(panel[:, panel.abs().amax(0) > 0]) < 1e-6


def check_shift_of_failed_panels(kernels: Kernels) -> None:
    """A shift leaves a panel alone that did not fail before."""
    panels = panels_of_condition([100.0, 3e5], 120, 70)
    grams = gram(kernels, panels)
    first = factor(kernels, grams)
    assert [info > 0 for info in first.status.info] == [False, True]
    both = first.status.select(Which.ILL_CONDITIONED_OR_FAILED, 2.0)
    made = factor(kernels, grams, selection=both, shift=1e-3)
    assert made.status.info == [0, 0]
    assert torch.equal(made.factor.matrices[0].tril(), first.factor.matrices[0].tril())


def check_not_finite(kernels: Kernels) -> None:
    """A panel with an infinity fails; its neighbour does not notice."""
    panels = panels_of_condition([2.0, 2.0], 80, 20)
    panels.matrices[1, 3, 4] = float("inf")
    made = factor(kernels, gram(kernels, panels))
    assert made.status.info[0] == 0
    assert made.status.info[1] > 0
    assert factor(kernels, gram(kernels, panels), left_out=1e-5).status.info[1] > 0
    before = panels.matrices[1].clone()
    solve(kernels, panels, made, panels)
    assert torch.equal(panels.matrices[1], before)
    assert orthogonality_error(panels.matrices[0]) < 1e-6
