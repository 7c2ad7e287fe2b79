//! Facts about parameters, states, blocks and settings. No tensors.

mod block;
mod hyper;
pub mod matrices;
pub mod options;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod options_of_tests;
mod param;
mod state;
pub mod storage;

pub use block::{Block, DimSharding, Side, UnitShape};
pub use hyper::Hyper;
pub use matrices::Matrices;
pub use options::{Callback, OptionValue, Options};
pub use param::{Description, MOST_ELEMENTS, ParamSpec, stream_of};
pub use state::{Code, Init, Quantization, Share, StateSpec};
pub use storage::StateStorage;

pub use crate::tensor::Rect;
