//! CPU kernels: threads over pieces of slices, vectorised for the instruction set found at run time.

pub(super) mod blocks;
pub(super) mod convert;
pub(super) mod each;
pub(super) mod fold;
pub(super) mod gaussian;
pub(super) mod isa;
pub(super) mod lanes;
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) mod lookup;
pub(super) mod master;
pub(super) mod minifloat;
pub(super) mod pack;
pub(super) mod philox;
pub(super) mod product;
pub(super) mod reduce;
pub(super) mod rounding;
pub(super) mod rows;

pub(in crate::kernels) use isa::Real;
use philox::philox;

use super::op::Pass;
pub(in crate::kernels) use super::op::Slot;
use crate::tensor::{DType, Device, Element, FlatView, FlatViewMut};
use crate::threads;

/// Elements that one task handles.
pub(in crate::kernels) const PIECE: usize = 1 << 16;
/// Elements converted at a time when an operand is not of the arithmetic type; the scratch fits in L1.
pub(in crate::kernels) const TILE: usize = 512;

/// One piece of work of a pass: operands of equal length, split into those that are only read and those that are written. An
/// operand that is both read and written counts as written.
#[derive(Debug)]
pub struct Job<'a, const R: usize, const W: usize> {
    /// Operands that are only read; jobs may share them.
    pub read: [FlatView<'a>; R],
    /// Operands that are written.
    pub write: [FlatViewMut<'a>; W],
}

impl<const R: usize, const W: usize> Job<'_, R, W> {
    /// Elements of each operand.
    #[must_use]
    pub fn len(&self) -> usize {
        let read = self.read.first().map(FlatView::len);
        read.or(self.write.first().map(FlatViewMut::len)).unwrap_or(0)
    }

    /// Tests whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The types of all operands.
    pub(in crate::kernels) fn dtypes(&self) -> impl Iterator<Item = DType> {
        self.read.iter().map(FlatView::dtype).chain(self.write.iter().map(FlatViewMut::dtype))
    }

    /// The devices of all operands.
    pub(in crate::kernels) fn devices(&self) -> impl Iterator<Item = Device> {
        self.read.iter().map(FlatView::device).chain(self.write.iter().map(FlatViewMut::device))
    }

    /// Reborrows with a shorter lifetime.
    pub(in crate::kernels) fn reborrow(&mut self) -> Job<'_, R, W> {
        Job { read: self.read, write: self.write.each_mut().map(FlatViewMut::reborrow) }
    }

    /// Takes the first `count` elements of each operand off.
    fn take_first(&mut self, count: usize) -> Self {
        let read = self.read.map(|x| x.part(0, count));
        self.read = self.read.map(|x| x.part(count, x.len()));
        Self { read, write: self.write.each_mut().map(|x| x.take_first(count)) }
    }

    /// The operands in the order of a device's kernel, which takes addresses.
    pub(in crate::kernels) fn ordered<const N: usize>(&mut self, order: [Slot; N]) -> [FlatView<'_>; N] {
        let Self { read, write } = &*self;
        order.map(|operand| match operand {
            Slot::Read(at) => read[at],
            Slot::Write(at) => write[at].view(),
        })
    }

    fn prefetch(&self, start: usize, len: usize) {
        self.read.iter().for_each(|x| x.prefetch(start, len));
        self.write.iter().for_each(|x| x.prefetch(start, len));
    }

    /// Number of elements from the first one on that may be handled at a time, `most` if that splits no blocks.
    fn whole_blocks(&self, most: usize) -> usize {
        let read = self.read.iter().find_map(|x| blocks::cut(x, most));
        read.or_else(|| self.write.iter().find_map(|x| blocks::cut(&x.view(), most))).unwrap_or(most)
    }
}

/// An elementwise operation on `N` operands of equal length (`R` read, `W` written).
pub trait Op<const N: usize, const R: usize, const W: usize>: Sync {
    /// The order in which kernels of devices take the operands.
    const ORDER: [Slot; N];
    /// True if a job may be handed over in parts of any length.
    const SPLITS: bool = true;
    /// Numbers that all elements of a job have in common.
    type Constants<C: Real>;

    /// Computes the constants of a job.
    fn constants<C: Real>(&self, job: usize) -> Self::Constants<C>;

    /// Applies the operation to equally long slices.
    fn apply<C: Real>(&self, constants: &Self::Constants<C>, read: [&[C]; R], write: [&mut [C]; W]);

    /// Call of the operation on CUDA devices; none where there is no kernel of it.
    fn on_cuda(&self) -> Option<Pass<'_>> {
        None
    }
}

/// A part of a job, with its number.
pub(in crate::kernels) struct Piece<'a, const R: usize, const W: usize> {
    pub(in crate::kernels) number: usize,
    pub(in crate::kernels) job: Job<'a, R, W>,
}

/// Elements of a short piece that are worked on before memory of the next piece is asked for: the hardware finds out
/// about a run of memory only after some lines of it. Long runs it finds by itself. As many lines as a core waits for at
/// once: AdamW of 4000 vectors of 768 takes a fifth less time than with 256.
const STRETCH: usize = 64;
/// Elements of a short piece at most.
const SHORT: usize = 1 << 12;

/// Runs `op` over all jobs.
///
/// Arithmetic is float64 for a job with a float64 operand, else float32; other types are converted tile by tile.
pub fn run<const N: usize, const R: usize, const W: usize, O: Op<N, R, W>>(
    op: &O,
    jobs: &mut [Job<'_, R, W>],
) {
    let total: usize = jobs.iter().map(Job::len).sum();
    if total <= PIECE || threads::get() == 1 {
        let (mut number, mut rest) = (0, jobs);
        while let Some((job, later)) = rest.split_first_mut() {
            dispatch(op, number, job, later.first());
            (number, rest) = (number + 1, later);
        }
        return;
    }
    let mut pieces = pieces(jobs);
    // Long runs of memory for each thread: finer tasks cost a few percent of the bandwidth on 100 M elements.
    let share = pieces.len().div_ceil(threads::get() * 2).max(1);
    threads::chunks(&mut pieces, share, |_, mut rest| {
        while let Some((piece, later)) = rest.split_first_mut() {
            dispatch(op, piece.number, &mut piece.job, later.first().map(|next| &next.job));
            rest = later;
        }
    });
}

/// Cuts jobs into pieces, not through blocks.
pub(in crate::kernels) fn pieces<'a, const R: usize, const W: usize>(
    jobs: &'a mut [Job<'_, R, W>],
) -> Vec<Piece<'a, R, W>> {
    let total: usize = jobs.iter().map(Job::len).sum();
    let mut pieces = Vec::with_capacity(total / PIECE + jobs.len());
    for (number, job) in jobs.iter_mut().enumerate() {
        let mut rest = job.reborrow();
        while !rest.is_empty() {
            let count = rest.whole_blocks(PIECE);
            pieces.push(Piece { number, job: rest.take_first(count) });
        }
    }
    pieces
}

/// Runs `op` on one job on the calling thread.
pub(in crate::kernels) fn run_here<const N: usize, const R: usize, const W: usize, O: Op<N, R, W>>(
    op: &O,
    mut job: Job<'_, R, W>,
) {
    dispatch(op, 0, &mut job, None);
}

fn dispatch<'a, const N: usize, const R: usize, const W: usize, O: Op<N, R, W>>(
    op: &O,
    number: usize,
    job: &mut Job<'a, R, W>,
    next: Option<&Job<'a, R, W>>,
) {
    let is_wide = job.dtypes().any(|dtype| dtype == DType::F64);
    let call = (op, Call::<N, R, W> { number, job, next });
    if is_wide { isa::vectorised::<f64, _>(call) } else { isa::vectorised::<f32, _>(call) }
}

/// A job with its number and the one after it.
struct Call<'c, 'a, const N: usize, const R: usize, const W: usize> {
    number: usize,
    job: &'c mut Job<'a, R, W>,
    next: Option<&'c Job<'a, R, W>>,
}

impl<const N: usize, const R: usize, const W: usize, O: Op<N, R, W>> isa::Work
    for (&O, Call<'_, '_, N, R, W>)
{
    type Out = ();

    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    fn run<C: Real>(self) {
        let (op, Call { number, job, next }) = self;
        body::<C, N, R, W, O>(op, number, job, next);
    }
}

#[inline(always)]
#[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
fn body<C: Real, const N: usize, const R: usize, const W: usize, O: Op<N, R, W>>(
    op: &O,
    number: usize,
    job: &mut Job<'_, R, W>,
    next: Option<&Job<'_, R, W>>,
) {
    let len = job.len();
    let constants = op.constants::<C>(number);
    if job.dtypes().all(|dtype| dtype == <C as Element>::DTYPE) {
        let read = job.read.map(|x| x.slice::<C>());
        let mut write = job.write.each_mut().map(FlatViewMut::slice_mut::<C>);
        let Some(next) = next.filter(|_| O::SPLITS && len <= SHORT) else {
            return op.apply(&constants, read, write);
        };
        for start in (0..len).step_by(STRETCH) {
            next.prefetch(start, STRETCH);
            let end = len.min(start + STRETCH);
            let write = write.each_mut().map(|x| &mut x[start..end]);
            op.apply(&constants, read.map(|x| &x[start..end]), write);
        }
        return;
    }
    let (mut reads, mut writes) = ([[C::default(); TILE]; R], [[C::default(); TILE]; W]);
    let mut rest = job.reborrow();
    while !rest.is_empty() {
        let count = rest.whole_blocks(TILE);
        let Job { read, mut write } = rest.take_first(count);
        let n = read.first().map_or_else(|| write.first().map_or(0, FlatViewMut::len), FlatView::len);
        let mut buffers = reads.iter_mut();
        let read = read.map(|x| match buffers.next() {
            Some(buffer) if x.dtype() != <C as Element>::DTYPE => {
                convert::load(&x, &mut buffer[..n]);
                &buffer[..n]
            }
            _ => x.slice::<C>(),
        });
        let mut buffers = writes.iter_mut();
        let slices = write.each_mut().map(|x| match buffers.next() {
            Some(buffer) if x.dtype() != <C as Element>::DTYPE => {
                convert::load(&x.view(), &mut buffer[..n]);
                &mut buffer[..n]
            }
            _ => x.slice_mut::<C>(),
        });
        op.apply(&constants, read, slices);
        for (x, buffer) in write.iter_mut().zip(&writes) {
            if x.dtype() != <C as Element>::DTYPE {
                convert::store(&buffer[..n], x);
            }
        }
    }
}
