//! Bases that low-rank projections of a gradient use: its first left singular vectors.
//!
//! A = matrix `[d, e]` whose columns are projected, r = rank, s = columns of a sketch. All arithmetic is float64, so that
//! a basis does not depend on the order in which parts of a sum came together.

use tch::{Device, Kind, Tensor};

use super::symmetric::{Symmetric, accumulate};
use crate::error::Result;
use crate::kernels::on_device;

/// Columns that a sketch has beyond the rank.
const OVERSAMPLING: usize = 16;

/// Bytes of what is converted at a time, for products of few columns.
const SKETCH_BYTES: i64 = 4 << 20;
/// For a Gram matrix, which is read and written with every part, more.
const GRAM_BYTES: i64 = 16 << 20;

/// The columns of a sketch for `rank` of `d` directions.
#[must_use]
pub fn sketch_columns(rank: usize, d: usize) -> usize {
    (rank + OVERSAMPLING).min(d)
}

/// `A Aᵀ` in float64.
///
/// # Errors
/// Whatever libtorch says.
pub fn gram(a_de: &Tensor) -> Result<Tensor> {
    let d = a_de.size()[0];
    let options = (Kind::Double, a_de.device());
    let (mut out_dd, free) = (Tensor::f_empty([d, d], options)?, Tensor::f_empty([d * d], options)?);
    let symmetric = Symmetric::new(1, d);
    let mut is_first = true;
    in_float64(a_de, GRAM_BYTES, |part_dw| {
        if std::mem::take(&mut is_first) {
            return symmetric.gram(&mut out_dd, part_dw, &free);
        }
        symmetric.accumulate(&mut out_dd, part_dw, &part_dw.f_tr()?, &free)
    })?;
    Ok(if is_first { out_dd.f_zero_()? } else { out_dd })
}

/// `A (Aᵀ Ω)` in float64, for a random matrix Ω `[d, s]`.
///
/// # Errors
/// Whatever libtorch says.
pub fn sketch(a_de: &Tensor, omega_ds: &Tensor) -> Result<Tensor> {
    let omega_ds = omega_ds.f_to_kind(Kind::Double)?;
    let (d, s) = omega_ds.size2()?;
    let mut out_ds = Tensor::f_zeros([d, s], (Kind::Double, a_de.device()))?;
    in_float64(a_de, SKETCH_BYTES, |part_dw| {
        accumulate(&mut out_ds, part_dw, &part_dw.f_tr()?.f_mm(&omega_ds)?)
    })?;
    Ok(out_ds)
}

/// Hands over parts `[d, w]` of the columns of `A` in float64, one after the other, of about so many bytes: no copy of the
/// whole matrix is made. On a device there is one part.
fn in_float64(a_de: &Tensor, bytes: i64, mut work: impl FnMut(&Tensor) -> Result<()>) -> Result<()> {
    let (d, e) = a_de.size2()?;
    if on_device() || a_de.device() != Device::Cpu {
        return work(&a_de.f_to_kind(Kind::Double)?);
    }
    let width = (bytes / (8 * d.max(1))).clamp(1, e.max(1));
    // Elements lie as those of A do.
    let turned = a_de.stride()[0] == 1;
    let room = Tensor::f_empty([d * width], (Kind::Double, Device::Cpu))?;
    for first in (0..e).step_by(usize::try_from(width).unwrap_or(1)) {
        let w = width.min(e - first);
        let flat = room.f_narrow(0, 0, d * w)?;
        let mut part_dw = if turned { flat.f_view([w, d])?.f_tr()? } else { flat.f_view([d, w])? };
        part_dw.f_copy_(&a_de.f_narrow(1, first, w)?)?;
        work(&part_dw)?;
    }
    Ok(())
}

/// What a basis is made of.
#[derive(Debug)]
pub enum Source<'a> {
    /// `A Aᵀ`.
    Gram(&'a Tensor),
    /// `A Aᵀ Ω`.
    Sketch(&'a Tensor),
    /// A itself, or with `true` its transpose.
    Matrix(&'a Tensor, bool),
}

/// The first `rank` left singular vectors of A by falling singular value, `[d, rank]` in float64, or none where A is
/// not finite or does not decompose.
///
/// Of each vector the entry of largest magnitude, the first of several, is positive; those of a matrix itself have the
/// signs that LAPACK gives them, as in `torch.linalg.svd`. Vectors of singular values at
/// rounding level are zero: at most `longest` units of roundoff (of float32, unless A is `double`) of the largest one,
/// or what the squares in a Gram matrix resolve.
///
/// # Errors
/// Whatever libtorch says, except of the decomposition.
pub fn basis(source: &Source<'_>, rank: usize, longest: usize, double: bool) -> Result<Option<Tensor>> {
    let (Source::Gram(x) | Source::Sketch(x) | Source::Matrix(x, _)) = source;
    let wide = x.f_to_kind(Kind::Double)?;
    if !bool::try_from(wide.f_isfinite()?.f_all()?)? {
        return Ok(None);
    }
    let decomposed = match source {
        Source::Gram(_) => wide
            .f_linalg_eigh("L")
            .and_then(|(values, vectors)| Ok((values.f_flip([0])?.f_clamp_min(0.0)?, vectors.f_flip([1])?))),
        Source::Sketch(_) => Tensor::f_linalg_qr(&wide, "reduced")
            .and_then(|(q, r)| r.f_svd(true, true).and_then(|(u, values, _)| Ok((values, q.f_mm(&u)?)))),
        Source::Matrix(_, transposed) => {
            wide.f_svd(true, true).map(|(u, values, v)| (values, if *transposed { v } else { u }))
        }
    };
    let Ok((values, vectors)) = decomposed else { return Ok(None) };
    let kept = i64::try_from(rank).unwrap_or(i64::MAX).min(values.size()[0]);
    let (values_r, vectors_dr) = (values.f_narrow(0, 0, kept)?, vectors.f_narrow(1, 0, kept)?);
    if !bool::try_from(vectors_dr.f_isfinite()?.f_all()?)? {
        return Ok(None);
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
    let alive_r = values_r.f_gt_tensor(&bound_1)?.f_to_kind(Kind::Double)?;
    let signed_dr = if matches!(source, Source::Matrix(..)) { vectors_dr } else { signed(&vectors_dr)? };
    Ok(Some(signed_dr.f_mul(&alive_r)?))
}

/// The same columns with signs by which their entry of largest magnitude is positive.
fn signed(vectors_dr: &Tensor) -> Result<Tensor> {
    let first_r = vectors_dr.f_abs()?.f_argmax(0, true)?;
    let signs_1r = vectors_dr.f_gather(0, &first_r, false)?.f_sign()?;
    Ok(vectors_dr.f_mul(&signs_1r)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
mod tests {
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
        let omega = Tensor::eye(7, (Kind::Double, Device::Cpu));
        let sums = [gram(&a).unwrap(), sketch(&a, &omega).unwrap()];
        let sources = [
            Source::Gram(&sums[0]),
            Source::Sketch(&sums[1]),
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
            let wide = a.to_kind(Kind::Double);
            let omega = Tensor::randn([d, 2], (Kind::Double, Device::Cpu));
            let turned = a.tr().contiguous().tr();
            for a in [&a, &turned] {
                let expected = [wide.mm(&wide.tr()), wide.mm(&wide.tr().mm(&omega))];
                for (found, expected) in [gram(a).unwrap(), sketch(a, &omega).unwrap()].iter().zip(expected) {
                    let error = f64::try_from((found - &expected).norm() / expected.norm()).unwrap();
                    assert!(error < 1e-14, "{d} {e}: {error}");
                }
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
