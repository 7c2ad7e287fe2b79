//! Iterations on a batch of matrices: normalized, by kernels of our own or by libtorch, one matrix or a group at a
//! time.
//!
//! B = matrices in the batch, g = matrices computed together, m = rows, n = cols, k = min(m, n).

use std::sync::{Mutex, PoisonError};

use tch::{Device, Kind, Tensor};

use super::coefficients::{Polynomial, Preconditioner};
use super::library::{Divisor, Library, OneThread, SPREAD_FROM, normalize};
use super::packed::{self, Packed};
use super::products::Products;
use super::steps::{Step, iterate, iterate_gram, plan};
use super::views;
use crate::error::{Error, Result};
use crate::kernels::{self, Kernel, LEAST_DIVISOR, has_symmetric_product};
use crate::tensor::{DType, FlatView, FlatViewMut};
use crate::threads;

/// Maximum elements of matrices that libtorch computes together: small matrices share the cost of a call, large ones remain
/// in the cache through all steps.
const GROUP_ELEMENTS: i64 = 1 << 17;
/// Matrices with a shorter short side would leave most of a tile empty, as those of low-rank adapters: 200 of 8 x 1024 and
/// 1024 x 8 take 17 ms by libtorch and 37 ms by tiles on one thread.
const KERNEL_FROM: usize = 32;
/// Memory for matrices that threads compute side by side, in bytes. What takes more is computed one by one, by all threads.
const SLOT_BYTES: usize = 4 << 20;
/// Most matrices that are computed side by side.
const SLOTS: usize = 32;
/// Products of an iteration, about: a few small matrices are one thread's work, as waking another takes milliseconds where
/// other processes want its core.
const PRODUCTS: usize = 16;
/// A result of the Gram form in a 16-bit type whose squared norm is above this share of its rows is computed again in the
/// standard form. Exact polar factors have 1 and what the polynomials leave is below 1.2; every explosion that was seen
/// with unsafe restarts was above.
const GUARD: f64 = 1.35;

/// A polynomial in one of its forms.
#[derive(Clone, Copy, Debug)]
pub(super) struct Iteration<'a> {
    pub(super) polynomial: &'a Polynomial,
    /// Restarts of the Gram form; `None` for the standard form.
    pub(super) restarts: Option<&'a [usize]>,
    pub(super) epsilon: f64,
    /// Sums of the squares of the elements, one float64 for each matrix, if they are known.
    pub(super) squares: Option<&'a [FlatView<'a>]>,
    /// The type in which matrices are multiplied: theirs, or float16 of those in bfloat16.
    pub(super) product: DType,
}

/// The kernel for matrices of this shape, `None` where libtorch's products are used.
fn kernel_for(dtype: DType, [m, n]: [usize; 2]) -> Option<Kernel> {
    Kernel::of(dtype).filter(|&kernel| m.min(n) >= KERNEL_FROM || kernel.is_alone())
}

/// The element type of matrices.
pub(super) fn dtype_of(x: &Tensor) -> Result<DType> {
    let kind = x.f_kind()?;
    DType::from_kind(kind).ok_or_else(|| Error::Internal(format!("an iteration on matrices of {kind:?}")))
}

/// Matrices that libtorch computes together.
pub(super) fn group_size(b: i64, m: i64, n: i64) -> i64 {
    (GROUP_ELEMENTS / (m * n).max(1)).clamp(1, b.max(1)).min(b)
}

/// Tests whether libtorch computes a matrix alone, whatever the size of the batch.
fn alone(m: i64, n: i64) -> bool {
    group_size(2, m, n) < 2
}

fn to_usize(n: i64) -> usize {
    usize::try_from(n).unwrap_or(0)
}

/// Returns the number of symmetric matrices that a matrix `m x n` needs, and the elements of the copy that is kept of it.
fn squares_and_copy([m, n]: [i64; 2], dtype: DType, in_gram_form: bool) -> (i64, i64) {
    (if in_gram_form { 4 } else { 2 }, if in_gram_form && dtype.bytes() == 2 { m * n } else { 0 })
}

/// Elements of scratch, in the dtype of the batch, that `b` matrices `m x n` need in the standard or the Gram form.
///
/// The number does not grow with `b` beyond some small matrices, since the work side by side is bounded.
#[must_use]
pub(super) fn scratch_elements(b: i64, m: i64, n: i64, dtype: DType, in_gram_form: bool) -> i64 {
    let (squares, kept) = squares_and_copy([m, n], dtype, in_gram_form);
    if let Some(kernel) = kernel_for(dtype, [m, n].map(to_usize)) {
        let each = slot_elements(kernel, [m, n].map(to_usize), to_usize(squares), to_usize(kept));
        let slots = slots(each, dtype, to_usize(b));
        return i64::try_from(each * slots).unwrap_or(i64::MAX);
    }
    library_elements(b, m, n, dtype, in_gram_form)
}

/// Elements of scratch, in the dtype of the batch, that each of the matrices which a device computes together needs.
pub(super) fn elements_of_each(m: i64, n: i64, dtype: DType, in_gram_form: bool) -> i64 {
    let (squares, _) = squares_and_copy([m, n], dtype, in_gram_form);
    Library::elements(1, [m, n], squares).max(2 * m * n)
}

/// Elements of scratch as of `scratch_elements`, where libtorch's products are used in any case.
fn library_elements(b: i64, m: i64, n: i64, dtype: DType, in_gram_form: bool) -> i64 {
    let (squares, kept) = squares_and_copy([m, n], dtype, in_gram_form);
    // Before the first step, the matrix in twice the width.
    let g = group_size(b, m, n);
    (Library::elements(g, [m, n], squares)).max(2 * g * m * n) + g * kept
}

fn slot_elements(kernel: Kernel, shape: [usize; 2], squares: usize, kept: usize) -> usize {
    // A whole number of cache lines: no two threads write to one.
    let unit = 64 / kernel.dtype().bytes();
    (Packed::elements(kernel, shape, squares) + kept).next_multiple_of(unit)
}

/// Matrices for which there is memory at the same time.
fn slots(each: usize, dtype: DType, b: usize) -> usize {
    (SLOT_BYTES / (each * dtype.bytes()).max(1)).clamp(1, SLOTS).min(b.max(1))
}

impl Iteration<'_> {
    /// Replaces every matrix of the batch, in place.
    pub(super) fn run(&self, x_bmn: &mut Tensor, scratch: &mut Tensor) -> Result<()> {
        let (b, m, n) = x_bmn.size3()?;
        if b == 0 || m == 0 || n == 0 {
            return Ok(());
        }
        let kind = x_bmn.f_kind()?;
        let dtype = self.product;
        let flat = scratch.size();
        let here = x_bmn.device() == Device::Cpu && !kernels::on_device();
        let in_gram_form = self.restarts.is_some();
        let needed = if here {
            scratch_elements(b, m, n, dtype, in_gram_form)
        } else {
            elements_of_each(m, n, dtype, in_gram_form)
        };
        let fits = DType::from_kind(kind)
            .is_some_and(|stored| stored == dtype || [stored, dtype] == [DType::BF16, DType::F16]);
        if !fits || !x_bmn.is_contiguous() || flat.len() != 1 || flat[0] < needed || scratch.f_kind()? != kind
        {
            return Err(Error::Internal(format!(
                "an iteration in {dtype:?} needs a contiguous batch and {needed} elements of {kind:?}, got scratch {flat:?}"
            )));
        }
        match kernel_for(dtype, [m, n].map(to_usize)) {
            Some(kernel) if here => {
                let batch = views::write_all([x_bmn, scratch])?;
                self.by_kernel(kernel, batch, to_usize(b), [m, n].map(to_usize))
            }
            _ => {
                let multiplications = to_usize(b * m * n * m.min(n)) * PRODUCTS;
                let _alone = if here { OneThread::for_small(multiplications) } else { None };
                self.by_library(x_bmn, scratch)
            }
        }
    }

    fn guarded(&self, dtype: DType) -> bool {
        self.restarts.is_some() && dtype.bytes() == 2
    }

    fn squares(&self) -> usize {
        if self.restarts.is_some() { 4 } else { 2 }
    }

    /// One matrix after the other, each by all threads; or, where they are small, as many side by side as there are threads.
    fn by_kernel(
        &self,
        kernel: Kernel,
        [x, memory]: [FlatViewMut<'_>; 2],
        b: usize,
        shape: [usize; 2],
    ) -> Result<()> {
        let [m, n] = shape;
        let kept = if self.guarded(kernel.dtype()) { m * n } else { 0 };
        let each = slot_elements(kernel, shape, self.squares(), kept);
        let threads = threads::get();
        let work = m * n * m.min(n);
        let side_by_side = if b * work * PRODUCTS < SPREAD_FROM { 1 } else { threads };
        let workers = slots(each, kernel.dtype(), b).min(side_by_side);
        let spread = workers < threads && work >= SPREAD_FROM;
        let slots: Vec<_> = memory.chunks(each).take(workers.max(1)).map(Mutex::new).collect();
        let matrices: Vec<_> = x.chunks(m * n).map(|x| Mutex::new((x, Ok(())))).collect();
        let one = |slot: usize, i: usize| {
            let mut memory = slots[slot].lock().unwrap_or_else(PoisonError::into_inner);
            let mut matrix = matrices[i].lock().unwrap_or_else(PoisonError::into_inner);
            let (x, done) = &mut *matrix;
            let squares = self.squares.and_then(|squares| squares.get(i)?.numbers().first().copied());
            *done = self.one(kernel, (x.reborrow(), squares), shape, memory.reborrow(), spread);
        };
        if workers > 1 {
            threads::share(workers, b, one);
        } else if spread {
            threads::run(|| (0..b).for_each(|i| one(0, i)));
        } else {
            (0..b).for_each(|i| one(0, i));
        }
        matrices.into_iter().try_for_each(|one| one.into_inner().unwrap_or_else(PoisonError::into_inner).1)
    }

    fn one(
        &self,
        kernel: Kernel,
        (mut x, squares): (FlatViewMut<'_>, Option<f64>),
        shape: [usize; 2],
        memory: FlatViewMut<'_>,
        spread: bool,
    ) -> Result<()> {
        let norm = squares.map_or_else(|| packed::norm(&x.view()), f64::sqrt);
        if norm == 0.0 {
            return Ok(());
        }
        if !norm.is_finite() {
            packed::scale(x, f64::NAN);
            return Ok(());
        }
        let (steps, start) = plan(self.polynomial);
        let (factor, scale) = self.first_divisor(start);
        packed::scale(x.reborrow(), ((norm * factor + self.epsilon) * scale).max(LEAST_DIVISOR).recip());
        let (mut memory, kept) = memory.split_at(Packed::elements(kernel, shape, self.squares()));
        if !self.guarded(kernel.dtype()) {
            let mut products = Packed::new(kernel, x, shape, self.squares(), memory, spread)?;
            return self.iterate(&mut products, &steps, start);
        }
        let mut kept = kept.into_part(0, x.len());
        kept.copy_from(x.view());
        let mut products =
            Packed::new(kernel, x.reborrow(), shape, self.squares(), memory.reborrow(), spread)?;
        self.iterate(&mut products, &steps, start)?;
        if exploded(packed::norm(&x.view()), shape) {
            x.copy_from(kept.view());
            let standard = self.standard();
            let mut products = Packed::new(kernel, x, shape, standard.squares(), memory, spread)?;
            standard.iterate(&mut products, &steps, start)?;
        }
        Ok(())
    }

    /// Number of matrices that libtorch computes together, and true if each is alone for it: on a device as many as
    /// there is scratch for, so that they fill it.
    fn together(&self, [b, m, n]: [i64; 3], dtype: DType, scratch: &Tensor) -> (i64, bool) {
        if !kernels::on_device() {
            return (group_size(b, m, n), alone(m, n));
        }
        let each = elements_of_each(m, n, dtype, self.restarts.is_some());
        let room = i64::try_from(scratch.numel()).unwrap_or(i64::MAX);
        ((room / each.max(1)).clamp(1, b), false)
    }

    fn by_library(&self, x_bmn: &Tensor, scratch: &Tensor) -> Result<()> {
        let (b, m, n) = x_bmn.size3()?;
        let (dtype, kind) = (self.product, self.product.kind());
        let scratch = &scratch.f_view_dtype(kind)?;
        // The guard reads a norm, so it is off on a device: the host would have to wait.
        let guarded =
            matches!(kind, Kind::Half | Kind::BFloat16) && self.restarts.is_some() && !kernels::on_device();
        let (steps, start) = plan(self.polynomial);
        let (factor, scale) = self.first_divisor(start);
        let (group, alone) = self.together([b, m, n], dtype, scratch);
        // Kernels of symmetric products want the short side's rows to be contiguous.
        let turned = m > n && has_symmetric_product(kind, n)?;
        // Every product with X changes its place. They begin where they end in scratch, from where they are turned back.
        let products_with_x = self.restarts.map_or(steps.len(), |restarts| restarts.len() + 1);
        let begins_in_scratch = turned && products_with_x.is_multiple_of(2);
        let compute = |iteration: &Iteration<'_>, part: &Tensor, home: &mut Tensor| -> Result<()> {
            let squares = i64::try_from(iteration.squares()).unwrap_or(0);
            let mut products = Library::new(part, squares, scratch, alone)?;
            if begins_in_scratch {
                products.swap();
            }
            iteration.iterate(&mut products, &steps, start)?;
            products.finish(home, turned)
        };
        for first in (0..b).step_by(to_usize(group).max(1)) {
            let g = group.min(b - first);
            let mut part_gmn = x_bmn.f_narrow(0, first, g)?;
            let own = [first, first + g].map(to_usize);
            let squares = self.squares.and_then(|all| all.get(own[0]..own[1]));
            let divisor = Divisor { factor, epsilon: self.epsilon, start: scale, squares };
            // The memory of the matrices, in the type of the products.
            let mut inner = part_gmn.f_view_dtype(kind)?;
            if turned {
                let spare = scratch.f_narrow(0, 0, g * m * n)?;
                let (mut divided_gmn, mut turned_gnm) = if begins_in_scratch {
                    (inner.f_alias()?, spare.f_view([g, n, m])?)
                } else {
                    (spare.f_view([g, m, n])?, inner.f_view([g, n, m])?)
                };
                normalize(&part_gmn, &mut divided_gmn, divisor, scratch)?;
                turned_gnm.f_copy_(&divided_gmn.f_transpose(1, 2)?)?;
                inner = inner.f_view([g, n, m])?;
            } else {
                normalize(&part_gmn, &mut inner, divisor, scratch)?;
            }
            if !guarded {
                compute(self, &inner, &mut part_gmn)?;
                continue;
            }
            let last = scratch.numel().saturating_sub(to_usize(g * m * n));
            let last = i64::try_from(last).unwrap_or(0);
            let mut kept_gmn = scratch.f_narrow(0, last, g * m * n)?.f_view([g, m, n])?;
            kept_gmn.f_copy_(&inner)?;
            compute(self, &inner, &mut inner.f_alias()?)?;
            for i in 0..g {
                let mut matrix_1mn = inner.f_narrow(0, i, 1)?;
                let norm = matrix_1mn.f_norm_scalaropt_dtype(2.0, Kind::Double)?.f_double_value(&[])?;
                if exploded(norm, [m, n].map(to_usize)) {
                    matrix_1mn.f_copy_(&kept_gmn.f_narrow(0, i, 1)?)?;
                    compute(&self.standard(), &matrix_1mn, &mut matrix_1mn.f_alias()?)?;
                }
            }
            if kind != part_gmn.f_kind()? {
                part_gmn.f_copy_(&inner)?;
            }
        }
        Ok(())
    }

    fn standard(&self) -> Self {
        Self { restarts: None, ..*self }
    }

    /// Factor of the norm that the matrix is divided by at first, and of the whole divisor.
    fn first_divisor(&self, start: f64) -> (f64, f64) {
        match self.polynomial.preconditioner {
            Preconditioner::Frobenius => (self.polynomial.norm_factor, start),
            Preconditioner::Aol => (self.polynomial.norm_factor, 1.0),
            Preconditioner::Schatten => (1.0, 1.0),
        }
    }

    /// Preconditions a normalized matrix and applies the steps.
    fn iterate(&self, products: &mut impl Products, steps: &[Step], start: f64) -> Result<()> {
        let by = match self.polynomial.preconditioner {
            Preconditioner::Frobenius => None,
            Preconditioner::Aol => {
                products.divide_rows(0, start)?;
                None
            }
            Preconditioner::Schatten => {
                products.gram(0)?;
                products.multiply(1, [0, 0], &[], 1.0)?;
                Some(products.divide(0, 1, self.polynomial.norm_factor * start)?)
            }
        };
        match self.restarts {
            None => iterate(products, steps, by),
            Some(restarts) => iterate_gram(products, steps, restarts, by),
        }
    }
}

/// Tests whether a result of the Gram form is to be computed again. NaN is.
fn exploded(norm: f64, [m, n]: [usize; 2]) -> bool {
    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let bound = GUARD * m.min(n) as f64;
    norm.is_nan() || norm * norm > bound
}
