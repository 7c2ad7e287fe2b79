//! Products of matrices: operands in panels, tiles of sums in registers, one pass over the result.
//!
//! Of a symmetric product one triangle is computed and mirrored. Every element is summed in the same order whatever the
//! number of threads. What a machine has no kernel for is left to libtorch: [`Kernel::of`] says so.

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod amx;
#[cfg(all(test, target_arch = "x86_64", target_os = "linux", not(miri)))]
mod amx_emulated;
mod combine;
mod dense;
mod diagonal;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod pack;
mod thin;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod tiled;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod tiles;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod transpose;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod types;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod widened;
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
#[path = "absent.rs"]
mod x86;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86;

pub use combine::{Combine, Scale, WideSquares, divide_rows};
pub use dense::{Depends, Inverse, cholesky_qr, multiply};
pub use diagonal::trace;
pub use thin::ThinProduct;

#[cfg(all(target_arch = "x86_64", not(miri)))]
use super::isa::{self, Isa};
use crate::error::{Error, Result};
use crate::tensor::{DType, FlatView, FlatViewMut, Strided, StridedMut};
use crate::threads;

/// Kernel with which the products of an element type are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// float32 with AVX-512.
    F32Avx512,
    /// float64 with AVX-512.
    F64Avx512,
    /// bfloat16 with AVX512-BF16, summed in float32.
    Bf16Avx512,
    /// bfloat16 with AMX, summed in float32.
    Bf16Amx,
    /// float32 with AVX2 and FMA.
    F32Avx2,
    /// float64 with AVX2 and FMA.
    F64Avx2,
    /// bfloat16 with AVX2 and FMA, multiplied and summed in float32.
    Bf16Avx2,
}

/// Features of a machine, as far as the choice of a kernel asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // features are
pub struct Features {
    /// AVX2 and FMA.
    pub avx2: bool,
    /// AVX-512 F, VL, BW and DQ.
    pub avx512: bool,
    /// AVX512-BF16.
    pub avx512_bf16: bool,
    /// AMX with bfloat16, which the system lets this process use.
    pub amx_bf16: bool,
}

impl Features {
    /// Features of this machine that may be used for products of a type. The system is asked for AMX only where the
    /// type is bfloat16: it is for the whole process, and signal stacks have to be larger from then on.
    #[must_use]
    pub fn detect(dtype: DType) -> Self {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            let best = isa::best();
            Self {
                avx2: best >= Isa::Avx2 && std::arch::is_x86_feature_detected!("fma"),
                avx512: best >= Isa::Avx512,
                avx512_bf16: best >= Isa::Avx512Bf16,
                amx_bf16: dtype == DType::BF16 && Isa::Amx.is_allowed() && amx::is_usable(),
            }
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        {
            let _ = dtype;
            Self::default()
        }
    }

    /// The kernel for products of this type, `None` where libtorch's are to be used: in float16, and all on other
    /// processors than x86-64 with AVX2.
    #[must_use]
    pub fn kernel(self, dtype: DType) -> Option<Kernel> {
        match dtype {
            DType::F32 if self.avx512 => Some(Kernel::F32Avx512),
            DType::F64 if self.avx512 => Some(Kernel::F64Avx512),
            DType::F32 if self.avx2 => Some(Kernel::F32Avx2),
            DType::F64 if self.avx2 => Some(Kernel::F64Avx2),
            DType::BF16 if self.avx512_bf16 && self.amx_bf16 => Some(Kernel::Bf16Amx),
            DType::BF16 if self.avx512_bf16 => Some(Kernel::Bf16Avx512),
            DType::BF16 if self.avx2 => Some(Kernel::Bf16Avx2),
            _ => None,
        }
    }
}

/// The rows of an operand: element `p` of row `i` is element `i * steps[0] + p * steps[1]` of `x`. Products are sums
/// over `p`.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// Elements of the rows.
    pub x: Strided<'a>,
    /// Number of rows.
    pub count: usize,
    /// Elements of a row.
    pub inner: usize,
    /// Distances of rows and of the elements of a row; one of them is 1.
    pub steps: [usize; 2],
}

/// Multiplications from which on another thread is woken for a product: 10 µs of work.
pub(super) const TOGETHER: usize = 1 << 20;

/// `out <- factor A B + keep out + Σ weight addend + diagonal I`.
#[derive(Debug)]
pub struct Product<'a> {
    /// A row-major matrix, or a part of one.
    pub out: StridedMut<'a>,
    /// Its rows and columns, and the elements that are summed.
    pub size: [usize; 3],
    /// Distance of the rows of `out` and of what is added.
    pub stride: usize,
    /// Factor of the product.
    pub factor: f64,
    /// Factor of what is in `out`, which is not read where this is zero.
    pub keep: f64,
    /// Matrices of the size of `out`, other than it, with their factors.
    pub add: &'a [(f64, Strided<'a>)],
    /// Number that is added to every element of the diagonal, where the product is symmetric.
    pub diagonal: f64,
    /// Outcome of the product, symmetric or transposed.
    pub outcome: Outcome,
}

/// Property of a product that is known, or operation on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing.
    General,
    /// It is symmetric: its lower triangle is computed.
    Symmetric,
    /// `out` is its transpose, with the product's rows as columns; nothing is added or multiplied.
    Transposed,
}

impl<'a> Product<'a> {
    /// `out <- A B`; what else is to be done with it is for the caller to set.
    #[must_use]
    pub fn plain(out: impl Into<StridedMut<'a>>, size: [usize; 3], stride: usize, outcome: Outcome) -> Self {
        let out = out.into();
        Self { out, size, stride, factor: 1.0, keep: 0.0, add: &[], diagonal: 0.0, outcome }
    }

    #[allow(clippy::float_cmp)] // a factor is exactly 1 or it is applied
    fn is_combined(&self) -> bool {
        self.factor != 1.0 || self.keep != 0.0 || !self.add.is_empty()
    }
}

/// Which operand of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// A.
    Left,
    /// B, by its columns.
    Right,
}

impl Kernel {
    /// The kernel for products of this type on this machine, `None` where libtorch's are to be used.
    #[must_use]
    pub fn of(dtype: DType) -> Option<Self> {
        Features::detect(dtype).kernel(dtype)
    }

    /// Columns of a panel of the right operand.
    fn tile_cols(self) -> usize {
        x86::tile_cols(self)
    }

    /// Rows of a panel of the left operand.
    fn tile_rows(self) -> usize {
        x86::tile_rows(self)
    }

    /// Elements that an operand of `count` rows of `inner` elements takes in panels.
    #[must_use]
    pub fn elements(self, side: Side, count: usize, inner: usize) -> usize {
        x86::elements(self, side, count, inner)
    }

    /// Brings an operand into panels. `spread` over the threads of the pool that this runs in.
    ///
    /// # Errors
    /// [`Error::Internal`] for memory that is too short or of another type.
    pub fn pack(self, side: Side, from: &Operand<'_>, to: &mut FlatViewMut<'_>, spread: bool) -> Result<()> {
        let Operand { x, count, inner, steps } = *from;
        let end = if count * inner == 0 { 0 } else { (count - 1) * steps[0] + (inner - 1) * steps[1] + 1 };
        if x.dtype() != self.dtype()
            || to.dtype() != self.dtype()
            || end > x.len()
            || self.elements(side, count, inner) > to.len()
        {
            return Err(Error::Internal(format!("{from:?} does not fit into panels {to:?}")));
        }
        x86::pack(self, side, from, to, spread);
        Ok(())
    }

    /// Multiplies operands that were brought into panels.
    ///
    /// # Errors
    /// As [`pack`](Self::pack).
    pub fn multiply(
        self,
        left: &FlatView<'_>,
        right: &FlatView<'_>,
        product: &mut Product<'_>,
        spread: bool,
    ) -> Result<()> {
        let [m, n, k] = product.size;
        let [rows, cols] = if product.outcome == Outcome::Transposed { [n, m] } else { [m, n] };
        let end = if m * n == 0 { 0 } else { (rows - 1) * product.stride + cols };
        let whole = |dtype: DType, len: usize| dtype == self.dtype() && len >= end;
        if [left, right].iter().any(|x| x.dtype() != self.dtype())
            || self.elements(Side::Left, m, k) > left.len()
            || self.elements(Side::Right, n, k) > right.len()
            || !whole(product.out.dtype(), product.out.len())
            || !product.add.iter().all(|(_, x)| whole(x.dtype(), x.len()))
            || product.add.len() > x86::ADDENDS
            || product.stride < cols
            || (product.outcome == Outcome::Symmetric && m != n)
            || (product.outcome != Outcome::Symmetric && product.diagonal != 0.0)
            || (product.outcome == Outcome::Transposed && product.is_combined())
        {
            return Err(Error::Internal(format!("{product:?} does not fit its operands")));
        }
        x86::multiply(self, left, right, product, spread);
        Ok(())
    }

    /// Brings a left and a right operand into panels and multiplies them, all in one parallel region.
    ///
    /// # Errors
    /// As [`pack`](Self::pack).
    pub fn pack_and_multiply(
        self,
        [left, right]: [&Operand<'_>; 2],
        [left_panels, right_panels]: [&mut FlatViewMut<'_>; 2],
        product: &mut Product<'_>,
    ) -> Result<()> {
        let work = left.count * left.inner * right.count;
        let spread = threads::get() > 1 && work >= TOGETHER;
        let mut all = || {
            self.pack(Side::Left, left, left_panels, spread)?;
            self.pack(Side::Right, right, right_panels, spread)?;
            self.multiply(&left_panels.view(), &right_panels.view(), product, spread)
        };
        if spread { threads::run(all) } else { all() }
    }

    /// Tests whether operands are packed faster from rows than from columns: 16 MiB in 2 ms and 4 to 6 ms with AVX-512.
    #[must_use]
    pub fn prefers_rows(self) -> bool {
        matches!(self, Self::F32Avx512 | Self::Bf16Avx512 | Self::Bf16Amx)
    }

    /// Tests whether libtorch is left no product of this type: it may have to do without AMX, and on a processor that
    /// has no instructions for bfloat16 it does 0.3 to 3 GFLOP/s.
    #[must_use]
    pub fn is_alone(self) -> bool {
        matches!(self, Self::Bf16Amx | Self::Bf16Avx2)
    }

    /// Tests whether the tiles multiply faster than libtorch's products of this type: MKL uses AVX-512 on Intel's
    /// processors only, and on a Zen 5 does 110 GFLOP/s a core in float32 where the tiles do 220.
    #[must_use]
    pub fn outruns_library(self) -> bool {
        matches!(self, Self::F32Avx512 | Self::F64Avx512) && crate::tensor::cpu_is_of_amd()
    }

    /// The element type.
    #[must_use]
    pub fn dtype(self) -> DType {
        match self {
            Self::F32Avx512 | Self::F32Avx2 => DType::F32,
            Self::F64Avx512 | Self::F64Avx2 => DType::F64,
            Self::Bf16Avx512 | Self::Bf16Amx | Self::Bf16Avx2 => DType::BF16,
        }
    }
}

/// Tests whether this machine multiplies bfloat16 matrices faster than float32 ones: with AMX, or with AVX512-BF16 at
/// full rate as AMD builds it. On Intel's AVX512-BF16 bfloat16 products take 1.7 to 1.9 times as long.
#[must_use]
pub fn multiplies_bf16() -> bool {
    match Kernel::of(DType::BF16) {
        Some(Kernel::Bf16Amx) => true,
        Some(Kernel::Bf16Avx512) => crate::tensor::cpu_is_of_amd(),
        _ => false,
    }
}

/// Runs tasks, over all threads where `spread`.
#[allow(dead_code, reason = "no kernel uses it on other processors than x86-64")]
fn each(count: usize, spread: bool, task: impl Fn(usize) + Sync + Send) {
    if spread {
        threads::each(count, task);
    } else {
        (0..count).for_each(task);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
mod tests;
