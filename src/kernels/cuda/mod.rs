//! CUDA kernels: compiled once for a device, launched on torch's stream. Nothing here waits for a device.

mod coded;
mod compile;
pub(super) mod device;
pub(super) mod driver;
mod exchange;
mod kept;
pub(super) mod lines;
mod nvrtc;
mod passes;
mod rows;
pub(super) mod sources;
mod states;
pub(super) mod sums;
pub(super) mod table;
mod tape;

pub use compile::keep_in;
pub use device::{Entered, Facts, Following, emulate, facts, follow, hide, images, use_only_asked};
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
