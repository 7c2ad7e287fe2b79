//! Symmetric products, computed on and below the diagonal by strips of rows and mirrored.
//!
//! k = rows of the products, n = inner dimension, g = matrices of a batch. Matrices are `[k, k]`, or `[g, k, k]`
//! for a batch, which is never split into strips.

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::kernels::{on_device, symmetric_product};

/// Rows from which a product is split into strips.
const STRIPS_FROM: i64 = 512;
/// Rows of a strip for every thread of libtorch; fewer make the products inefficient.
const STRIP_ROWS: i64 = 128;
/// Most strips of a product, which then costs (1 + 1/8) / 2 of the full one.
pub(super) const STRIPS: i64 = 8;

/// Products of one size.
pub(super) struct Symmetric {
    pub(super) strips: i64,
    pub(super) size: i64,
}

impl Symmetric {
    /// Products of `g` matrices of `k` rows that are multiplied together.
    pub(super) fn new(g: i64, k: i64) -> Self {
        let threads = i64::from(tch::get_num_threads().max(1));
        let strips = if g == 1 && k >= STRIPS_FROM && !on_device() {
            (k / (STRIP_ROWS * threads)).clamp(1, STRIPS)
        } else {
            1
        };
        Self { strips, size: k }
    }

    /// First and past-the-end row of every strip.
    fn bounds(&self) -> impl Iterator<Item = (i64, i64)> {
        let (strips, size) = (self.strips, self.size);
        (0..strips).map(move |i| (i * size / strips, (i + 1) * size / strips))
    }

    /// `out <- W Wᵀ`, exactly symmetric when there are strips. `free` is overwritten.
    pub(super) fn gram(&self, out: &mut Tensor, w: &Tensor, free: &Tensor) -> Result<()> {
        if symmetric_product(out, [w, w], &[], [1.0, 0.0])? {
            return Ok(());
        }
        if self.strips == 1 {
            return product(out, w, &w.f_transpose(-2, -1)?);
        }
        for (low, high) in self.bounds() {
            let mut strip = block(out, low, high, 0, high)?;
            product(
                &mut strip,
                &w.f_narrow(0, low, high - low)?,
                &w.f_narrow(0, 0, high)?.f_transpose(0, 1)?,
            )?;
            reflect(out, low, high, free)?;
        }
        Ok(())
    }

    /// `out <- out + A B` for symmetric `out`, `A` and `B` that commute. `free` is overwritten.
    pub(super) fn accumulate(&self, out: &mut Tensor, a: &Tensor, b: &Tensor, free: &Tensor) -> Result<()> {
        if self.strips == 1 {
            return accumulate(out, a, b);
        }
        for (low, high) in self.bounds() {
            let mut strip = block(out, low, high, 0, high)?;
            accumulate(&mut strip, &a.f_narrow(0, low, high - low)?, &b.f_narrow(1, 0, high)?)?;
            reflect(out, low, high, free)?;
        }
        Ok(())
    }
}

/// `out <- a b` for matrices or batches.
pub(super) fn product(out: &mut Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    if is_slow(out)? {
        out.f_copy_(&a.f_to_kind(Kind::Float)?.f_matmul(&b.f_to_kind(Kind::Float)?)?)?;
        return Ok(());
    }
    let _ = if out.dim() == 2 { a.f_mm_out(out, b)? } else { a.f_bmm_out(out, b)? };
    Ok(())
}

/// Tests whether libtorch would multiply matrices of this type here by single numbers: float16 on CPUs. As float32 they are
/// multiplied a hundred times as fast, with the same rounding.
fn is_slow(x: &Tensor) -> Result<bool> {
    Ok(x.device() == Device::Cpu && x.f_kind()? == Kind::Half)
}

/// `out <- out + a b` for matrices or batches.
pub(super) fn accumulate(out: &mut Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    if is_slow(out)? {
        let mut wide = out.f_to_kind(Kind::Float)?;
        accumulate(&mut wide, &a.f_to_kind(Kind::Float)?, &b.f_to_kind(Kind::Float)?)?;
        out.f_copy_(&wide)?;
        return Ok(());
    }
    let _ = if out.dim() == 2 { out.f_addmm_(a, b)? } else { out.f_baddbmm_(a, b)? };
    Ok(())
}

/// A number that multiplies a tensor of any float dtype without changing its dtype.
pub(super) fn number(x: f64) -> Result<Tensor> {
    Ok(Tensor::f_scalar_tensor(x, (Kind::Double, Device::Cpu))?)
}

/// Rows `[top, bottom)` and columns `[left, right)` of a matrix, as a view.
fn block(matrix: &Tensor, top: i64, bottom: i64, left: i64, right: i64) -> Result<Tensor> {
    Ok(matrix.f_narrow(0, top, bottom - top)?.f_narrow(1, left, right - left)?)
}

/// Copies the elements below the diagonal in rows `[low, high)` to their mirror image. `free` is overwritten.
fn reflect(matrix: &Tensor, low: i64, high: i64, free: &Tensor) -> Result<()> {
    if low > 0 {
        block(matrix, 0, low, low, high)?.f_copy_(&block(matrix, low, high, 0, low)?.f_transpose(0, 1)?)?;
    }
    let size = high - low;
    let mut corner = block(matrix, low, high, low, high)?;
    let mut image = free.f_view(-1)?.f_narrow(0, 0, size * size)?.f_view([size, size])?;
    image.f_copy_(&corner.f_transpose(0, 1)?)?;
    let _ = image.f_triu_(1)?;
    let _ = corner.f_tril_(0)?.f_add_(&image)?;
    Ok(())
}
