//! Distance of a matrix from orthonormal columns.

use tch::Tensor;

use crate::error::Result;

/// `‖AᵀA - I‖_F / √k` over the short side k of a matrix.
///
/// # Errors
/// Whatever libtorch says.
pub fn orthogonality_error(matrix: &Tensor) -> Result<f64> {
    let wide = matrix.f_to_kind(tch::Kind::Double)?;
    let tall = if wide.size()[0] < wide.size()[1] { wide.f_tr()? } else { wide };
    let short = tall.size()[1];
    let identity = Tensor::f_eye(short, (tch::Kind::Double, tall.device()))?;
    let distance = tall.f_tr()?.f_mm(&tall)?.f_sub(&identity)?.f_norm()?;
    #[allow(clippy::cast_precision_loss)] // matrix sides are small
    Ok(f64::try_from(distance)? / (short.max(1) as f64).sqrt())
}
