//! Decoding for passes of devices with operands that are more than numbers of their type, where no kernel heeds that:
//! they work on numbers in memory of their own, decoded before and encoded or rounded after.
//!
//! These are the passes over rows and columns (Adafactor, CAME), slices (Dion2) and channels (APOLLO).

#![cfg_attr(not(feature = "cuda"), allow(dead_code))] // for devices

use std::ops::Range;

use tch::Tensor;

use crate::error::Result;
use crate::kernels::cpu::Job;
use crate::kernels::cpu::rows::{RowPass, Stack, rows as rows_on_cpu};
use crate::kernels::dispatch::{common, no_kernel};
use crate::kernels::libtorch::on_device;
use crate::kernels::op::RowPassCall;
use crate::kernels::ops::convert::Convert;
use crate::tensor::{DType, Device, FlatView, FlatViewMut, MatrixView, MatrixViewMut};

/// Elements for which there is memory at once, if not one operand has more: 67 MB in float32.
const AT_ONCE: usize = 1 << 24;

/// Operands in memory of their own.
#[derive(Debug, Default)]
pub(super) struct Decoded<'a> {
    memory: Vec<Tensor>,
    /// Runs where they are stored and only read, and where their numbers go.
    read: Vec<Job<'a, 1, 1>>,
    /// Runs where they are stored and written, and their numbers.
    written: Vec<[FlatViewMut<'a>; 2]>,
}

impl<'a> Decoded<'a> {
    /// Memory for the numbers of an operand, in the type of the arithmetic.
    fn room(&mut self, elements: usize, wide: bool, device: Device) -> Result<FlatViewMut<'a>> {
        let dtype = if wide { DType::F64 } else { DType::F32 };
        let (memory, numbers) = crate::kernels::backend::scratch_mut(elements, dtype, device)?;
        self.memory.push(memory);
        Ok(numbers)
    }

    /// View of the numbers of an operand that the pass reads: in memory of their own where they are not stored as such.
    pub(super) fn read(&mut self, x: MatrixView<'a>, wide: bool) -> Result<MatrixView<'a>> {
        let ([rows, cols], x) = (x.shape(), x.to_read());
        if !x.is_encoded() {
            return Ok(x);
        }
        if rows * cols == 0 {
            return Ok(FlatView::EMPTY.on(x.device()).matrix(0, [rows, cols], cols));
        }
        let numbers = self.room(rows * cols, wide, x.device())?;
        let mut rest = numbers.for_kernels();
        let all = numbers.into_view();
        for stored in x.runs() {
            let to = rest.take_first(stored.len());
            self.read.push(Job { read: [stored], write: [to] });
        }
        Ok(all.matrix(0, [rows, cols], cols))
    }

    /// Puts an operand that the pass writes, where it has an encoding, into memory of its own.
    pub(super) fn written(&mut self, wide: bool, x: &mut MatrixViewMut<'a>) -> Result<()> {
        let ([rows, cols], device) = (x.shape(), x.device());
        if !x.is_encoded() {
            return Ok(());
        }
        let stored = std::mem::replace(x, MatrixViewMut::EMPTY);
        if rows * cols == 0 {
            *x = FlatViewMut::EMPTY.on(device).into_matrix(0, [rows, cols], cols);
            return Ok(());
        }
        let numbers = self.room(rows * cols, wide, device)?;
        let mut rest = numbers.for_kernels();
        for stored in stored.into_runs() {
            let numbers = rest.take_first(stored.len());
            self.written.push([stored, numbers]);
        }
        *x = numbers.into_matrix(0, [rows, cols], cols);
        Ok(())
    }

    /// Does the work between decoding and encoding.
    fn around(&mut self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let convert = Convert { factor: 1.0 };
        let written = self.written.iter_mut();
        let decode =
            written.map(|[stored, numbers]| Job { read: [stored.view()], write: [numbers.reborrow()] });
        let mut jobs: Vec<_> = self.read.iter_mut().map(Job::reborrow).chain(decode).collect();
        crate::kernels::run(&convert, &mut jobs)?;
        work()?;
        let written = self.written.iter_mut();
        let encode =
            written.map(|[stored, numbers]| Job { read: [numbers.view()], write: [stored.reborrow()] });
        crate::kernels::run(&convert, &mut encode.collect::<Vec<_>>())
    }
}

/// Does a pass over jobs, as many at once as there is memory for, with the operands that `stage` puts aside. `encoded` says
/// how many elements of a job those have; `work` gets which jobs it does, and them.
pub(super) fn decoded<'a, T>(
    jobs: &mut [T],
    encoded: impl Fn(&T) -> usize,
    stage: impl Fn(&mut Decoded<'a>, &mut T) -> Result<()>,
    work: impl Fn(Range<usize>, &mut [T]) -> Result<()>,
) -> Result<()> {
    for range in ranges(jobs.iter().map(encoded)) {
        let mut decoded = Decoded::default();
        let part = &mut jobs[range.clone()];
        part.iter_mut().try_for_each(|job| stage(&mut decoded, job))?;
        decoded.around(|| work(range, part))?;
    }
    Ok(())
}

/// The elements of an operand that is more than numbers of its type when it is written; of another one none.
pub(super) fn encoded_elements(x: &MatrixView<'_>) -> usize {
    let [rows, cols] = x.shape();
    if x.is_encoded() { rows * cols } else { 0 }
}

/// Runs a pass over the rows of all jobs, and writes its sums where they say.
///
/// # Errors
/// As [`crate::kernels::run`].
pub fn rows<const N: usize, const R: usize, const W: usize, P: RowPass<N, R, W>>(
    pass: &P,
    jobs: &mut [Stack<'_, R, W>],
) -> Result<()> {
    match common(jobs.iter().flat_map(|stack| stack.operands.devices()))? {
        Device::Cpu => {
            rows_on_cpu(pass, jobs);
            Ok(())
        }
        Device::Cuda(_) => rows_decoded::<N, R, W, P>(&pass.on_cuda().ok_or_else(no_kernel::<P>)?, jobs),
    }
}

/// The pass on a device, on numbers of operands that are encoded.
fn rows_decoded<const N: usize, const R: usize, const W: usize, P: RowPass<N, R, W>>(
    call: &RowPassCall<'_>,
    jobs: &mut [Stack<'_, R, W>],
) -> Result<()> {
    let encoded = |stack: &Stack<'_, R, W>| {
        let Job { read, write } = &stack.operands;
        let read = read.iter().filter(|x| x.is_encoded()).map(FlatView::len);
        read.chain(write.iter().filter(|x| x.is_encoded()).map(FlatViewMut::len)).sum()
    };
    decoded(
        jobs,
        encoded,
        |decoded, stack| {
            let wide = stack.operands.dtypes().any(|dtype| dtype == DType::F64);
            for x in &mut stack.operands.read {
                let len = x.len();
                *x = decoded.read(x.matrix(0, [1, len], len), wide)?.all();
            }
            for x in &mut stack.operands.write {
                let len = x.len();
                let mut matrix = std::mem::replace(x, FlatViewMut::EMPTY).into_matrix(0, [1, len], len);
                decoded.written(wide, &mut matrix)?;
                *x = matrix.into_all();
            }
            Ok(())
        },
        |range, part| {
            on_device!(
                &["rows.cu", "totals.cu"];
                crate::kernels::cuda::rows(&call.of(range), part, P::ORDER),
                else crate::kernels::libtorch::rows(&call.of(range), part, P::ORDER)
            )
        },
    )
}

/// Jobs, by the elements that have to be decoded of each, in ranges that there is memory for at once.
fn ranges(decoded: impl IntoIterator<Item = usize>) -> Vec<Range<usize>> {
    let (mut ranges, mut start, mut sum, mut end) = (Vec::new(), 0, 0, 0);
    for elements in decoded {
        if sum + elements > AT_ONCE && end > start {
            ranges.push(start..end);
            (start, sum) = (end, 0);
        }
        (sum, end) = (sum + elements, end + 1);
    }
    if end > start {
        ranges.push(start..end);
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_hold_all_jobs_within_the_bound_where_one_is() {
        assert!(ranges([]).is_empty());
        assert_eq!(ranges([0, 0, 5]), vec![0..3; 1]);
        assert_eq!(ranges([AT_ONCE, 1, AT_ONCE - 1, 1]), [0..1, 1..3, 3..4]);
        assert_eq!(ranges([3 * AT_ONCE, 3 * AT_ONCE, 0, 1]), [0..1, 1..2, 2..4]);
    }
}
