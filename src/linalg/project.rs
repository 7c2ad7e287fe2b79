//! Bases that low-rank projections of a gradient use: its first left singular vectors.
//!
//! A = matrix `[d, e]` whose columns are projected, r = rank, s = columns of a sketch. All arithmetic is float64, so that
//! a basis does not depend on the order in which parts of a sum came together.

use tch::{Kind, Tensor};

use super::decompose::{singular, symmetric};
use super::sketch::nystrom;
use super::sums::{Sums, in_float64};
use super::symmetric::Symmetric;
use crate::error::{Error, Result};
use crate::kernels::on_device;

/// Bytes of what is converted at a time for a Gram matrix, which is read and written with every part.
const GRAM_BYTES: i64 = 16 << 20;

/// `A Aᵀ` in float64.
///
/// # Errors
/// Whatever libtorch says.
pub fn gram(a_de: &Tensor) -> Result<Tensor> {
    let d = a_de.size()[0];
    let options = (Kind::Double, a_de.device());
    let (mut out_dd, free) = (Tensor::f_empty([d, d], options)?, Tensor::f_empty([d * d], options)?);
    let symmetric = Symmetric::new(1, d);
    let mut tiles = Sums::in_float64(a_de.device())?;
    let mut is_first = true;
    in_float64(a_de, GRAM_BYTES, |part_dw, _| {
        let begins = std::mem::take(&mut is_first);
        if let Some(sums) = &mut tiles {
            return sums.square(&mut out_dd, part_dw, if begins { 0.0 } else { 1.0 });
        }
        if begins {
            return symmetric.gram(&mut out_dd, part_dw, &free);
        }
        symmetric.accumulate(&mut out_dd, part_dw, &part_dw.f_tr()?, &free)
    })?;
    Ok(if is_first { out_dd.f_zero_()? } else { out_dd })
}

/// Source of a basis.
#[derive(Debug)]
pub enum Source<'a> {
    /// `A Aᵀ`.
    Gram(&'a Tensor),
    /// `A Aᵀ Ω` and Ω.
    Sketch(&'a Tensor, &'a Tensor),
    /// A itself, or with `true` its transpose.
    Matrix(&'a Tensor, bool),
}

/// The first `rank` left singular vectors of A by falling singular value, `[d, rank]` in float64, or none where A is
/// not finite or does not decompose. The host waits for a device.
///
/// Of each vector the entry of largest magnitude, the first of several, is positive; those of a matrix itself have the
/// signs that LAPACK gives them, as in `torch.linalg.svd`, on devices those of the others. Vectors of singular values at
/// rounding level are zero: at most `longest` units of roundoff (of float32, unless A is `double`) of the largest one,
/// or what the squares in a Gram matrix resolve.
///
/// # Errors
/// Whatever libtorch says, except of the decomposition.
pub fn basis(source: &Source<'_>, rank: usize, longest: usize, double: bool) -> Result<Option<Tensor>> {
    let (Source::Gram(x) | Source::Sketch(x, _) | Source::Matrix(x, _)) = source;
    let wide = x.f_to_kind(Kind::Double)?;
    // A sum is finite where all is and far below the largest number; it takes a fifth of the time of asking each element.
    let is_finite = |x: &Tensor| Ok::<_, Error>(f64::try_from(x.f_sum(Kind::Double)?)?.is_finite());
    if !is_finite(&wide)? {
        return Ok(None);
    }
    let found = match source {
        Source::Gram(_) => symmetric(&wide)?,
        Source::Sketch(_, omega_ds) => nystrom(&wide, omega_ds, rank)?,
        Source::Matrix(_, transposed) => singular(&wide, *transposed),
    };
    let Some((values, vectors)) = found else { return Ok(None) };
    let kept = i64::try_from(rank).unwrap_or(i64::MAX).min(values.size()[0]);
    let (values_r, mut vectors_dr) = (values.f_narrow(0, 0, kept)?, vectors.f_narrow(1, 0, kept)?);
    if !is_finite(&vectors_dr)? {
        return Ok(None);
    }
    if double && matches!(source, Source::Sketch(..)) {
        // The vectors are orthogonal to λ₁/λ roundoffs only, an error that float32 does not resolve.
        vectors_dr = Tensor::f_linalg_qr(&vectors_dr, "reduced")?.0;
    }
    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let roundoffs = |unit: f64| longest as f64 * unit;
    let floor = roundoffs(if double { f64::EPSILON } else { f64::from(f32::EPSILON) });
    let share = match source {
        Source::Matrix(..) => floor,
        _ => floor.powi(2).max(roundoffs(f64::EPSILON)),
    };
    // The values fall: the first is the largest.
    let bound_1 = values_r.f_narrow(0, 0, kept.min(1))?.f_mul_scalar(share)?;
    let alive_r = values_r.f_gt_tensor(&bound_1)?;
    let is_lapacks = matches!(source, Source::Matrix(..)) && !on_device();
    let signed_dr = if is_lapacks { vectors_dr } else { signed(&vectors_dr)? };
    Ok(Some(signed_dr.f_mul(&alive_r)?))
}

/// Columns with signs by which their entry of largest magnitude is positive.
fn signed(vectors_dr: &Tensor) -> Result<Tensor> {
    let first_r = vectors_dr.f_abs()?.f_argmax(0, true)?;
    let signs_1r = vectors_dr.f_gather(0, &first_r, false)?.f_sign()?;
    Ok(vectors_dr.f_mul(&signs_1r)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
mod tests {
    use tch::Device;

    use super::*;

    /// `[d, e]` with singular values `values` and known vectors.
    #[allow(clippy::many_single_char_names)] // as the equation has them
    fn matrix(d: i64, e: i64, values: &[f64]) -> (Tensor, Tensor) {
        let options = (Kind::Double, Device::Cpu);
        let k = i64::try_from(values.len()).unwrap();
        let wave = |rows: i64, step: f64| {
            let grid = Tensor::arange(rows * k, options).view([rows, k]);
            Tensor::linalg_qr(&(grid * step).sin(), "reduced").0
        };
        let (u, v) = (wave(d, 0.7), wave(e, 1.3));
        ((&u * Tensor::from_slice(values)).mm(&v.tr()), u)
    }

    fn projector(basis: &Tensor) -> Tensor {
        basis.mm(&basis.tr())
    }

    #[test]
    fn every_source_gives_the_leading_left_singular_vectors() {
        let (a, u) = matrix(7, 11, &[5.0, 3.0, 2.0, 1.0, 0.5]);
        let wanted = projector(&u.narrow(1, 0, 3));
        let (omega, sum) = (Tensor::eye(7, (Kind::Double, Device::Cpu)), gram(&a).unwrap());
        let sources = [
            Source::Gram(&sum),
            Source::Sketch(&sum, &omega),
            Source::Matrix(&a, false),
            Source::Matrix(&a.tr(), true),
        ];
        for source in sources {
            let found = basis(&source, 3, 11, true).unwrap().unwrap();
            assert_eq!(found.size(), [7, 3]);
            let error = f64::try_from((projector(&found) - &wanted).norm()).unwrap();
            assert!(error < 1e-12, "{source:?}: {error}");
        }
    }

    #[test]
    fn matrices_of_many_parts_have_the_sums_of_whole_ones() {
        tch::manual_seed(0);
        for [d, e] in [[600, 7000], [40, 9001], [3, 1]] {
            let a = Tensor::randn([d, e], (Kind::Float, Device::Cpu));
            let expected = a.to_kind(Kind::Double).mm(&a.to_kind(Kind::Double).tr());
            for a in [&a, &a.tr().contiguous().tr()] {
                let error = f64::try_from((gram(a).unwrap() - &expected).norm() / expected.norm()).unwrap();
                assert!(error < 1e-14, "{d} {e}: {error}");
            }
        }
    }

    #[test]
    fn signs_make_the_largest_entry_positive() {
        let (a, _) = matrix(6, 9, &[4.0, 2.0, 1.0]);
        let found = basis(&Source::Gram(&gram(&a).unwrap()), 3, 9, true).unwrap().unwrap();
        let flipped = basis(&Source::Gram(&gram(&-a).unwrap()), 3, 9, true).unwrap().unwrap();
        assert!(bool::try_from(found.eq_tensor(&flipped).all()).unwrap());
        let largest = found.gather(0, &found.abs().argmax(0, true), false);
        assert!(bool::try_from(largest.gt(0.0).all()).unwrap());
    }

    #[test]
    fn directions_at_rounding_level_are_zero() {
        let (a, _) = matrix(8, 10, &[2.0, 1.0]);
        let single = a.to_kind(Kind::Float);
        for (source, double) in [(&a, true), (&single, false)] {
            for svd in [Source::Gram(&gram(source).unwrap()), Source::Matrix(source, false)] {
                let found = basis(&svd, 4, 10, double).unwrap().unwrap();
                let norms = Vec::<f64>::try_from(found.norm_scalaropt_dim(2.0, [0], false)).unwrap();
                assert!(norms[..2].iter().all(|n| (n - 1.0).abs() < 1e-12), "{norms:?}");
                assert_eq!(norms[2..], [0.0, 0.0]);
            }
        }
    }

    #[test]
    fn a_matrix_that_is_not_finite_has_no_basis() {
        for bad in [f64::NAN, f64::INFINITY] {
            let a = Tensor::full([4, 5], bad, (Kind::Double, Device::Cpu));
            assert!(basis(&Source::Gram(&gram(&a).unwrap()), 2, 5, true).unwrap().is_none());
            assert!(basis(&Source::Matrix(&a, false), 2, 5, true).unwrap().is_none());
        }
        let zero = Tensor::zeros([4, 5], (Kind::Double, Device::Cpu));
        let found = basis(&Source::Gram(&gram(&zero).unwrap()), 2, 5, true).unwrap().unwrap();
        assert!(f64::try_from(found.norm()).unwrap() <= 0.0);
    }
}
