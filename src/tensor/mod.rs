//! Memory of tensors and what lies in it: the only room that turns a tensor into addresses and back.

mod buffer;
mod device;
mod dtype;
mod elements;
mod encoded;
mod encoding;
mod fast_path;
mod flat_ptr;
mod in_use;
mod lent;
mod matrix;
mod storage;
#[cfg(test)]
pub(crate) mod test_views;
#[cfg(feature = "internals")]
mod unsound_uses;

pub use buffer::{FlatView, FlatViewMut};
pub use device::{Device, emulate, emulate_at, is_emulated, work_on_emulated};
pub use dtype::{DType, cpu_hides_tiles, cpu_is_of_amd, cpu_names_amx, product_dtype};
pub use elements::{Elements, address_of};
pub use encoded::{Quantized, QuantizedMut, RoundedFrom};
pub use encoding::{Blocks, Encoding, MOST_SPANS, Places, Rounding, Span};
pub use fast_path::{Dispatch, Gradient, Held, Owner, Watch, has_dispatch};
pub use flat_ptr::{Element, FlatPtr, to_i64};
pub use in_use::{InUse, look_at_what_is_in_use, replaced};
pub use lent::{Lent, LentMut};
pub use matrix::{MatrixView, MatrixViewMut, Rect, Stack, Strided, StridedMut, stacked, stacked_mut};
pub use storage::{check_storage, prefetch, require_memory};
