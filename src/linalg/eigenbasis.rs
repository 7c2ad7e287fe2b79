//! Eigenbases of symmetric positive semidefinite matrices: the first one, and power iterations that follow a matrix as it
//! changes.
//!
//! A = matrix `[d, d]`, Q = its basis.

use tch::{Kind, Tensor};

use super::decompose::symmetric;
use super::random::{Key, fill_normal};
use super::symmetric::Symmetric;
use crate::error::Result;

/// Number of roundoffs of the largest eigenvalue, times the longer side of the summed matrices, below which an eigenvalue is
/// rounding. The directions of such eigenvalues are not determined.
const ROUNDOFFS: f64 = 16.0;

/// Numbers that complete a basis, the same on every layout.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// Key of the numbers.
    pub key: Key,
    /// Tag that separates uses of the key.
    pub tag: u32,
    /// Index among the matrices of the key.
    pub index: usize,
}

impl Completion {
    /// Columns of Gaussian numbers `[d, d]` from `first` on, in float64 on the device of `like`.
    fn columns(&self, d: usize, first: i64, like: &Tensor) -> Result<Tensor> {
        let mut numbers = vec![0.0_f32; d * d];
        fill_normal(&mut numbers, self.key, self.tag, 0, (self.index * d * d) as u64);
        let size = i64::try_from(d).unwrap_or(i64::MAX);
        let all_dd = Tensor::f_from_slice(&numbers)?.f_view([size, size])?;
        let some = all_dd.f_narrow(1, first, size - first)?;
        Ok(some.f_to_device(like.device())?.f_to_kind(Kind::Double)?)
    }
}

/// Eigenvectors of A by falling eigenvalue, `[d, d]` in float64, or none where A does not decompose. Directions that
/// rounding decides are drawn at random and made orthonormal to the others: `longest` is the longer side of the matrices
/// whose squares A is made of, with roundoffs of float32 or, `double`, float64. The host waits for a device.
///
/// # Errors
/// Whatever libtorch says, except of the decomposition.
pub fn eigenbasis(
    a_dd: &Tensor,
    longest: usize,
    double: bool,
    completion: &Completion,
) -> Result<Option<Tensor>> {
    let wide = a_dd.f_to_kind(Kind::Double)?;
    if !bool::try_from(wide.f_isfinite()?.f_all()?)? {
        return Ok(None);
    }
    let Some((values_d, vectors_dd)) = symmetric(&wide)? else { return Ok(None) };
    let unit = if double { f64::EPSILON } else { f64::from(f32::EPSILON) } / 2.0;
    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let share = ROUNDOFFS * longest as f64 * unit;
    let bound_1 = values_d.f_narrow(0, 0, 1)?.f_mul_scalar(share)?;
    let found = i64::try_from(values_d.f_gt_tensor(&bound_1)?.f_sum(Kind::Int64)?)?;
    let d = values_d.size()[0];
    let mut basis_dd = vectors_dd;
    if found < d {
        let kept = basis_dd.f_narrow(1, 0, found)?;
        let mut drawn = completion.columns(usize::try_from(d).unwrap_or(0), found, &wide)?;
        // Twice is enough: the second time removes what rounding left.
        for _ in 0..2 {
            drawn = drawn.f_sub(&kept.f_mm(&kept.f_tr()?.f_mm(&drawn)?)?)?;
        }
        basis_dd = Tensor::f_cat(&[&kept, &Tensor::f_linalg_qr(&drawn, "reduced")?.0], 1)?;
    }
    Ok(if is_finite(&basis_dd)? { Some(basis_dd) } else { None })
}

/// One power iteration on all directions, `Q ← qr(A Q)`, `[d, d]` in the type of Q. Columns go into the factorization by
/// falling estimate of their eigenvalue, the first of equal ones first, and come back to their places. None where the result
/// is not finite. The host waits for a device.
///
/// # Errors
/// Whatever libtorch says.
pub fn followed(a_dd: &Tensor, q_dd: &Tensor) -> Result<Option<Tensor>> {
    let product_dd = a_dd.f_mm(q_dd)?;
    let estimates_d = q_dd.f_mul(&product_dd)?.f_sum_dim_intlist([0].as_slice(), false, q_dd.f_kind()?)?;
    let (_, order_d) = estimates_d.f_sort_stable(true, 0, true)?;
    let (sorted_dd, _) = Tensor::f_linalg_qr(&product_dd.f_index_select(1, &order_d)?, "reduced")?;
    let mut next_dd = q_dd.f_zeros_like()?;
    let _ = next_dd.f_index_copy_(1, &order_d, &sorted_dd)?;
    Ok(if is_finite(&next_dd)? { Some(next_dd) } else { None })
}

fn is_finite(x: &Tensor) -> Result<bool> {
    Ok(bool::try_from(x.f_isfinite()?.f_all()?)?)
}

/// `out ← X Xᵀ`: of a large one on the host one triangle is computed and mirrored.
///
/// # Errors
/// Whatever libtorch says.
pub fn square(out_dd: &mut Tensor, x_de: &Tensor) -> Result<()> {
    let d = x_de.size()[0];
    let symmetric = Symmetric::new(1, d);
    if symmetric.strips == 1 {
        let _ = x_de.f_mm_out(out_dd, &x_de.f_tr()?)?;
        return Ok(());
    }
    symmetric.gram(out_dd, x_de, &Tensor::f_empty([d * d], (x_de.f_kind()?, x_de.device()))?)
}

/// `Q_Lᵀ X Q_R` with the bases that there are, or `back`: `Q_L X Q_Rᵀ`, in place.
///
/// # Errors
/// Whatever libtorch says.
pub fn rotate(x: &mut Tensor, left: Option<&Tensor>, right: Option<&Tensor>, back: bool) -> Result<()> {
    let turned = |q: &Tensor, turn: bool| if turn { q.f_tr() } else { q.f_alias() };
    match (left, right) {
        (None, None) => Ok(()),
        (Some(left), None) => {
            let product = turned(left, !back)?.f_mm(x)?;
            Ok(x.f_copy_(&product)?)
        }
        (None, Some(right)) => {
            let product = x.f_mm(&turned(right, back)?)?;
            Ok(x.f_copy_(&product)?)
        }
        (Some(left), Some(right)) => {
            let half = turned(left, !back)?.f_mm(x)?;
            let _ = half.f_mm_out(x, &turned(right, back)?)?;
            Ok(())
        }
    }
}
