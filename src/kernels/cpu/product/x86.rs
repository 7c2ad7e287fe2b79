//! The kernels of x86-64, by name.

use super::amx::Bf16Amx;
use super::pack;
use super::tiles::{Bf16Avx512, F32Avx2, F32Avx512, F64Avx2, F64Avx512};
use super::types::{Call, Rows, Tile};
use super::widened::Bf16Avx2;
use super::{Kernel, Operand, Product, Side, each};
use crate::tensor::{FlatView, FlatViewMut};
use crate::threads;

/// Most matrices that are added to a product.
pub(super) const ADDENDS: usize = 2;

/// Elements along the inner dimension that one task brings into panels, and that are read together: as many lines at
/// multiples of 4 KiB as the smallest first-level cache has room for.
const STRIPE: usize = 64;
const LINES: usize = 8;

/// Calls a function with the tile of a kernel.
macro_rules! with_tile {
    ($kernel:expr, $function:ident, $($argument:expr),*) => {
        match $kernel {
            Kernel::F32Avx512 => $function::<F32Avx512>($($argument),*),
            Kernel::F64Avx512 => $function::<F64Avx512>($($argument),*),
            Kernel::Bf16Avx512 => $function::<Bf16Avx512>($($argument),*),
            Kernel::Bf16Avx2 => $function::<Bf16Avx2>($($argument),*),
            Kernel::Bf16Amx => $function::<Bf16Amx>($($argument),*),
            Kernel::F32Avx2 => $function::<F32Avx2>($($argument),*),
            Kernel::F64Avx2 => $function::<F64Avx2>($($argument),*),
        }
    };
}

pub(super) fn elements(kernel: Kernel, side: Side, count: usize, inner: usize) -> usize {
    fn of<T: Tile>(side: Side, count: usize, inner: usize) -> usize {
        T::UNITS * pack::elements(count, width::<T>(side), inner, T::DEPTH)
    }
    with_tile!(kernel, of, side, count, inner)
}

pub(super) fn tile_cols(kernel: Kernel) -> usize {
    fn of<T: Tile>() -> usize {
        T::COLS
    }
    with_tile!(kernel, of,)
}

pub(super) fn tile_rows(kernel: Kernel) -> usize {
    fn of<T: Tile>() -> usize {
        T::ROWS
    }
    with_tile!(kernel, of,)
}

fn width<T: Tile>(side: Side) -> usize {
    if side == Side::Left { T::ROWS } else { T::COLS }
}

pub(super) fn pack(kernel: Kernel, side: Side, from: &Operand<'_>, to: &mut FlatViewMut<'_>, spread: bool) {
    with_tile!(kernel, pack_with, side, from, to, spread);
}

/// A pointer that tasks share; each writes elements of its own.
struct Target<E>(*mut E);

// SAFETY: tasks write disjoint panels.
unsafe impl<E> Sync for Target<E> {}

impl<E> Target<E> {
    fn panel(&self, offset: usize) -> *mut E {
        self.0.wrapping_add(offset)
    }
}

// SAFETY: tasks only read the rows.
unsafe impl<E> Sync for Rows<E> {}

fn pack_with<T: Tile>(side: Side, from: &Operand<'_>, to: &mut FlatViewMut<'_>, spread: bool) {
    let panels = to.slice_mut::<T::Element>();
    let rows = Rows {
        first: from.x.pointer::<T::Element>(),
        count: from.count,
        inner: from.inner,
        steps: from.steps,
    };
    let target = Target(panels.as_mut_ptr());
    let width = width::<T>(side);
    let each_elements = T::UNITS * width * from.inner.next_multiple_of(T::DEPTH);
    let panel = |i: usize, range: [usize; 2]| {
        // SAFETY: the kernel was chosen by the features of this machine; the panel is inside `panels`.
        unsafe { T::pack(side == Side::Left, &rows, i * width, range, target.panel(i * each_elements)) };
    };
    let count = from.count.div_ceil(width);
    if from.steps[1] == 1 {
        return each(count, spread, |i| panel(i, [0, from.inner]));
    }
    // The rows lie side by side: some elements of all of them, while the lines that they share are in the cache.
    each(from.inner.div_ceil(STRIPE), spread, |stripe| {
        let end = from.inner.min((stripe + 1) * STRIPE);
        for start in (stripe * STRIPE..end).step_by(LINES) {
            (0..count).for_each(|i| panel(i, [start, end.min(start + LINES)]));
        }
    });
}

pub(super) fn multiply(
    kernel: Kernel,
    left: &FlatView<'_>,
    right: &FlatView<'_>,
    product: &mut Product<'_>,
    spread: bool,
) {
    with_tile!(kernel, multiply_with, left, right, product, spread);
}

fn multiply_with<T: Tile>(
    left: &FlatView<'_>,
    right: &FlatView<'_>,
    product: &mut Product<'_>,
    spread: bool,
) {
    let mut add = [(0.0, std::ptr::null()); ADDENDS];
    for (to, (weight, addend)) in add.iter_mut().zip(product.add) {
        *to = (*weight, addend.pointer::<T::Element>());
    }
    let call = Call {
        left: left.slice::<T::Element>().as_ptr(),
        right: right.slice::<T::Element>().as_ptr(),
        out: product.out.pointer::<T::Element>(),
        size: product.size,
        stride: product.stride,
        factor: product.factor,
        keep: product.keep,
        add: &add[..product.add.len()],
        diagonal: product.diagonal,
        outcome: product.outcome,
        block: T::BLOCK,
    };
    let call = if spread { call.for_threads::<T>(threads::get()) } else { call };
    each(call.tasks::<T>(), spread, |task| {
        // SAFETY: the kernel was chosen by the features of this machine; the lengths were checked.
        unsafe { T::task(&call, task) };
    });
}
