//! Normalization by neuron: the kernels of `neurons.cu`.

use crate::error::Result;
use crate::kernels::cuda::lines::{self, Job, Matrix, Numbers, launch_lines};
use crate::kernels::cuda::table::{number_of, to_i32};
use crate::kernels::ops::neurons::Neurons;
use crate::tensor::to_i64;

/// Neurons that share a norm from which a block sums them up, not a warp.
const LARGE: usize = 33;

/// As `neurons.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct NeuronJob {
    update: usize,
    variance: usize,
    squares: usize,
    totals: usize,
    chosen: Numbers,
    stride: i64,
    variance_stride: i64,
    rows: i32,
    across: i32,
    length: i32,
    group: i32,
    groups: i32,
    end: u32,
    kind: u8,
    variance_kind: u8,
}

const _: () = assert!(size_of::<NeuronJob>() == 96);

impl Job for NeuronJob {
    fn end(&mut self) -> &mut u32 {
        &mut self.end
    }
}

/// Launches one of the kernels; `mean` is β₂ and the length of a whole neuron.
pub(in crate::kernels) fn neurons(kernel: &'static str, mean: [f64; 2], all: &[Neurons]) -> Result<()> {
    let jobs = all.iter().map(|one| {
        let ([rows, _], [_, across]) = (one.u.shape(), one.variance.shape());
        let (groups, group) = (one.totals.len() / 2, one.group.max(1));
        let blocks = if kernel == "neuron_variance" {
            lines::teams(groups, group >= LARGE)
        } else {
            lines::blocks_of(rows * across, one.length)
        };
        let u = Matrix::of(&one.u.view())?;
        let (variance, variance_stride) = one.variance.view().strided();
        let job = NeuronJob {
            update: u.start,
            variance: variance.device_address()?,
            squares: one.squares.device_address()?,
            totals: one.totals.device_address()?,
            chosen: Numbers::of(one.chosen.map(|chosen| (chosen.numbers, chosen.first)))?,
            stride: u.stride,
            variance_stride: to_i64(variance_stride)?,
            rows: u.rows,
            across: to_i32(across)?,
            length: to_i32(one.length)?,
            group: to_i32(group)?,
            groups: to_i32(groups)?,
            end: 0,
            kind: u.kind,
            variance_kind: number_of(variance.dtype()),
        };
        Ok((job, blocks))
    });
    // SAFETY: the layout is asserted above, `mean` is `NeuronMean`; the operands are memory of the device, which the
    // session keeps.
    unsafe { launch_lines(kernel, mean, jobs) }
}
