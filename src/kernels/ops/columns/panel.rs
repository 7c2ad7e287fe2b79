//! Orthonormal columns by Cholesky QR, on panels of float32. What a pass decides it leaves on the device, where the next
//! one reads it: every pass is launched, and works on the panels that need it.
//!
//! Columns are scaled to norm 1 first, with sums in float64, so any finite scale is allowed. With r columns:
//!
//! | pass | panels | shift of those that failed before | pivots of rounding size |
//! |---|---|---|---|
//! | 1 | all | | fail |
//! | 2, 3 | failed, or a ratio below 0.5 | (r + 32) 1.2e-7 | fail |
//! | 4, 5 | the same | | the column is left out |
//!
//! A shift helps where the columns differ by more than the rounding of float32. A column that depends on
//! others to the last bit fails again, and passes 4 and 5 leave it out. Its result is zero: Dion then adds
//! nothing to momentum or weight along it, and Q keeps its column. On CPUs Householder QR replaces such a column by
//! some direction, which is set to zero afterwards. A matrix of zeros stays zero. A column that is not finite becomes NaN. There is no sketch
//! and no random number: `"rcqr"` and `"cqr"` are the same.
//!
//! float64, square matrices and `qr_method="qr"` go through `torch.linalg.qr`. It is not known whether the
//! solver of CUDA lets itself be captured then.

use tch::Tensor;

use super::fallback::scale_to_units;
use crate::error::Result;
use crate::kernels::cuda::device::{launch, scratch, size};
use crate::kernels::cuda::driver::Grid;
use crate::kernels::cuda::table::to_i32;
use crate::kernels::ops::symmetric::device::{Factor, MatrixBatch};
use crate::tensor::{DType, FlatView, to_i64};

/// Bytes of shared memory of a block.
pub(in crate::kernels) const GRAM_SHARED: u32 = 55296;
/// Bytes of shared memory of a block.
pub(in crate::kernels) const CHOLESKY_SHARED: u32 = 90624;
/// Rows and columns of a tile, threads of a block.
const TILE: usize = 64;
const THREADS: u32 = 128;
/// Rows of a panel that one block of the Gram product takes, and how many of these blocks a panel has at most.
const PART: usize = 512;
const MOST_PARTS: usize = 400;
/// Tiles across a matrix from which several blocks factor it: 449 columns.
const MANY_TILES: usize = 8;
/// First passes that panels are likely to need. Those behind them are for panels that failed: by columns of tiles each
/// would be some 2 r / 64 launches, nearly always for nothing.
const LIKELY: usize = 2;

/// `Which` of `panel.cuh`.
const EVERY: i32 = 0;
const ILL_CONDITIONED_OR_FAILED: i32 = 3;

/// Smallest over largest diagonal element of the factor, columns of norm 1, from which one pass is enough: the error of a
/// pass is then a few roundoffs, as it is where the CPU takes one.
const ONE_PASS: f32 = 0.5;
/// Above every such ratio.
const NEVER: f32 = 2.0;
/// Distance from 1 to the next float32.
const EPSILON: f32 = 1.2e-7;

/// As `panel.cuh` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Selection {
    status: usize,
    threshold: f32,
    which: i32,
}

/// As `gram.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct GramProduct {
    panel: MatrixBatch,
    gram: usize,
    selection: Selection,
    rows: i32,
    cols: i32,
    tiles: i32,
    parts: i32,
}

/// As `cholesky.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct CholeskyFactor {
    gram: usize,
    factor: usize,
    inverses: usize,
    status: usize,
    selection: Selection,
    shift: Factor,
    left_out: f32,
    size: i32,
    parts: i32,
    column: i32,
}

/// As `cholesky.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct CholeskySolve {
    panel: MatrixBatch,
    out: MatrixBatch,
    factor: usize,
    inverses: usize,
    status: usize,
    selection: Selection,
    rows: i32,
    cols: i32,
    tiles: i32,
}

const _: () = {
    assert!(size_of::<GramProduct>() == 72 && size_of::<CholeskyFactor>() == 80);
    assert!(size_of::<CholeskySolve>() == 120);
};

/// One Cholesky QR of the panels that are not orthonormal yet.
#[derive(Clone, Copy, Debug)]
struct Pass {
    selection: Selection,
    /// Share of the diagonal that is added to it in the panels that failed in the pass before.
    shift: f32,
    /// Pivots up to this share of their column's square leave the column out.
    left_out: f32,
}

/// Panels and the memory of their passes.
struct Panels {
    panel: MatrixBatch,
    shape: [usize; 3],
    parts: usize,
    gram: FlatView<'static>,
    factor: FlatView<'static>,
    inverses: FlatView<'static>,
    _memory: [Tensor; 3],
}

/// See [`crate::kernels::orthonormal_columns`].
pub(in crate::kernels) fn orthonormal_columns(
    matrices: &FlatView,
    shape @ [count, _, cols]: [usize; 3],
    twice: bool,
    rounding_of_input: f64,
) -> Result<()> {
    if matrices.is_empty() {
        return Ok(());
    }
    scale_to_units(matrices, shape)?;
    let panels = Panels::new(matrices, shape)?;
    // Rounding of a sum of `cols + TILE / 2` products, as a share of their sizes.
    #[allow(clippy::cast_precision_loss)] // a number of columns
    let rounding = (cols + TILE / 2) as f32 * EPSILON;
    // A column whose own part is no more than the rounding of what it was made of has none, if that is more than this.
    #[allow(clippy::cast_possible_truncation)] // a rounding
    let own = (rounding_of_input * rounding_of_input) as f32;
    let made_up = if own > EPSILON { own.max(rounding) } else { 0.0 };
    let every = Selection { which: EVERY, ..Selection::default() };
    let unfinished = |threshold| Selection { status: 0, threshold, which: ILL_CONDITIONED_OR_FAILED };
    let ill = unfinished(ONE_PASS);
    let passes = [
        Pass { selection: every, shift: 0.0, left_out: made_up },
        Pass { selection: if twice { unfinished(NEVER) } else { ill }, shift: rounding, left_out: 0.0 },
        Pass { selection: ill, shift: rounding, left_out: 0.0 },
        // What no shift made independent is not in the matrix.
        Pass { selection: ill, shift: 0.0, left_out: rounding },
        Pass { selection: ill, shift: 0.0, left_out: rounding },
    ];
    let (_memory, statuses) = scratch(passes.len() * count, DType::F64, matrices.device())?;
    let at = |pass: usize| statuses.part(pass * count, count).device_address();
    for (number, pass) in passes.into_iter().enumerate() {
        let before = if number == 0 { 0 } else { at(number - 1)? };
        let selection = Selection { status: before, ..pass.selection };
        panels.run(Pass { selection, ..pass }, at(number)?, number < LIKELY)?;
    }
    Ok(())
}

impl Panels {
    /// Parts of the rows, each with a Gram matrix of its own: by the shape of one panel alone, so that what else is in
    /// the batch changes no bit.
    fn parts([_, rows, cols]: [usize; 3]) -> usize {
        rows.div_ceil(PART).clamp(1, (MOST_PARTS / Self::triangle(cols)).max(1))
    }

    /// Tiles of the lower triangle.
    fn triangle(cols: usize) -> usize {
        let tiles = cols.div_ceil(TILE);
        tiles * (tiles + 1) / 2
    }

    /// With memory for Gram matrices, factors and inverted tiles.
    fn new(matrices: &FlatView, shape @ [count, rows, cols]: [usize; 3]) -> Result<Self> {
        let (square, tiles) = (cols * cols, cols.div_ceil(TILE) * TILE * TILE);
        let room = |each: usize| scratch(count * each, DType::F32, matrices.device());
        let panel = MatrixBatch {
            first: matrices.device_address()?,
            each: 0,
            matrix_stride: to_i64(rows * cols)?,
            row_stride: to_i64(cols)?,
        };
        let ((gram_memory, gram), (factor_memory, factor), (inverses_memory, inverses)) =
            (room(Self::parts(shape) * square)?, room(square)?, room(tiles)?);
        let memory = [gram_memory, factor_memory, inverses_memory];
        Ok(Self { panel, shape, parts: Self::parts(shape), gram, factor, inverses, _memory: memory })
    }

    /// Tests whether several blocks factor a matrix: where it has many tiles, and one for each matrix leaves half of the
    /// multiprocessors without work.
    fn by_columns(&self) -> bool {
        let [count, _, cols] = self.shape;
        let multiprocessors = size().map_or(0, |(multiprocessors, _)| multiprocessors as usize);
        cols.div_ceil(TILE) >= MANY_TILES && 2 * count <= multiprocessors
    }

    /// One pass, whose outcome goes to `status`; `likely`: panels are expected to need it.
    fn run(&self, Pass { selection, shift, left_out }: Pass, status: usize, likely: bool) -> Result<()> {
        let ([count, rows, cols], parts, panel) = (self.shape, self.parts, self.panel);
        let (tiles, row_tiles) = (Self::triangle(cols), rows.div_ceil(TILE));
        let gram = self.gram.device_address()?;
        let (factor, inverses) = (self.factor.device_address()?, self.inverses.device_address()?);
        let product = GramProduct {
            panel,
            gram,
            selection,
            rows: to_i32(rows)?,
            cols: to_i32(cols)?,
            tiles: to_i32(tiles)?,
            parts: to_i32(parts)?,
        };
        let factorization = CholeskyFactor {
            gram,
            factor,
            inverses,
            status,
            selection,
            shift: Factor { live: 0, value: shift },
            left_out,
            size: to_i32(cols)?,
            parts: to_i32(parts)?,
            column: 0,
        };
        let solve = CholeskySolve {
            panel,
            out: panel,
            factor,
            inverses,
            status,
            selection,
            rows: to_i32(rows)?,
            cols: to_i32(cols)?,
            tiles: to_i32(row_tiles)?,
        };
        // SAFETY: the layouts are asserted above; panels and scratch are memory of the device, which torch's allocator
        // gives to others only after what is on the stream.
        unsafe {
            launch("gram_product", Grid::of(count * parts * tiles, THREADS, GRAM_SHARED)?, &product)?;
            if likely && self.by_columns() {
                let across = cols.div_ceil(TILE);
                for column in 0..across {
                    let this = CholeskyFactor { column: to_i32(column)?, ..factorization };
                    launch("cholesky_diagonal", Grid::of(count, THREADS, CHOLESKY_SHARED)?, &this)?;
                    let below = count * (across - 1 - column);
                    if below > 0 {
                        launch("cholesky_below", Grid::of(below, THREADS, CHOLESKY_SHARED)?, &this)?;
                    }
                }
            } else {
                launch("cholesky_factor", Grid::of(count, THREADS, CHOLESKY_SHARED)?, &factorization)?;
            }
            launch("cholesky_solve", Grid::of(count * row_tiles, THREADS, CHOLESKY_SHARED)?, &solve)
        }
    }
}
