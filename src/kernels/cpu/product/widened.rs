//! bfloat16 on processors without instructions for it: panels of float32, which holds every bfloat16 exactly.

use half::bf16;

use super::tiles::F32Avx2;
use super::transpose::mirror_any;
use super::types::{Call, Mirror, Number, Rows, Tile};

/// The tile of float32, between operands and a result in bfloat16.
pub(super) struct Bf16Avx2;

impl Tile for Bf16Avx2 {
    type Element = bf16;
    const ROWS: usize = F32Avx2::ROWS;
    const COLS: usize = F32Avx2::COLS;
    const DEPTH: usize = 1;
    const UNITS: usize = 2;
    const TRANSPOSES: bool = false;

    /// # Safety
    /// As the trait says.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn multiply(steps: usize, a: *const bf16, b: *const bf16, out: *mut f32) {
        // SAFETY: the caller's; the panels hold float32.
        unsafe { F32Avx2::multiply(steps, a.cast(), b.cast(), out) };
    }

    /// # Safety
    /// As the trait says.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn pack(left: bool, x: &Rows<bf16>, start: usize, range: [usize; 2], to: *mut bf16) {
        // SAFETY: the caller's.
        unsafe {
            if left {
                panel::<{ F32Avx2::ROWS }>(x, start, range, to.cast());
            } else {
                panel::<{ F32Avx2::COLS }>(x, start, range, to.cast());
            }
        }
    }

    /// # Safety
    /// As the trait says.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn mirror(sums: *const f32, to: &Mirror, out: *mut bf16) {
        // SAFETY: the caller's.
        unsafe { mirror_any(sums, Self::COLS, to, out) };
    }

    /// # Safety
    /// As the trait says.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn task(call: &Call<'_, bf16>, task: usize) {
        // SAFETY: the caller's.
        unsafe { call.task::<Self>(task) };
    }
}

/// Writes elements `range` of rows `start..start + WIDTH` as groups of `WIDTH` float32, zeros for what there is not.
///
/// # Safety
/// The rows are readable, and `to` has room for the panel.
#[inline(always)]
#[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
unsafe fn panel<const WIDTH: usize>(x: &Rows<bf16>, start: usize, [from, end]: [usize; 2], to: *mut f32) {
    let rows = WIDTH.min(x.count - start);
    let first = x.first.wrapping_add(start * x.steps[0]);
    for p in from..end {
        let column = first.wrapping_add(p * x.steps[1]);
        // SAFETY: what is read lies in rows `start..start + rows` up to `inner`, what is written in the panel.
        unsafe {
            let group = to.add(p * WIDTH);
            if rows == WIDTH && x.steps[0] == 1 {
                for i in 0..WIDTH {
                    *group.add(i) = (*column.add(i)).widen();
                }
            } else {
                for i in 0..rows {
                    *group.add(i) = (*column.add(i * x.steps[0])).widen();
                }
                (rows..WIDTH).for_each(|i| *group.add(i) = 0.0);
            }
        }
    }
}
