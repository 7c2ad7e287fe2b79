//! Dense linear algebra on batches of matrices: Newton–Schulz polar factors, Cholesky-based
//! orthonormalization, learning-rate factors and counter-based normal numbers.
//!
//! Functions take `tch::Tensor` batches `[B, m, n]` (or plain slices), know nothing about parameters or
//! optimizers, and treat the matrices of a batch independently: a non-finite matrix never changes another
//! one.

pub mod basis;
pub mod coefficients;
mod decompose;
mod dependent;
pub mod eigenbasis;
pub mod gram;
mod iteration;
mod library;
pub mod low_rank;
pub mod newton_schulz;
pub mod orthogonality;
pub mod orthonormalizer;
mod packed;
pub mod polar;
mod products;
pub mod project;
pub mod qr;
pub mod random;
pub mod right_factor;
pub mod sketch;
mod steps;
mod sums;
mod symmetric;
pub(crate) mod views;

pub use library::OneThread;
