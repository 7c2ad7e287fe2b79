//! Launches passes over jobs. Jobs with quantized or rounded operands go to the kernels of `quantized.cu`.

use super::device::launch;
use super::driver::Grid;
use super::quantized::{self, QuantizedJob};
use super::table::{FEW, Job, MANY, THREADS, is_wide, job, table};
use crate::error::Result;
use crate::kernels::op::Pass;
use crate::tensor::FlatView;

/// Runs a pass over all jobs.
pub(in crate::kernels) fn run<const N: usize>(pass: &Pass<'_>, jobs: &[[FlatView; N]]) -> Result<()> {
    let (mut wide, mut narrow) = (Vec::new(), Vec::with_capacity(jobs.len()));
    let (mut wide_quantized, mut narrow_quantized) = (Vec::new(), Vec::new());
    for (number, operands) in jobs.iter().enumerate().filter(|(_, operands)| !operands[0].is_empty()) {
        let (job, is_wide) = (job(pass, number, operands)?, !pass.double && is_wide(operands));
        if operands.iter().any(|o| o.is_encoded() || o.dtype().is_quantized()) {
            let list = if is_wide { &mut wide_quantized } else { &mut narrow_quantized };
            list.push(QuantizedJob::new(job, operands)?);
        } else {
            let list = if is_wide { &mut wide } else { &mut narrow };
            list.push(job);
        }
    }
    for jobs in wide.chunks(FEW) {
        launch_table::<FEW>(pass, "wide", jobs)?;
    }
    for jobs in narrow.chunks(MANY) {
        if jobs.len() <= FEW {
            launch_table::<FEW>(pass, "few", jobs)?;
        } else {
            launch_table::<MANY>(pass, "many", jobs)?;
        }
    }
    quantized::run(pass, true, &wide_quantized)?;
    quantized::run(pass, false, &narrow_quantized)
}

fn launch_table<const MOST: usize>(pass: &Pass<'_>, form: &str, jobs: &[Job]) -> Result<()> {
    let (table, blocks) = table::<MOST>(pass, jobs)?;
    let grid = Grid { blocks, threads: THREADS, shared: 0 };
    // SAFETY: the layout is asserted above; the operands are memory of the device, which the session keeps.
    unsafe { launch(&format!("{}_{form}", pass.kernel), grid, &table) }
}
