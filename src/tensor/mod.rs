//! Memory of tensors and what lies in it: the only room that turns a tensor into addresses and back.

mod buffer;
mod device;
mod dtype;
mod encoding;
mod fast_path;
mod lent;
mod matrix;
#[cfg(test)]
pub(crate) mod test_views;
#[cfg(feature = "internals")]
mod unsound_uses;

pub use buffer::{Element, FlatPtr, FlatView, FlatViewMut, address_of, to_i64};
pub use device::{Device, emulate, emulate_at, is_emulated, work_on_emulated};
pub use dtype::{DType, cpu_hides_tiles, cpu_is_of_amd, cpu_names_amx, product_dtype};
pub use encoding::{Blocks, Coded, CodedMut, Encoding, MOST_SPANS, Places, Rounding};
pub use fast_path::{Gradient, Owner, Watch, prefetch, storage_bytes};
pub use lent::{Lent, LentMut};
pub use matrix::{MatrixView, MatrixViewMut, Rect, Stack, Strided, StridedMut, stacked, stacked_mut};
