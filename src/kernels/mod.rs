//! Fused passes over memory. One safe function per operation; every operand is a `FlatView`.

mod channels;
mod clipping;
mod columns;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "cuda_stub.rs"]
pub mod cuda;
mod cuda_call;
mod decode;
mod dispatch;
mod factors;
mod low_rank;
mod neurons;
mod normals;
mod rotations;
mod signs;
mod slices;
mod trust;

pub use channels::{
    ChannelStep, Channels, Limited, Projected, channel_ratios, channel_squares, channel_steps, channel_totals,
};
pub use clipping::{Clipping, Rates, UpdateSums};
pub use columns::{Columns, Kept, normalize_columns, orthonormal_columns, squares_and_scaled};
pub use cpu::dense::{cholesky_qr, multiply};
pub use cpu::elementwise::{Accumulate, AdamW, Apply, Convert, Decay, Lion, Momentum, Release};
pub use cpu::factored::{
    ConfidentApply, GradientSquares, Line, Residual, ScaledApply, Scales, UpdateSquares,
};
pub use cpu::fold::{Fold, SumOfSquares, fold as fold_on_cpu};
pub use cpu::gaussian::gaussian;
pub use cpu::isa::{Isa, best as best_isa, limit as isa_limit};
pub use cpu::lamb::{Lamb, LambNorms};
pub use cpu::low_rank::{ApplyLate, Direction};
pub use cpu::means::{Means, NewShare, Squares};
pub use cpu::momentum::MomentumSquares;
pub use cpu::pack::{Copy, Messages};
pub use cpu::philox::{philox, stream};
pub use cpu::product::{
    Combine, Features, Kernel, Operand, Outcome, Product, Scale, Side, ThinProduct, WideSquares, divide_rows,
    multiplies_bf16, trace,
};
pub use cpu::reduce::only_zeros;
pub use cpu::rows::Stack;
pub use cpu::run as run_on_cpu;
pub use cpu::signs::{NONZEROS as SIGNS, Signs};
pub use dispatch::{
    copy, count_steps, fold, fold_units, frozen, has_symmetric_product, is_capturing, measured_squares,
    move_down, on_device, rows, run, squares_of_parts, sum, symmetric_product,
};
pub use factors::{Factors, Steps};
pub use low_rank::{Finite, clear_without_basis};
pub use neurons::{Neurons, neuron_squares, neuron_variance, normalize_neurons};
pub use normals::{Normals, fill_normals};
pub use rotations::{ROTATED_SIZES, orthogonal_rows};
pub use signs::sign_matrix;
pub use slices::{
    Chosen, Sliced, absolute_sums, add_with_absolute_sums, apply_slices, choose, put_back, take,
};
pub use trust::{Debias, Trust};
