//! CUDA kernels: compiled once for a device, launched on torch's stream. Nothing here waits for a device.

mod coded;
mod columns;
mod compile;
mod device;
mod driver;
mod exchange;
mod factors;
pub(super) mod jacobi;
mod lines;
mod low_rank;
mod neurons;
pub(super) mod panel;
mod rows;
mod select;
mod sources;
mod sums;
pub(super) mod symmetric;
mod table;
mod tape;

pub(super) use columns::{normalize_columns, squares_and_scaled};
pub use compile::keep_in;
pub use device::{Entered, Following, emulate, follow};
pub(super) use device::{enter, is_capturing, is_entered, scratch};
pub(super) use exchange::{copy, move_down, sum};
pub(super) use factors::{lamb_factors, update_factors};
pub(super) use jacobi::orthogonal_rows;
pub(super) use low_rank::{
    channel_ratios, channel_steps, channel_totals, clear_without_basis, normals, signs,
};
pub(super) use neurons::neurons;
pub(super) use panel::orthonormal_columns;
pub(super) use rows::rows;
pub(super) use select::{apply_slices, choose, line_sums, move_slices};
pub(super) use sources::When;
pub use sources::{Source, Sources};
pub(super) use sums::{fold, fold_units};
pub(super) use symmetric::{has_symmetric_product, symmetric_product};
pub(super) use table::run;
pub(super) use tape::frozen;
pub use tape::{Tape, finish, note, noted, set};
