//! Random numbers, made by the host: they are the same bits on every device.

use tch::Tensor;

use crate::error::Result;
use crate::kernels::cpu::gaussian::gaussian;
use crate::kernels::libtorch::store;
use crate::kernels::ops::normals::Normals;
use crate::kernels::ops::signs::Signs;
use crate::tensor::FlatView;

/// See [`crate::kernels::fill_normals`].
#[allow(clippy::cast_possible_truncation)] // rounded as on the host
pub(in crate::kernels) fn normals(factor: f64, all: &[Normals<'_>]) -> Result<()> {
    for one in all {
        let mut numbers = vec![0.0_f32; one.out.len()];
        gaussian(&mut numbers, one.stream, one.first);
        for x in &mut numbers {
            *x *= factor as f32;
        }
        store(&one.out.view(), &Tensor::f_from_slice(&numbers)?)?;
    }
    Ok(())
}

/// See [`crate::kernels::sign_matrix`].
pub(in crate::kernels) fn signs(
    out: &FlatView,
    shape: [usize; 2],
    stream: [u32; 4],
    first: u64,
) -> Result<()> {
    let mut numbers = vec![0.0_f64; shape[0] * shape[1]];
    Signs::new(shape, stream, first).write(&mut numbers);
    store(out, &Tensor::f_from_slice(&numbers)?)
}
