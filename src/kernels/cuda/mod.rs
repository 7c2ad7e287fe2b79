//! CUDA kernels: compiled once for a device, launched on torch's stream. Nothing here waits for a device.
//!
//! No GPU has run these kernels yet. Figures of registers and instructions in comments are the compiler's,
//! and figures of tiles and waves are arithmetic. Times are not measured.
//!
//! For each compute instruction the core makes the primary context of a device, which is torch's, the context
//! of the thread, and restores the previous one afterwards. All memory is torch's: states, arena and scratch.
//!
//! The host waits for a device in these cases only:
//! - a `GradScaler`, whose scale and `found_inf` are read;
//! - an `lr` that is a tensor on the device, without `capturable=True`;
//! - the first step, which loads the kernels;
//! - decompositions by libtorch (see `libtorch/mod.rs`).

mod compile;
pub(super) mod device;
pub(super) mod driver;
mod exchange;
mod kept;
pub(super) mod lines;
mod nvrtc;
mod passes;
mod quantized;
mod rows;
pub(super) mod sources;
mod states;
pub(super) mod sums;
pub(super) mod table;
mod tape;

pub use compile::keep_in;
pub use device::{Entered, Facts, RateGuard, emulate, facts, follow, hide, images, use_only_asked};
pub(super) use device::{enter, is_capturing, scratch, scratch_mut, states, turn_off, turn_off_on, uses};
pub use driver::graphs_refusal;
pub(super) use exchange::{copy, move_down, sum};
pub use nvrtc::look_for_nvrtc_at;
pub(super) use passes::run;
pub(super) use rows::rows;
pub(super) use sources::When;
pub use sources::{Source, Sources};
pub use states::{Origin, State};
pub(super) use sums::{fold, fold_units};
pub use tape::{Tape, finish, let_go, note, noted, set};
pub(super) use tape::{frozen, live_numbers};
