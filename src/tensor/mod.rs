//! Memory of tensors and what lies in it: the only room that turns a tensor into addresses and back.

mod buffer;
mod device;
mod dtype;
mod elements;
mod encoding;
mod fast_path;
mod in_use;
mod lent;
mod matrix;
#[cfg(test)]
pub(crate) mod test_views;
#[cfg(feature = "internals")]
mod unsound_uses;

pub use buffer::{Element, FlatPtr, FlatView, FlatViewMut, address_of, to_i64};
pub use device::{Device, emulate, emulate_at, is_emulated, work_on_emulated};
pub use dtype::{DType, cpu_hides_tiles, cpu_is_of_amd, cpu_names_amx, product_dtype};
pub use elements::Elements;
pub use encoding::{Blocks, Coded, CodedMut, Encoding, MOST_SPANS, Places, RoundedFrom, Rounding, Span};
pub use fast_path::{
    Dispatch, Gradient, Held, Owner, Watch, check_storage, has_dispatch, prefetch, require_memory,
};
pub use in_use::{InUse, look_at_what_is_in_use, replaced};
pub use lent::{Lent, LentMut};
pub use matrix::{MatrixView, MatrixViewMut, Rect, Stack, Strided, StridedMut, stacked, stacked_mut};
