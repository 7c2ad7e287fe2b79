//! Fused passes over memory. One safe function per operation; every operand is a `FlatView`.

mod backend;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "cuda_stub.rs"]
pub mod cuda;
mod dispatch;
mod enter;
mod formula;
mod headers;
mod libtorch;
mod op;
mod ops;
mod print;
#[cfg(feature = "cuda")]
mod sources;

pub use backend::{Products, RateGuard, Tier, follow, on_device, rounded};
pub use cpu::Job;
pub use cpu::fold::{Fold, fold as fold_on_cpu};
pub use cpu::gaussian::gaussian;
pub use cpu::isa::{Isa, best as best_isa, limit as isa_limit};
pub use cpu::pack::{Copy, Messages};
pub use cpu::philox::{philox, stream};
pub use cpu::product::{
    Combine, Depends, Features, Inverse, Kernel, Operand, Outcome, Product, Scale, Side, ThinProduct,
    WideSquares, cholesky_qr, divide_rows, multiplies_bf16, multiply, trace,
};
pub use cpu::reduce::only_zeros;
pub use cpu::rows::Stack;
pub use cpu::run as run_on_cpu;
#[cfg(not(feature = "cuda"))]
pub use cuda::{enter_with, source_of, states, turn_off, turn_off_on};
pub use dispatch::{copy, fold, fold_units, frozen, is_capturing, measured_squares, move_down, run, sum};
pub use enter::{Entered, enter};
pub use headers::{generated as generated_headers, kernels as device_kernels};
pub use op::{Content, Family, Kernel as DeviceKernel, Operand as DeviceOperand, Scalar};
pub use ops::apply::{Apply, Decay};
pub use ops::average::{Average, ScheduleFreeBegin, ScheduleFreeEnd};
pub use ops::channels::{
    ChannelStep, Channels, Limited, Projected, channel_ratios, channel_squares, channel_steps, channel_totals,
};
pub use ops::columns::{
    Columns, Kept, has_orthonormal_columns, normalize_columns, orthonormal_columns, squares_and_scaled,
};
pub use ops::convert::Convert;
pub use ops::decode::rows;
pub use ops::direction::Direction;
pub use ops::divided::{LEAST_DIVISOR, divide_parts};
pub(crate) use ops::elementwise_optimizers;
pub use ops::factored::{
    ConfidentApply, GradientSquares, Line, Residual, ScaledApply, Scales, UpdateSquares,
};
pub use ops::factors::{Clipping, Debias, Factors, Rates, Steps, Trust, UpdateSums, count_steps};
pub use ops::finite::{Finite, clear_without_basis, is_zero};
pub use ops::lamb::{Lamb, LambNorms};
pub use ops::means::{Means, NewShare, Squares};
pub use ops::momentum::{Accumulate, Momentum, Release};
pub use ops::momentum_squares::MomentumSquares;
pub use ops::neurons::{Neurons, neuron_squares, neuron_variance, normalize_neurons};
pub use ops::normals::{Normals, fill_normals};
pub use ops::optimizers::*;
pub use ops::scaled::{Scaled, SizeRule, WeightNorms};
pub use ops::signs::{SIGNS, Signs, sign_matrix};
pub use ops::slices::{
    Chosen, Sliced, absolute_sums, add_with_absolute_sums, apply_slices, choose, put_back, take,
};
pub use ops::sum_of_squares::{SumOfSquares, squares_of_parts};
pub use ops::symmetric::{
    ProductClass, has_symmetric_product, multiprocessors, set_measured, symmetric_product,
    symmetric_product_by_groups,
};
pub use ops::whiten::{Temper, TemperTo, Whiten};
#[cfg(feature = "cuda")]
pub use sources::{enter_with, source_of, states, turn_off, turn_off_on};
