//! The leading eigenvectors of `M = A Aᵀ` from a sketch, by the Nyström method (Tropp, Yurtsever, Udell, Cevher,
//! "Fixed-rank approximation of a positive-semidefinite matrix from streaming data", 2017).
//!
//! A = matrix `[d, e]`, Ω = sparse sign matrix `[d, s]`, r = rank.

use tch::{Device, Kind, Tensor};

use super::decompose::{Vectors, symmetric};
use super::random::Key;
use super::sums::{Sums, in_float64};
use super::symmetric::accumulate;
use super::views;
use crate::error::Result;
use crate::kernels::{Signs, on_device, sign_matrix, stream};
use crate::tensor::FlatViewMut;

/// Columns that a sketch has beyond the rank.
const OVERSAMPLING: usize = 16;

/// Bytes of what is converted at a time: a product of few columns reads it twice.
const PART_BYTES: i64 = 3 << 20;

/// The columns of a sketch for `rank` of `d` directions, or none where `A Aᵀ` itself is hardly more work.
#[must_use]
pub fn sketch_columns(rank: usize, d: usize) -> Option<usize> {
    let cols = rank + OVERSAMPLING;
    (2 * cols < d).then_some(cols)
}

/// Ω `[d, s]`: a function of all that is in here.
#[derive(Clone, Copy, Debug)]
pub struct Omega {
    /// Key of the numbers.
    pub key: Key,
    /// Tag that separates uses of the key.
    pub tag: u32,
    /// Step that separates times.
    pub step: u64,
    /// Index among the matrices of the key.
    pub index: usize,
    /// d and s.
    pub shape: [usize; 2],
}

impl Omega {
    fn stream(&self) -> [u32; 4] {
        stream([self.key.seed, self.key.stream, self.step], self.tag)
    }

    /// Position of the first row in the stream.
    fn first(&self) -> u64 {
        (self.index * self.shape[0]) as u64
    }

    /// Ω as a whole in float64, on device `at`.
    ///
    /// # Errors
    /// Whatever libtorch or a kernel says.
    pub fn dense(&self, device: Device, at: crate::tensor::Device) -> Result<Tensor> {
        let size = self.shape.map(|n| i64::try_from(n).unwrap_or(i64::MAX));
        let mut omega_ds = Tensor::f_zeros(size, (Kind::Double, device))?;
        self.write(&mut views::write(&mut omega_ds)?.on(at))?;
        Ok(omega_ds)
    }

    /// Writes Ω to memory of float64 zeros.
    ///
    /// # Errors
    /// Whatever a kernel says.
    pub fn write(&self, out: &mut FlatViewMut<'_>) -> Result<()> {
        sign_matrix(out, self.shape, self.stream(), self.first())
    }

    /// `A (Aᵀ Ω)` in float64 for a matrix on device `at`.
    ///
    /// # Errors
    /// As `dense`.
    pub fn sketch(&self, a_de: &Tensor, at: crate::tensor::Device) -> Result<Tensor> {
        let (d, _) = a_de.size2()?;
        let options = (Kind::Double, a_de.device());
        let s = i64::try_from(self.shape[1]).unwrap_or(i64::MAX);
        if on_device() {
            let (a_de, omega_ds) = (a_de.f_to_kind(Kind::Double)?, self.dense(a_de.device(), at)?);
            return Ok(a_de.f_mm(&a_de.f_tr()?.f_mm(&omega_ds)?)?);
        }
        let signs = Signs::new(self.shape, self.stream(), self.first());
        let mut out_ds = Tensor::f_zeros([d, s], options)?;
        let mut room = Tensor::f_empty([0], options)?;
        let mut tiles = Sums::in_float64(a_de.device())?;
        in_float64(a_de, PART_BYTES, |part_dw, turned| {
            let w = part_dw.size()[1];
            if room.size()[0] < s * w {
                room = Tensor::f_empty([s * w], options)?;
            }
            let mut product_sw = room.f_narrow(0, 0, s * w)?.f_view([s, w])?;
            let memory = if turned { part_dw.f_tr()? } else { part_dw.shallow_clone() };
            signs.product(views::write(&mut product_sw)?, &views::read(&memory)?, turned);
            if let Some(sums) = &mut tiles {
                return sums.product(&mut out_ds, part_dw, &product_sw, 1.0);
            }
            accumulate(&mut out_ds, part_dw, &product_sw.f_tr()?)
        })?;
        Ok(out_ds)
    }
}

/// Returns the `rank` largest eigenvalues of M, as estimated from its sketch `Y = M Ω`, and their eigenvectors `[d, rank]`:
/// those of `Y (Ωᵀ Y)⁻¹ Yᵀ`. Returns `None` where that does not decompose; on a device the vectors are NaN then.
///
/// With a shift ν, `M + ν` stands for M: `Ωᵀ Y = L Lᵀ`, `F = Y L⁻ᵀ`, `Fᵀ F = V Λ Vᵀ`; eigenvalues Λ - ν, vectors
/// `F V Λ^(-1/2)`.
pub(super) fn nystrom(y_ds: &Tensor, omega_ds: &Tensor, rank: usize) -> Result<Option<Vectors>> {
    let (d, _) = y_ds.size2()?;
    // Above what rounding makes of `Ωᵀ Y`, and above zero.
    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let roundoffs = d as f64 * f64::EPSILON;
    let shift =
        y_ds.f_abs()?.f_amax([0, 1].as_slice(), false)?.f_mul_scalar(roundoffs)?.f_clamp_min(1e-290)?;
    let y_ds = y_ds.f_add(&omega_ds.f_mul(&shift)?)?;
    let square_ss = omega_ds.f_tr()?.f_mm(&y_ds)?;
    let square_ss = square_ss.f_add(&square_ss.f_tr()?)?.f_mul_scalar(0.5)?;
    let (lower_ss, info) = square_ss.f_linalg_cholesky_ex(false, false)?;
    let has_failed = info.f_ne(0)?;
    if !on_device() && bool::try_from(&has_failed)? {
        return Ok(None);
    }
    let factor_ds = lower_ss.f_tr()?.f_linalg_solve_triangular(&y_ds, true, false, false)?;
    let Some((values_s, all_ss)) = symmetric(&factor_ds.f_tr()?.f_mm(&factor_ds)?)? else {
        return Ok(None);
    };
    let kept = i64::try_from(rank).unwrap_or(i64::MAX).min(values_s.size()[0]);
    let (values_r, first_sr) = (values_s.f_narrow(0, 0, kept)?, all_ss.f_narrow(1, 0, kept)?);
    let lengths_r = values_r.f_masked_fill(&values_r.f_le(f64::MIN_POSITIVE)?, 1.0)?.f_sqrt()?;
    let vectors_dr = factor_ds.f_mm(&first_sr)?.f_div(&lengths_r)?;
    let vectors_dr = vectors_dr.f_masked_fill(&has_failed, f64::NAN)?;
    // And what rounding leaves of the shift alone: the values of zero are zero.
    let taken = shift.f_mul_scalar(1.0 + 1e-9)?;
    Ok(Some((values_r.f_sub(&taken)?.f_clamp_min(0.0)?, vectors_dr)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
#[path = "sketch_tests.rs"]
mod tests;
