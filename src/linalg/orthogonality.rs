//! Distance of a matrix from orthonormal columns, and how much of it cannot be helped.

use tch::Tensor;

use crate::error::Result;
use crate::tensor::DType;

/// `‖AᵀA - I‖_F / √k` over the short side k of a matrix.
///
/// # Errors
/// Whatever libtorch says.
pub fn orthogonality_error(matrix: &Tensor) -> Result<f64> {
    let tall = tall_in_float64(matrix)?;
    let short = tall.size()[1];
    let identity = Tensor::f_eye(short, (tch::Kind::Double, tall.device()))?;
    let distance = tall.f_tr()?.f_mm(&tall)?.f_sub(&identity)?.f_norm()?;
    #[allow(clippy::cast_precision_loss)] // matrix sides are small
    Ok(f64::try_from(distance)? / (short.max(1) as f64).sqrt())
}

/// Error that the directions which a matrix lacks leave, whatever becomes of the others: `√((k - r) / k)` for rank r and short
/// side k. A direction counts as lacking where rounding to the matrix's type could have made it.
///
/// # Errors
/// Whatever libtorch says.
pub fn expected_orthogonality_error(matrix: &Tensor) -> Result<f64> {
    let tall = tall_in_float64(matrix)?;
    let (rows, cols) = (tall.size()[0], tall.size()[1]);
    let (squares, _) = tall.f_tr()?.f_mm(&tall)?.f_linalg_eigh("L")?;
    let squares = Vec::<f64>::try_from(squares)?;
    #[allow(clippy::cast_precision_loss)] // matrix sides are small
    let [rows, cols] = [rows as f64, cols as f64];
    let (sum, largest) = (squares.iter().sum::<f64>().max(0.0), squares.iter().copied().fold(0.0, f64::max));
    // Rounding changes elements of root mean square a by about `a * roundoff` each, and these changes have a spectral norm of
    // about that times √rows + √cols. The squares are known to the roundoff of float64 times the largest.
    let rounded = DType::from_kind(matrix.kind()).map_or(0.0, DType::roundoff)
        * (sum / (rows * cols).max(1.0)).sqrt()
        * (rows.sqrt() + cols.sqrt());
    let bound = rounded.max(largest.sqrt() * 1e-7);
    let lacking = squares.iter().filter(|square| square.max(0.0).sqrt() <= bound).count();
    #[allow(clippy::cast_precision_loss)]
    Ok((lacking as f64 / cols.max(1.0)).sqrt())
}

fn tall_in_float64(matrix: &Tensor) -> Result<Tensor> {
    let wide = matrix.f_to_kind(tch::Kind::Double)?;
    Ok(if wide.size()[0] < wide.size()[1] { wide.f_tr()? } else { wide })
}
