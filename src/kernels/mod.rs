//! Fused passes over memory. One safe function per operation; every operand is a `Slab`.

mod cpu;

pub use cpu::elementwise::{AdamW, Apply, Decay, Lion, Momentum};
pub use cpu::reduce::{column_sums_of_squares, normalize_columns, sum_of_squares};
pub use cpu::run;
