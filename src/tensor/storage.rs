//! Storage of tensors: whether their elements are in it, and hints to fetch a line of memory.

use std::ffi::c_void;

use tch::Tensor;

use crate::error::{Error, Result};

/// Pointer to a libtorch `Tensor`, which is one pointer to a counted object: what the shim takes.
pub(super) type TensorPtr = *const *const c_void;

// SAFETY: as `src/torch_shim.cpp` defines it.
unsafe extern "C" {
    /// Bytes that the elements of a tensor need, from the beginning of its storage, and those that the storage has.
    fn oxidion_storage(tensor: TensorPtr, needed: *mut usize, there: *mut usize);
}

/// Bytes that the elements of a tensor need, from the beginning of its storage, and those that the storage has.
fn storage_bytes(tensor: &Tensor) -> (usize, usize) {
    let (mut needed, mut there) = (0, 0);
    // SAFETY: the tensor is alive, and the numbers are there to be written.
    unsafe { oxidion_storage(tensor.as_ptr().cast(), &raw mut needed, &raw mut there) };
    (needed, there)
}

/// Refuses a tensor whose storage was made smaller than its elements need. One that was freed as a whole passes: it is
/// refused where its memory is looked for.
///
/// # Errors
/// `Error::Value` with both sizes.
pub fn check_storage(tensor: &Tensor) -> Result<()> {
    let (needed, there) = storage_bytes(tensor);
    if there == 0 || needed <= there {
        return Ok(());
    }
    Err(Error::Value(format!(
        "the storage of a tensor of shape {:?} was resized to {there} bytes, and its elements need {needed}. Resize it \
         back, or give the parameter new data",
        tensor.size()
    )))
}

/// Refuses a tensor whose elements are not all in its storage.
///
/// # Errors
/// `Error::Value` that says so.
pub fn require_memory(tensor: &Tensor) -> Result<()> {
    if tensor.numel() > 0 && storage_bytes(tensor).1 == 0 {
        let text = "a tensor without memory cannot be used: its storage was freed, or it is not dense";
        return Err(Error::Value(text.into()));
    }
    check_storage(tensor)
}

/// Asks for a line of memory, wherever it is.
#[inline]
pub fn prefetch(address: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: asking for memory that is not there does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address as *const i8) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
