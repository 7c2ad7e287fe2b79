//! Symmetric products of 16-bit matrices, of which one triangle is computed.

use tch::{Kind, Tensor};

use super::device::{is_entered, launch};
use super::driver::Grid;
use super::sources::SYMMETRIC_MMA;
use crate::batch::{address_of, is_emulated};
use crate::error::{Error, Result};

/// Rows and columns of a tile, threads of its block.
const TILE: i64 = 128;
/// Rows of a product from which less than all of its tiles are computed.
const FROM: i64 = TILE + 1;
const THREADS: u32 = 256;

/// As `common.cuh` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MatrixBatch {
    pub(super) first: usize,
    pub(super) each: usize,
    pub(super) matrix_stride: i64,
    pub(super) row_stride: i64,
}

/// As `common.cuh` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Factor {
    pub(super) live: usize,
    pub(super) value: f32,
}

/// As `symmetric.cuh` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Terms {
    addend: [MatrixBatch; 2],
    alpha: Factor,
    beta: [Factor; 2],
    gamma: Factor,
}

/// As `symmetric_mma.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct SymmetricProduct {
    left: MatrixBatch,
    right: MatrixBatch,
    out: MatrixBatch,
    terms: Terms,
    size: i32,
    depth: i32,
    tiles: i32,
}

const _: () = assert!(size_of::<SymmetricProduct>() == 3 * 32 + (2 * 32 + 4 * 16) + 16);

/// Matrices of one size in a tensor: how many, rows and columns of each, and where they are.
struct Matrices {
    count: i64,
    shape: [i64; 2],
    batch: MatrixBatch,
}

impl Matrices {
    /// A tensor `[rows, cols]` or `[count, rows, cols]` whose rows lie together; none for another.
    fn of(tensor: &Tensor) -> Option<Self> {
        let (size, stride) = (tensor.size(), tensor.stride());
        let (count, matrix_stride, shape, [row_stride, step]) = match (size.as_slice(), stride.as_slice()) {
            (&[rows, cols], &[row, step]) => (1, 0, [rows, cols], [row, step]),
            (&[count, rows, cols], &[matrix, row, step]) => (count, matrix, [rows, cols], [row, step]),
            _ => return None,
        };
        let batch = MatrixBatch { first: address_of(tensor), each: 0, matrix_stride, row_stride };
        (step == 1 || shape[1] == 1).then_some(Self { count, shape, batch })
    }
}

/// See [`super::super::symmetric_product`].
pub(in super::super) fn symmetric_product(
    out: &Tensor,
    [a, b]: [&Tensor; 2],
    accumulate: bool,
) -> Result<bool> {
    let kind = out.f_kind()?;
    let on_device = is_entered() && (out.device().is_cuda() || is_emulated());
    if !on_device || a.f_kind()? != kind || b.f_kind()? != kind {
        return Ok(false);
    }
    let name = match kind {
        Kind::BFloat16 => "symmetric_mma_bfloat16",
        Kind::Half => "symmetric_mma_float16",
        _ => return Ok(false),
    };
    let (Some(left), Some(right), Some(to)) = (Matrices::of(a), Matrices::of(b), Matrices::of(out)) else {
        return Ok(false);
    };
    let [k, n] = left.shape;
    if left.shape != right.shape || to.shape != [k, k] || [right.count, to.count] != [left.count; 2] {
        return Err(Error::Internal(format!("a symmetric product {:?} of {:?}", out.size(), a.size())));
    }
    if k < FROM || left.count == 0 {
        return Ok(false);
    }
    let tiles = (k + TILE - 1) / TILE;
    let triangle = tiles * (tiles + 1) / 2;
    let narrow = |x: i64| i32::try_from(x).map_err(|_| Error::Internal(format!("a side of {x}")));
    let one = Factor { live: 0, value: 1.0 };
    let addend = [if accumulate { to.batch } else { MatrixBatch::default() }, MatrixBatch::default()];
    let product = SymmetricProduct {
        left: left.batch,
        right: right.batch,
        out: to.batch,
        terms: Terms { addend, alpha: one, beta: [one, Factor::default()], gamma: Factor::default() },
        size: narrow(k)?,
        depth: narrow(n)?,
        tiles: narrow(triangle)?,
    };
    let blocks = u32::try_from(left.count * triangle)
        .map_err(|_| Error::Internal(format!("{} matrices at once", left.count)))?;
    let grid = Grid { blocks, threads: THREADS, shared: SYMMETRIC_MMA.shared };
    // SAFETY: the layout is asserted above; the tensors are memory of the device, and torch's allocator gives it to
    // others only after what is on the stream.
    unsafe { launch(name, grid, &product) }?;
    Ok(true)
}
