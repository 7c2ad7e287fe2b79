//! CPU kernels: threads over pieces of slices, vectorised for the instruction set found at run time.

pub(super) mod blocks;
pub(super) mod convert;
pub(super) mod dense;
pub(super) mod fold;
pub(super) mod gaussian;
pub(super) mod isa;
pub(super) mod lanes;
pub(super) mod pack;
pub(super) mod philox;
pub(super) mod product;
pub(super) mod reduce;
pub(super) mod rounding;
pub(super) mod rows;
#[cfg(target_arch = "x86_64")]
pub(super) mod search;

pub(in crate::kernels) use convert::Real;
pub(in crate::kernels) use fold::Fold;
#[cfg(target_arch = "x86_64")]
use isa::Isa;
use philox::philox;

use super::cuda_call::Launch;
use crate::tensor::{DType, Element, FlatView};
use crate::threads;

/// Elements that one task handles.
pub(in crate::kernels) const PIECE: usize = 1 << 16;
/// Elements converted at a time when an operand is not of the arithmetic type; the scratch fits in L1.
pub(in crate::kernels) const TILE: usize = 512;

/// An elementwise operation on `N` operands of equal length.
pub trait Op<const N: usize>: Launch<N> + Sync {
    /// Which operands are written.
    const WRITES: [bool; N];
    /// Whether a job may be handed over in parts of any length.
    const SPLITS: bool = true;

    /// Applies the operation to equally long slices of job `job`.
    fn apply<C: Real>(&self, job: usize, operands: [&mut [C]; N]);
}

struct Piece<const N: usize> {
    job: usize,
    operands: [FlatView; N],
}

/// Elements of a short piece that are worked on before memory of the next piece is asked for: the hardware finds out
/// about a run of memory only after some lines of it. Long runs it finds by itself. As many lines as a core waits for at
/// once: AdamW of 4000 vectors of 768 takes a fifth less time than with 256.
const STRETCH: usize = 64;
/// Elements of a short piece at most.
const SHORT: usize = 1 << 12;

/// Runs `op` over all jobs: each is `N` views of equal length, disjoint from those of the other jobs.
///
/// Arithmetic is float64 for a job with a float64 operand, else float32; other types are converted tile by tile.
pub fn run<const N: usize, O: Op<N>>(op: &O, jobs: &[[FlatView; N]]) {
    let total: usize = jobs.iter().map(|job| job[0].len()).sum();
    if total <= PIECE || threads::get() == 1 {
        for (job, operands) in jobs.iter().enumerate() {
            dispatch(op, &Piece { job, operands: *operands }, jobs.get(job + 1));
        }
        return;
    }
    let pieces = pieces(jobs);
    // Long runs of memory for each thread: finer tasks cost a few percent of the bandwidth on 100 M elements.
    let share = pieces.len().div_ceil(threads::get() * 2).max(1);
    threads::each(pieces.len().div_ceil(share), |task| {
        for at in (task * share..pieces.len()).take(share) {
            dispatch(op, &pieces[at], pieces.get(at + 1).map(|next| &next.operands));
        }
    });
}

/// Cuts jobs into pieces, not through blocks.
fn pieces<const N: usize>(jobs: &[[FlatView; N]]) -> Vec<Piece<N>> {
    let total: usize = jobs.iter().map(|job| job[0].len()).sum();
    let mut pieces = Vec::with_capacity(total / PIECE + jobs.len());
    for (job, operands) in jobs.iter().enumerate() {
        let mut start = 0;
        while start < operands[0].len() {
            let rest = operands.map(|s| s.part(start, s.len()));
            let count = blocks::cut(&rest, PIECE);
            pieces.push(Piece { job, operands: rest.map(|s| s.part(0, count)) });
            start += count;
        }
    }
    pieces
}

/// Runs `op` on one job on the calling thread.
pub(in crate::kernels) fn run_here<const N: usize, O: Op<N>>(op: &O, operands: [FlatView; N]) {
    dispatch(op, &Piece { job: 0, operands }, None);
}

fn dispatch<const N: usize, O: Op<N>>(op: &O, piece: &Piece<N>, next: Option<&[FlatView; N]>) {
    if piece.operands.iter().any(|s| s.dtype() == DType::F64) {
        vectorised::<f64, N, O>(op, piece, next);
    } else {
        vectorised::<f32, N, O>(op, piece, next);
    }
}

/// The best instruction set that may be used.
fn vectorised<C: Real, const N: usize, O: Op<N>>(op: &O, piece: &Piece<N>, next: Option<&[FlatView; N]>) {
    #[cfg(target_arch = "x86_64")]
    {
        let best = isa::best();
        if best >= Isa::Avx512 {
            // SAFETY: the processor has it.
            return unsafe { with_avx512::<C, N, O>(op, piece, next) };
        }
        if best == Isa::Avx2 {
            // SAFETY: the processor has it.
            return unsafe { with_avx2::<C, N, O>(op, piece, next) };
        }
    }
    body::<C, N, O>(op, piece, next);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw")]
fn with_avx512<C: Real, const N: usize, O: Op<N>>(op: &O, piece: &Piece<N>, next: Option<&[FlatView; N]>) {
    body::<C, N, O>(op, piece, next);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2<C: Real, const N: usize, O: Op<N>>(op: &O, piece: &Piece<N>, next: Option<&[FlatView; N]>) {
    body::<C, N, O>(op, piece, next);
}

#[inline(always)]
#[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
fn body<C: Real, const N: usize, O: Op<N>>(op: &O, piece: &Piece<N>, next: Option<&[FlatView; N]>) {
    let Piece { job, operands } = piece;
    if operands.iter().all(|s| s.dtype() == <C as Element>::DTYPE) {
        // SAFETY: `run`'s caller passes disjoint views of live tensors; this task alone has this piece.
        let mut slices = operands.map(|s| unsafe { s.slice::<C>() });
        let len = operands[0].len();
        let Some(next) = next.filter(|_| O::SPLITS && len <= SHORT) else { return op.apply(*job, slices) };
        for start in (0..len).step_by(STRETCH) {
            for flat in next {
                flat.prefetch(start, STRETCH);
            }
            let end = len.min(start + STRETCH);
            op.apply(*job, slices.each_mut().map(|s| &mut s[start..end]));
        }
        return;
    }
    let mut scratch = [[C::default(); TILE]; N];
    let len = operands[0].len();
    let mut start = 0;
    while start < len {
        let rest = operands.map(|s| s.part(start, len));
        let tile = rest.map(|s| s.part(0, blocks::cut(&rest, TILE)));
        let n = tile[0].len();
        start += n;
        for (flat, buffer) in tile.iter().zip(scratch.iter_mut()) {
            if flat.dtype() != <C as Element>::DTYPE {
                convert::load(flat, &mut buffer[..n]);
            }
        }
        let mut slices = scratch.each_mut().map(|buffer| &mut buffer[..n]);
        for (slice, flat) in slices.iter_mut().zip(&tile) {
            if flat.dtype() == <C as Element>::DTYPE {
                // SAFETY: as above.
                *slice = unsafe { flat.slice::<C>() };
            }
        }
        op.apply(*job, slices);
        for ((flat, buffer), written) in tile.iter().zip(scratch.iter()).zip(O::WRITES) {
            if written && flat.dtype() != <C as Element>::DTYPE {
                convert::store(&buffer[..n], flat);
            }
        }
    }
}
