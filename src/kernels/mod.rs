//! Fused passes over memory. One safe function per operation; every operand is a `Slab`.

mod cpu;

pub use cpu::elementwise::{Accumulate, AdamW, Apply, Convert, Decay, Lion, Momentum, Release};
pub use cpu::neuron::{NeuronVariance, neuron_squares, normalize_neurons};
pub use cpu::pack::{Copy, copy, sum};
pub use cpu::philox::{philox, stream};
pub use cpu::reduce::{column_sums_of_squares, normalize_columns, sum_of_squares};
pub use cpu::run;
pub use cpu::select::{absolute_sums, choose, chosen, put, take};
