//! Scalars that are passed to formulas of libtorch in a step. A replay of a captured step repeats what libtorch did, on
//! scalars that kernels write to the device before it.

use super::apply::Apply;
use super::convert::Convert;
use crate::error::Result;
use crate::kernels::backend;
use crate::kernels::cuda;
use crate::kernels::dispatch::{frozen, run_there};
use crate::kernels::libtorch::value::Value::{self, Scalar};
use crate::kernels::libtorch::value::followed_rate;
use crate::kernels::op::{Formula as _, Operation as _};
use crate::tensor::{DType, Device};

/// Has libtorch compute on a device with scalars of the step, each given with true if it is proportional to the learning
/// rate. Everything else that `work` uses must be the same in all steps.
pub(in crate::kernels) fn live(
    device: Device,
    numbers: &[(f64, bool)],
    work: impl FnOnce(&[Value]) -> Result<()>,
) -> Result<()> {
    let count = numbers.len();
    let Some(memory) = cuda::live_numbers(count + 1, || backend::scratch(count + 1, DType::F64, device))?
    else {
        let rate = followed_rate()?;
        let scaled = |(number, per_rate): &(f64, bool)| {
            if *per_rate { Scalar(*number) * &rate } else { Scalar(*number) }
        };
        return frozen(|| work(&numbers.iter().map(scaled).collect::<Vec<_>>()));
    };
    // Kernels compute the scalars from zeros and a 1.
    let one = memory.part(count, 1);
    frozen(|| {
        let _ = memory.tensor(&[count + 1])?.shallow_clone().f_zero_()?;
        let _ = one.tensor(&[1])?.shallow_clone().f_fill_(1.0)?;
        Ok(())
    })?;
    for (at, &(number, per_rate)) in numbers.iter().enumerate() {
        let to = memory.part(at, 1);
        if per_rate {
            let apply = Apply { rate: -number, decay: 0.0, cautious: false, late: false };
            run_there(&apply.call(Apply::KERNEL), &[[to, one]])?;
        } else {
            run_there(&Convert { factor: number }.call(Convert::KERNEL), &[[one, to]])?;
        }
    }
    frozen(|| {
        let all = memory.tensor(&[count + 1])?;
        work(&(0..).take(count).map(|at| all.f_select(0, at).into()).collect::<Vec<_>>())
    })
}
