//! The products that an iteration is made of, for each backend.

use crate::error::Result;

/// A matrix `X` (or a group of them) with its symmetric `k x k` matrices, which are known by number; `k` is its short side.
/// All symmetric matrices of an iteration are polynomials of one, so they commute.
pub(super) trait Products {
    /// `S[out] <- X Xᵀ`, by the short side.
    fn gram(&mut self, out: usize) -> Result<()>;

    /// `S[out] <- factor (Σ S[add] + S[a] S[b])`; `out` is none of the others, and what is added is among the operands.
    fn multiply(&mut self, out: usize, operands: [usize; 2], add: &[(f64, usize)], factor: f64)
    -> Result<()>;

    /// [`multiply`](Self::multiply), and `X <- (keep I + S[out]) X` with what it gives.
    fn multiply_and_apply(
        &mut self,
        out: usize,
        operands: [usize; 2],
        add: &[(f64, usize)],
        factor: f64,
        keep: f64,
    ) -> Result<()> {
        self.multiply(out, operands, add, factor)?;
        self.apply(out, keep, 1.0)
    }

    /// `S[out] <- keep S[out] + factor S[a]`; what is there is not read where `keep` is zero.
    fn combine(&mut self, out: usize, keep: f64, a: usize, factor: f64) -> Result<()>;

    /// `X <- keep X + factor S[p] X`. `S[p]` is overwritten.
    fn apply(&mut self, p: usize, keep: f64, factor: f64) -> Result<()>;

    /// Divides `X` by `d = factor ||S[square]||_F^(1/4)`, where `S[square] = S[gram]²` and `S[gram] = X Xᵀ`; and both
    /// of these by `d²` and `d⁴` times the second and fourth power of the returned number.
    fn divide(&mut self, gram: usize, square: usize, factor: f64) -> Result<f64>;

    /// Divides row `i` of the short side of `X` by `factor sqrt(Σ_j |(X Xᵀ)_ij|)`; a row whose sum is zero becomes zero.
    /// `S[gram]` is overwritten.
    fn divide_rows(&mut self, gram: usize, factor: f64) -> Result<()>;
}
