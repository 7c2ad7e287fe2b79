//! Rows made orthogonal by rotations, in float64. What a sweep has turned stays on the device, where the next one reads it.

use crate::error::Result;
use crate::kernels::cuda::device::{launch, scratch};
use crate::kernels::cuda::driver::Grid;
use crate::kernels::cuda::table::to_i32;
use crate::tensor::{DType, FlatView};

/// Bytes of shared memory of a block.
pub(in crate::kernels) const SHARED: u32 = 84488;
/// Rows that are turned together.
const PAIR: usize = 64;
const THREADS: u32 = 256;
/// Bytes of shared memory of a launch that turns rows.
const TURNED: u32 = 66560;
/// Sweeps of a matrix at most. Rows that fall in size, of matrices of up to 320 and condition numbers of up to 1e12, took 6.
const SWEEPS: usize = 12;
/// Products of rows are zero up to this share of the longer row and of the whole matrix.
const TOLERANCE: f64 = 32.0 * f64::EPSILON;

/// As `jacobi.cu` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Jacobi {
    w: usize,
    j: usize,
    turns: usize,
    is_turned: usize,
    moved: usize,
    norms: usize,
    tolerance: f64,
    size: i32,
    sweep: i32,
    round: i32,
    sweeps: i32,
}

const _: () = assert!(size_of::<Jacobi>() == 72);

/// See [`crate::kernels::orthogonal_rows`].
pub(in crate::kernels) fn orthogonal_rows(
    w: &FlatView,
    j: &FlatView,
    norms: &FlatView,
    [count, size]: [usize; 2],
) -> Result<()> {
    let pairs = size / PAIR;
    if count * pairs == 0 {
        return Ok(());
    }
    let room = |elements: usize| scratch(elements, DType::F64, w.device());
    let (_turns_memory, turns) = room(count * pairs * PAIR * PAIR)?;
    let (_is_turned_memory, is_turned) = room(count * pairs)?;
    let (mut moved_memory, moved) = room(count * SWEEPS)?;
    let _ = moved_memory.f_zero_()?;
    let jacobi = Jacobi {
        w: w.device_address()?,
        j: j.device_address()?,
        turns: turns.device_address()?,
        is_turned: is_turned.device_address()?,
        moved: moved.device_address()?,
        norms: norms.device_address()?,
        tolerance: TOLERANCE,
        size: to_i32(size)?,
        sweep: 0,
        round: 0,
        sweeps: to_i32(SWEEPS)?,
    };
    for sweep in 0..SWEEPS {
        for round in 0..2 * pairs - 1 {
            let now = Jacobi { sweep: to_i32(sweep)?, round: to_i32(round)?, ..jacobi };
            // SAFETY: the layout is asserted above; matrices and scratch are memory of the device, which torch's allocator
            // gives to others only after what is on the stream.
            unsafe {
                launch("jacobi_angles", Grid::of(count * pairs, THREADS, SHARED)?, &now)?;
                launch("jacobi_turn", Grid::of(count * pairs * 2 * pairs, THREADS, TURNED)?, &now)?;
            }
        }
    }
    // SAFETY: the layout is asserted above; matrices and scratch are memory of the device, which torch's allocator
    // gives to others only after what is on the stream.
    unsafe { launch("jacobi_end", Grid::of(count * size, THREADS, 0)?, &jacobi) }
}
