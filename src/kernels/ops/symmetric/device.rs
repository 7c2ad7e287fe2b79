//! Symmetric products of 16-bit matrices, with only one triangle computed.

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::kernels::backend::Tier;
use crate::kernels::cuda::device::{is_entered, launch, multiprocessors, ordinal, scratch, size};
use crate::kernels::cuda::driver::{Boxes, Grid, TensorMap, tensor_map};
use crate::kernels::cuda::sources::When;
use crate::kernels::cuda::table::to_i32;
use crate::kernels::ops::symmetric::measured::{ProductClass, measured};
use crate::tensor::{DType, Device, address_of, is_emulated, to_i64};

/// Bytes of shared memory of a block.
pub(in crate::kernels) const SHARED: u32 = 65536;
/// Bytes of shared memory of a block.
pub(in crate::kernels) const GROUP_SHARED: u32 = 229_488;
/// Devices with instructions of warpgroups.
pub(in crate::kernels) const GROUPS: When = When::On("sm_90a");
/// Rows and columns of a tile, threads of a block of `symmetric_mma.cu`.
const TILE: usize = 128;
const THREADS: u32 = 256;
/// Minimum columns of a part of the depth, and the minimum ratio of depth to rows for which a product is split.
const PART: usize = 256;
const DEEP: usize = 4;
/// Sums of a tile.
const SUMS: usize = TILE * TILE;
/// Rows of a product from which less than all of its tiles are computed.
const FROM: i64 = 129;
/// Threads of a block of `symmetric_wgmma.cu`, and its blocks that take a pair of tiles.
const GROUP_THREADS: u32 = 384;
const CLUSTER: u32 = 2;
/// Rows and columns of what a tensor copy of it moves: of the left matrix, the right one, the result.
const MOVED: [[u32; 2]; 3] = [[64, 64], [128, 64], [64, 64]];
/// Devices of this compute capability have matrix units that these kernels do not use.
const OWN_UNITS: i32 = 10;
/// Bytes and elements at whose multiples rows have to start for tensor copies.
const ALIGNED: [usize; 2] = [16, 8];

/// As `common.cuh` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::kernels) struct MatrixBatch {
    pub(in crate::kernels) first: usize,
    pub(in crate::kernels) each: usize,
    pub(in crate::kernels) matrix_stride: i64,
    pub(in crate::kernels) row_stride: i64,
}

/// As `common.cuh` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::kernels) struct Factor {
    pub(in crate::kernels) live: usize,
    pub(in crate::kernels) value: f32,
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
    parts: i32,
    partial: usize,
}

/// As `symmetric_wgmma.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct SymmetricTensorProduct {
    maps: [TensorMap; 3],
    each: [usize; 3],
    terms: Terms,
    size: i32,
    depth: i32,
    pairs: i32,
    batch: i32,
}

const _: () = assert!(size_of::<Terms>() == 2 * 32 + 4 * 16);
const _: () = assert!(size_of::<SymmetricProduct>() == 3 * 32 + size_of::<Terms>() + 24);
const _: () = assert!(size_of::<SymmetricTensorProduct>() == 640);

/// Matrices of one size in a tensor: how many, rows and columns of each, and where they are, in elements.
#[derive(Clone, Copy, Debug)]
struct Matrices {
    count: usize,
    shape: [usize; 2],
    first: usize,
    strides: [usize; 2],
}

impl Matrices {
    /// A tensor `[rows, cols]` or `[count, rows, cols]` whose rows lie together; none for another.
    fn of(tensor: &Tensor) -> Option<Self> {
        let (size, stride) = (tensor.size(), tensor.stride());
        let ([rows, cols, row, step], [count, matrix]) = match (size.as_slice(), stride.as_slice()) {
            (&[rows, cols], &[row, step]) => ([rows, cols, row, step], [1, rows * row]),
            (&[count, rows, cols], &[matrix, row, step]) => ([rows, cols, row, step], [count, matrix]),
            _ => return None,
        };
        if step != 1 && cols != 1 {
            return None;
        }
        let [rows, cols, row, matrix, count] = [rows, cols, row, matrix, count].map(usize::try_from);
        let (shape, strides) = ([rows.ok()?, cols.ok()?], [row.ok()?, matrix.ok()?]);
        Some(Self { count: count.ok()?, shape, first: address_of(tensor), strides })
    }

    fn batch(&self) -> Result<MatrixBatch> {
        let [row_stride, matrix_stride] = self.strides;
        let [row_stride, matrix_stride] = [to_i64(row_stride)?, to_i64(matrix_stride)?];
        Ok(MatrixBatch { first: self.first, each: 0, matrix_stride, row_stride })
    }

    /// Tests whether all rows start where tensor copies can take them.
    fn is_aligned(&self) -> bool {
        let [bytes, elements] = ALIGNED;
        self.first.is_multiple_of(bytes) && self.strides.iter().all(|stride| stride.is_multiple_of(elements))
    }

    fn map(&self, moved: [u32; 2], float16: bool) -> Result<TensorMap> {
        let ([rows, cols], count) = (self.shape, self.count);
        tensor_map(&Boxes {
            first: self.first,
            extent: [cols, rows, count],
            strides: self.strides,
            moved,
            float16,
        })
    }
}

/// Tests whether a kernel on this thread computes symmetric products of matrices of this type with `rows` rows.
pub(in crate::kernels) fn has_symmetric_product(kind: Kind, rows: i64) -> bool {
    is_entered() && matches!(kind, Kind::BFloat16 | Kind::Half) && rows >= FROM
}

/// See [`crate::kernels::symmetric_product`].
pub(in crate::kernels) fn symmetric_product(
    out: &Tensor,
    factors: [&Tensor; 2],
    add: &[(f64, &Tensor)],
    scalars: [f64; 2],
) -> Result<bool> {
    let Some(product) = prepared(out, factors, add, scalars)? else { return Ok(false) };
    if Tier::wanted() == Tier::Auto && !product.is_worth_it() {
        return Ok(false);
    }
    // With a tile for every multiprocessor, the instructions of warpgroups are the faster ones.
    let blocks = multiprocessors(GROUPS).unwrap_or(u32::MAX);
    if product.tiles()? >= blocks && product.is_aligned() {
        product.by_groups(blocks)?;
    } else {
        product.by_warps(Device::counted(out)?)?;
    }
    Ok(true)
}

/// See [`crate::kernels::symmetric_product_by_groups`].
pub(in crate::kernels) fn symmetric_product_by_groups(
    out: &Tensor,
    factors: [&Tensor; 2],
    add: &[(f64, &Tensor)],
    blocks: u32,
) -> Result<bool> {
    match prepared(out, factors, add, [1.0, 0.0])? {
        Some(product) if product.is_aligned() && multiprocessors(GROUPS).is_some() => {
            product.by_groups(blocks)?;
            Ok(true)
        }
        _ => Ok(false),
    }
}

/// A product that a kernel can compute, if it is one.
fn prepared(
    out: &Tensor,
    factors: [&Tensor; 2],
    add: &[(f64, &Tensor)],
    [factor, identity]: [f64; 2],
) -> Result<Option<Product>> {
    let kind = out.f_kind()?;
    let on_device = out.device().is_cuda() || is_emulated();
    let alike = factors.into_iter().chain(add.iter().map(|(_, addend)| *addend));
    if !on_device || !alike.into_iter().all(|x| x.f_kind().is_ok_and(|found| found == kind)) {
        return Ok(None);
    }
    let ([Some(left), Some(right)], Some(to)) = (factors.map(Matrices::of), Matrices::of(out)) else {
        return Ok(None);
    };
    let Some(addends) = add.iter().map(|(_, addend)| Matrices::of(addend)).collect::<Option<Vec<_>>>() else {
        return Ok(None);
    };
    let k = left.shape[0];
    let squares = addends.iter().chain([&to]).all(|x| x.shape == [k, k] && x.count == left.count);
    if right.shape != left.shape || right.count != left.count || !squares || addends.len() > 2 {
        return Err(Error::Internal(format!(
            "a symmetric product {:?} of {:?}",
            out.size(),
            factors[0].size()
        )));
    }
    if !has_symmetric_product(kind, to_i64(k)?) || left.count == 0 {
        return Ok(None);
    }
    let mut terms = Terms {
        addend: [MatrixBatch::default(); 2],
        alpha: by_value(factor),
        beta: [Factor::default(); 2],
        gamma: by_value(identity),
    };
    for (i, (found, (weight, _))) in addends.iter().zip(add).enumerate() {
        (terms.addend[i], terms.beta[i]) = (found.batch()?, by_value(factor * weight));
    }
    Ok(Some(Product {
        matrices: [left, right, to],
        terms,
        float16: kind == Kind::Half,
        adds: !add.is_empty(),
    }))
}

/// Arguments with which either kernel is launched.
struct Product {
    /// The left ones, the right ones, the results.
    matrices: [Matrices; 3],
    terms: Terms,
    float16: bool,
    adds: bool,
}

impl Product {
    fn is_aligned(&self) -> bool {
        self.matrices.iter().all(Matrices::is_aligned)
    }

    /// Tests whether half of the operations take less time here than all of them by the library, where rows start where
    /// vectors do: as measured, else likely with tiles for three quarters of the multiprocessors, and without matrix units
    /// that only the library uses.
    fn is_worth_it(&self) -> bool {
        let Matrices { count, shape: [rows, depth], .. } = self.matrices[0];
        let class = ProductClass::number(rows, depth, count, self.adds);
        if let Some(wins) = ordinal().and_then(|device| measured(device, class)) {
            return wins && self.is_aligned();
        }
        let Some((multiprocessors, capability)) = size() else { return false };
        let blocks = self.tiles().map(|tiles| u64::from(tiles) * self.parts() as u64);
        let fills = blocks.is_ok_and(|blocks| 4 * blocks >= 3 * u64::from(multiprocessors));
        fills && self.is_aligned() && capability.is_none_or(|(major, _)| major != OWN_UNITS)
    }

    /// Tiles below each other in a matrix.
    fn down(&self) -> usize {
        self.matrices[0].shape[0].div_ceil(TILE)
    }

    /// Tiles of a matrix's triangle.
    fn tiles_of_one(&self) -> usize {
        let down = self.down();
        down * (down + 1) / 2
    }

    /// Pairs of these that blocks of a cluster take: neighbours in a row, and of every other row the last one with that
    /// of another.
    fn pairs_of_one(&self) -> usize {
        let down = self.down();
        down * down / 4 + down.div_ceil(4)
    }

    /// Tiles of all matrices.
    fn tiles(&self) -> Result<u32> {
        to_u32(self.matrices[0].count * self.tiles_of_one())
    }

    /// Parts of the depth, a block each, so that long products of few tiles have a block for every multiprocessor. One where
    /// tiles are a block for half of them. The 21 tiles of 768 x 3072 then occupy 126 of 132 multiprocessors
    /// instead of 21. A part takes 64 KiB of scratch, 8.3 MB for these.
    fn parts(&self) -> usize {
        let Matrices { count, shape: [rows, depth], .. } = self.matrices[0];
        let multiprocessors = size().map_or(0, |(multiprocessors, _)| multiprocessors as usize);
        let tiles = count * self.tiles_of_one();
        if depth < DEEP * rows || 2 * tiles > multiprocessors {
            return 1;
        }
        (multiprocessors / tiles).min(depth / PART).max(1)
    }

    fn name(&self, kernel: &str) -> String {
        format!("{kernel}_{}", if self.float16 { "float16" } else { "bfloat16" })
    }

    fn by_groups(&self, blocks: u32) -> Result<()> {
        let [left, right, out] = [0, 1, 2].map(|i| self.matrices[i].map(MOVED[i], self.float16));
        let Matrices { count, shape: [size, depth], .. } = self.matrices[0];
        let product = SymmetricTensorProduct {
            maps: [left?, right?, out?],
            each: [0; 3],
            terms: self.terms,
            size: to_i32(size)?,
            depth: to_i32(depth)?,
            pairs: to_i32(self.pairs_of_one())?,
            batch: to_i32(count)?,
        };
        let clusters = to_u32(count * self.pairs_of_one())?.min(blocks / CLUSTER).max(1);
        let grid = Grid { blocks: CLUSTER * clusters, threads: GROUP_THREADS, shared: GROUP_SHARED };
        // SAFETY: the layout is asserted above; the tensors are memory of the device, and torch's allocator gives it to
        // others only after what is on the stream.
        unsafe { launch(&self.name("symmetric_wgmma"), grid, &product) }
    }

    fn by_warps(&self, place: Device) -> Result<()> {
        let Matrices { shape: [size, depth], .. } = self.matrices[0];
        let [left, right, out] = self.matrices.map(|x| x.batch());
        let parts = self.parts();
        let tiles = self.matrices[0].count * self.tiles_of_one();
        let room = (parts > 1).then(|| scratch(tiles * parts * SUMS, DType::F32, place)).transpose()?;
        let partial = room.as_ref().map_or(Ok(0), |(_, sums)| sums.device_address())?;
        let product = SymmetricProduct {
            left: left?,
            right: right?,
            out: out?,
            terms: self.terms,
            size: to_i32(size)?,
            depth: to_i32(depth)?,
            tiles: to_i32(self.tiles_of_one())?,
            parts: to_i32(parts)?,
            partial,
        };
        let grid = Grid { blocks: self.tiles()?, threads: THREADS, shared: SHARED };
        // SAFETY: the layout is asserted above; the tensors, the sums of parts among them, are memory of the device, and
        // torch's allocator gives it to others only after what is on the stream.
        unsafe {
            if parts == 1 {
                return launch(&self.name("symmetric_mma"), grid, &product);
            }
            let grid_of_parts = Grid { blocks: grid.blocks * to_u32(parts)?, ..grid };
            launch(&self.name("symmetric_mma_part"), grid_of_parts, &product)?;
            launch(&self.name("symmetric_mma_total"), grid, &product)
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a factor is a float32 number there")]
fn by_value(factor: f64) -> Factor {
    Factor { live: 0, value: factor as f32 }
}

fn to_u32(tiles: usize) -> Result<u32> {
    u32::try_from(tiles).map_err(|_| Error::Internal(format!("{tiles} tiles at once")))
}
