//! Fused passes over memory. One safe function per operation; every operand is a `Slab`.

mod cpu;

pub use cpu::elementwise::{AdamW, Apply, Convert, Decay, Lion, Momentum};
pub use cpu::pack::{Copy, clear, copy, sum};
pub use cpu::reduce::{column_sums_of_squares, normalize_columns, sum_of_squares};
pub use cpu::run;
