//! Launches the kernel of `normals.cu`.

use super::Normals;
use crate::error::Result;
use crate::kernels::cuda::lines::{Job, launch_lines};
use crate::kernels::cuda::table::number_of;
use crate::tensor::to_i64;

/// Normal numbers of a block.
const NUMBERS: usize = 4096;

/// As `normals.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct NormalJob {
    out: usize,
    stream: [u32; 4],
    first: u64,
    count: i64,
    end: u32,
    kind: u8,
}

const _: () = assert!(size_of::<NormalJob>() == 48);

impl Job for NormalJob {
    fn end(&mut self) -> &mut u32 {
        &mut self.end
    }
}

/// See [`crate::kernels::fill_normals`].
#[allow(clippy::cast_possible_truncation)] // rounded as on the host
pub(in crate::kernels) fn normals(factor: f64, all: &[Normals]) -> Result<()> {
    let jobs = all.iter().map(|one| {
        let (out, kind) = (one.out.device_address()?, number_of(one.out.dtype()));
        let length = one.out.len();
        // What begins or ends inside of a block of the generator.
        let blocks = if length == 0 { 0 } else { (length + 6).div_ceil(NUMBERS) };
        let (stream, first, count) = (one.stream, one.first, to_i64(length)?);
        Ok((NormalJob { out, stream, first, count, end: 0, kind }, blocks))
    });
    // SAFETY: the layout is asserted above; what is written is memory of the device, which the session keeps.
    unsafe { launch_lines("fill_normals", factor as f32, jobs) }
}
