//! What passes of devices do with operands that are more than numbers of their type, where no kernel heeds that: they work
//! on numbers in memory of their own, decoded before and encoded or rounded after.

#![cfg_attr(not(feature = "cuda"), allow(dead_code))] // for devices

use std::ops::Range;

use tch::Tensor;

use crate::error::Result;
use crate::kernels::cpu::rows::{RowPass, Stack, rows as rows_on_cpu};
use crate::kernels::cuda_call::RowPassCall;
use crate::kernels::dispatch::{common, no_kernel};
use crate::kernels::ops::convert::Convert;
use crate::tensor::{DType, Device, FlatView, MatrixView};

/// Elements for which there is memory at once, if not one operand has more.
const AT_ONCE: usize = 1 << 24;

/// Operands in memory of their own.
#[derive(Debug, Default)]
pub(super) struct Decoded {
    memory: Vec<Tensor>,
    /// Runs where they are stored, and their numbers.
    read: Vec<[FlatView; 2]>,
    written: Vec<[FlatView; 2]>,
}

impl Decoded {
    /// Where the numbers of an operand are, which the pass may write: in memory of their own, in the type of the arithmetic,
    /// where the operand has an encoding.
    pub(super) fn operand(&mut self, x: MatrixView, wide: bool, is_written: bool) -> Result<MatrixView> {
        let ([rows, cols], (flat, _)) = (x.shape(), x.strided());
        if !flat.is_encoded() {
            return Ok(x);
        }
        if rows * cols == 0 {
            return Ok(FlatView::EMPTY.at(flat.device()).area(0, [rows, cols], cols));
        }
        let dtype = if wide { DType::F64 } else { DType::F32 };
        let (memory, numbers) = crate::kernels::cuda::scratch(rows * cols, dtype, flat.device())?;
        self.memory.push(memory);
        let mut start = 0;
        for stored in x.runs() {
            let pair = [stored, numbers.part(start, stored.len())];
            start += stored.len();
            self.read.push(pair);
            if is_written {
                self.written.push(pair);
            }
        }
        Ok(numbers.area(0, [rows, cols], cols))
    }

    /// Does the work between decoding and encoding.
    fn around(&self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let convert = Convert { factor: 1.0 };
        crate::kernels::run(&convert, &self.read)?;
        work()?;
        let back: Vec<_> = self.written.iter().map(|&[stored, numbers]| [numbers, stored]).collect();
        crate::kernels::run(&convert, &back)
    }
}

/// Does a pass over jobs, as many at once as there is memory for, with the operands that `stage` puts aside. `encoded` says
/// how many elements of a job those have; `work` gets which jobs it does, and them.
pub(super) fn decoded<T>(
    jobs: &[T],
    encoded: impl Fn(&T) -> usize,
    stage: impl Fn(&mut Decoded, &T) -> Result<T>,
    work: impl Fn(Range<usize>, &[T]) -> Result<()>,
) -> Result<()> {
    for range in ranges(jobs.iter().map(encoded)) {
        let mut decoded = Decoded::default();
        let part =
            jobs[range.clone()].iter().map(|job| stage(&mut decoded, job)).collect::<Result<Vec<_>>>()?;
        decoded.around(|| work(range, &part))?;
    }
    Ok(())
}

/// The elements of an operand that is more than numbers of its type; of another one none.
pub(super) fn encoded_elements(x: &MatrixView) -> usize {
    let [rows, cols] = x.shape();
    if x.strided().0.is_encoded() { rows * cols } else { 0 }
}

/// Runs a pass over the rows of all jobs, and writes its sums where they say.
///
/// # Errors
/// As [`crate::kernels::run`].
pub fn rows<const N: usize, P: RowPass<N>>(pass: &P, jobs: &[Stack<N>]) -> Result<()> {
    match common(jobs.iter().flat_map(|stack| &stack.operands))? {
        Device::Cpu => {
            rows_on_cpu(pass, jobs);
            Ok(())
        }
        Device::Cuda(_) => rows_decoded::<N, P>(&pass.on_cuda().ok_or_else(no_kernel::<P>)?, jobs),
    }
}

/// The pass on a device, on numbers of operands that are encoded.
fn rows_decoded<const N: usize, P: RowPass<N>>(call: &RowPassCall<'_>, jobs: &[Stack<N>]) -> Result<()> {
    decoded(
        jobs,
        |stack| stack.operands.iter().filter(|o| o.is_encoded()).map(FlatView::len).sum(),
        |decoded, stack| {
            let wide = stack.operands.iter().any(|o| o.dtype() == DType::F64);
            let mut operands = stack.operands;
            for (operand, is_written) in operands.iter_mut().zip(P::WRITES) {
                let len = operand.len();
                *operand = decoded.operand(operand.area(0, [1, len], len), wide, is_written)?.all();
            }
            Ok(Stack { operands, ..*stack })
        },
        |range, part| crate::kernels::cuda::rows(&call.of(range), part),
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
