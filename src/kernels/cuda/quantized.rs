//! Tables of jobs for `quantized.cu`: passes over block-quantized values, stochastically rounded numbers, and weights in two
//! halves.

use super::device::launch;
use super::driver::Grid;
use super::table::{FEW, Job, MOST_OPERANDS, PIECE, Scalars, add_pieces};
use crate::error::{Error, Result};
use crate::kernels::op::Pass;
use crate::tensor::{Blocks, Encoding, FlatView, MOST_SPANS, Rounding};

const THREADS: u32 = 128;
const WARPS: usize = THREADS as usize / 32;
/// Jobs of one launch.
const MANY: usize = 96;
/// Elements that are worked on together where there are no blocks.
const STRETCH: usize = 256;
/// Elements of a block for each thread that works on it.
const SHARE: usize = 8;
/// Number of weights in two halves in `jobs.cuh`.
const MASTER: u8 = 6;

/// As `rounding.cuh` lays it out: size, start and length.
type Span = [i64; 3];

/// As `rounding.cuh` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RandomBits {
    key: u32,
    spans: i32,
    first: i64,
    span: [Span; MOST_SPANS],
}

/// Has the layout of the CUDA struct `QuantizedJob`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct QuantizedJob {
    plain: Job,
    scales: [usize; MOST_OPERANDS],
    width: i64,
    blocks: u32,
    in_row: u32,
    before: u32,
    share: u32,
    block: u32,
    lanes: u32,
    tag: [u32; MOST_OPERANDS],
    random: u32,
    rounding: RandomBits,
}

/// Has the layout of the CUDA struct `QuantizedJobs`.
#[repr(C)]
#[derive(Debug)]
struct QuantizedJobs<const MOST: usize> {
    scalars: Scalars,
    count: i32,
    job: [QuantizedJob; MOST],
}

const _: () = {
    assert!(size_of::<RandomBits>() == 112 && size_of::<QuantizedJob>() == size_of::<Job>() + 208);
    assert!(size_of::<QuantizedSumJobs<MANY>>() <= 32764);
};

fn narrow<T, U: TryFrom<T>>(x: T) -> Result<U> {
    U::try_from(x).map_err(|_| Error::Internal("too many elements for one job".into()))
}

/// Division of the elements of a job into blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    width: usize,
    block: usize,
    /// Offset of the job's first element in the tensor.
    first: usize,
}

impl Cut {
    /// Blocks of a row.
    fn in_row(&self) -> usize {
        self.width.div_ceil(self.block)
    }

    /// The number of the job's first block, and how many blocks it has.
    fn blocks(&self, length: usize) -> Result<(usize, usize)> {
        let number = |at: usize| at / self.width * self.in_row() + at % self.width / self.block;
        let is_end =
            |at: usize| at.is_multiple_of(self.width) || (at % self.width).is_multiple_of(self.block);
        if self.width == 0 || !is_end(self.first) || !is_end(self.first + length) {
            return Err(Error::Internal("a pass over a part of a block".into()));
        }
        Ok((number(self.first), number(self.first + length - 1) + 1 - number(self.first)))
    }
}

impl RandomBits {
    /// Of `length` elements from number `first` on.
    fn of(rounding: &Rounding, first: usize, length: usize) -> Result<Self> {
        let (start, spans, end) = rounding.places.piece(first);
        if spans.len() > MOST_SPANS {
            return Err(Error::Internal(format!("a tensor that is cut in {} dimensions", spans.len())));
        }
        if end.is_some_and(|end| first + length > end) {
            return Err(Error::Internal("a pass over more than one matrix of a state".into()));
        }
        let mut bits = Self { key: rounding.key[0], first: narrow(first - start)?, ..Self::default() };
        // A single number has no dimensions.
        for (to, &(size, start, length)) in bits.span.iter_mut().zip(spans.iter().chain([&(1, 0, 1)])) {
            *to = [narrow(size)?, narrow(start)?, narrow(length)?];
        }
        bits.spans = narrow(spans.len().max(1))?;
        Ok(bits)
    }
}

impl QuantizedJob {
    /// A job with the forms of its operands.
    pub(super) fn new<const N: usize>(plain: Job, operands: &[FlatView; N]) -> Result<Self> {
        let mut job = Self { plain, ..Self::default() };
        let (mut cut, length) = (None, operands[0].len());
        let mut scales: [Option<&Blocks>; N] = [None; N];
        for (at, flat) in operands.iter().enumerate() {
            match flat.encoding() {
                Some((Encoding::Blocks(blocks), first)) => {
                    let own = Cut { width: blocks.width, block: blocks.block, first };
                    if *cut.get_or_insert(own) != own {
                        return Err(Error::Internal("operands of a pass in different blocks".into()));
                    }
                    scales[at] = Some(blocks);
                    if let Some(rounding) = &blocks.rounding {
                        job.round(at, rounding, first, length)?;
                    }
                }
                Some((Encoding::Rounding(rounding), first)) => job.round(at, rounding, first, length)?,
                Some((Encoding::Master(_), _)) => {
                    job.plain.kind[at] = MASTER;
                    job.scales[at] = flat.remainders().map_or(0, |low| low.encoded_address());
                }
                None if flat.dtype().is_quantized() => {
                    return Err(Error::Internal("a pass over quantized values without scales".into()));
                }
                None => {}
            }
        }
        let cut = cut.unwrap_or(Cut { width: length, block: STRETCH, first: 0 });
        let (first, blocks) = cut.blocks(length)?;
        for (to, form) in job.scales.iter_mut().zip(scales) {
            let Some(form) = form else { continue };
            let few = || Error::Internal("quantized values with too few scales".into());
            *to = form.scales_address(first, blocks).ok_or_else(few)?;
        }
        let longest = cut.block.min(cut.width);
        let lanes = longest.div_ceil(SHARE).next_power_of_two().min(32);
        let round = WARPS * 32 / lanes;
        job.width = narrow(cut.width)?;
        (job.blocks, job.in_row) = (narrow(blocks)?, narrow(cut.in_row())?);
        (job.before, job.block) = (narrow(cut.first % cut.width / cut.block)?, narrow(cut.block)?);
        (job.share, job.lanes) = (narrow((PIECE / (longest * round)).max(1) * round)?, narrow(lanes)?);
        // Blocks are counted in 32 bits, from the beginning of the first row to the end of the last piece.
        let _: i32 = narrow(blocks + cut.in_row() + 2 * PIECE)?;
        Ok(job)
    }

    /// Has an operand rounded at random.
    fn round(&mut self, at: usize, rounding: &Rounding, first: usize, length: usize) -> Result<()> {
        let bits = RandomBits::of(rounding, first, length)?;
        if self.random != 0 && bits != self.rounding {
            return Err(Error::Internal("operands of a pass at different places".into()));
        }
        self.random |= 1 << at | u32::from(rounding.stays_positive) << (MOST_OPERANDS + at);
        (self.tag[at], self.rounding) = (rounding.key[1], bits);
        Ok(())
    }

    fn pieces(&self) -> usize {
        self.blocks.div_ceil(self.share) as usize
    }
}

/// Runs a pass over jobs with forms, in float64 where it is `wide`.
pub(super) fn run(pass: &Pass<'_>, wide: bool, jobs: &[QuantizedJob]) -> Result<()> {
    for jobs in jobs.chunks(at_once(wide)) {
        if wide {
            launch_table(pass, "wide", &table::<FEW>(pass, jobs)?)?;
        } else {
            launch_table(pass, "many", &table::<MANY>(pass, jobs)?)?;
        }
    }
    Ok(())
}

/// Jobs of one launch.
pub(super) fn at_once(wide: bool) -> usize {
    if wide { FEW } else { MANY }
}

/// A table of jobs, and where the pieces of each end.
fn table<const MOST: usize>(
    pass: &Pass<'_>,
    jobs: &[QuantizedJob],
) -> Result<(QuantizedJobs<MOST>, Vec<u32>)> {
    let mut table = QuantizedJobs {
        scalars: Scalars::of(pass),
        count: narrow(jobs.len())?,
        job: [QuantizedJob::default(); MOST],
    };
    let mut ends = vec![0];
    for (to, job) in table.job.iter_mut().zip(jobs) {
        ends.push(add_pieces(ends[ends.len() - 1], job.pieces())?);
        *to = *job;
        to.plain.end = ends[ends.len() - 1];
    }
    Ok((table, ends.split_off(1)))
}

fn grid(ends: &[u32]) -> Grid {
    Grid { blocks: ends.last().copied().unwrap_or(0), threads: THREADS, shared: 0 }
}

fn launch_table<const MOST: usize>(
    pass: &Pass<'_>,
    form: &str,
    (table, ends): &(QuantizedJobs<MOST>, Vec<u32>),
) -> Result<()> {
    // SAFETY: the layout is asserted above; operands and scales are memory of the device, which the session keeps.
    unsafe { launch(&format!("{}_quantized_{form}", pass.kernel), grid(ends), table) }
}

/// As `quantized_sums.cu` lays it out.
#[repr(C)]
#[derive(Debug)]
struct QuantizedSumJobs<const MOST: usize> {
    jobs: QuantizedJobs<MOST>,
    partial: usize,
}

/// Runs a pass with sums over the jobs of one launch. `room` takes the number of pieces and allocates memory for their sums.
/// The second result holds where the pieces of each job end.
pub(super) fn sum<T>(
    pass: &Pass<'_>,
    wide: bool,
    jobs: &[QuantizedJob],
    room: impl FnOnce(u32) -> Result<(T, usize)>,
) -> Result<(T, Vec<u32>)> {
    fn launch_sums<const MOST: usize, T>(
        pass: &Pass<'_>,
        form: &str,
        jobs: &[QuantizedJob],
        room: impl FnOnce(u32) -> Result<(T, usize)>,
    ) -> Result<(T, Vec<u32>)> {
        let (jobs, ends) = table::<MOST>(pass, jobs)?;
        let grid = grid(&ends);
        let (kept, partial) = room(grid.blocks)?;
        if grid.blocks > 0 {
            let table = QuantizedSumJobs { jobs, partial };
            // SAFETY: the layout is asserted above; the operands are memory of the device, which the session keeps,
            // and there is room for the sums of all pieces.
            unsafe { launch(&format!("{}_quantized_{form}", pass.kernel), grid, &table) }?;
        }
        Ok((kept, ends))
    }
    if wide {
        launch_sums::<FEW, T>(pass, "wide", jobs, room)
    } else {
        launch_sums::<MANY, T>(pass, "many", jobs, room)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;
    use crate::tensor::{DType, FlatPtr, Places};

    #[test]
    fn blocks_of_a_cut_equal_those_of_the_form() {
        for (width, block) in [(1, 8), (7, 8), (8, 8), (9, 8), (20, 8), (257, 256), (1000, 256)] {
            let form = Blocks { scales: FlatPtr::EMPTY, width, block, rounding: None };
            let mut starts = vec![0];
            while starts[starts.len() - 1] < 3 * width {
                starts.push(form.block_at(starts[starts.len() - 1]).1);
            }
            for (i, &first) in starts.iter().enumerate() {
                for (j, &end) in starts.iter().enumerate().skip(i + 1) {
                    let cut = Cut { width, block, first };
                    assert_eq!(cut.blocks(end - first).unwrap(), (i, j - i), "{width} {block} {first} {end}");
                }
            }
        }
        assert!(Cut { width: 20, block: 8, first: 4 }.blocks(4).is_err());
        assert!(Cut { width: 20, block: 8, first: 8 }.blocks(4).is_err());
        assert!(Cut { width: 0, block: 8, first: 0 }.blocks(4).is_err());
    }

    fn encoded<'t>(memory: &'t mut [u64], dtype: DType, encoding: &'t Encoding) -> FlatView<'t> {
        // SAFETY: the memory is borrowed, and nothing reads or writes through a view in these tests.
        unsafe { pointer(memory, dtype).view(Some(encoding)) }
    }

    fn pointer(memory: &mut [u64], dtype: DType) -> FlatPtr {
        FlatPtr::over(memory, dtype)
    }

    #[test]
    fn new_says_how_threads_share_the_blocks() {
        let (mut memory, mut scales) = (vec![0; 2048], vec![0; 2048]);
        for (width, block, lanes, share) in
            [(1024_usize, 256, 32, 64), (1024, 512, 32, 32), (8, 256, 1, 2048), (64, 16, 2, 1024)]
        {
            let blocks = 16384 / width * width.div_ceil(block);
            let scales = pointer(&mut scales[..blocks.div_ceil(2)], DType::F32);
            let form = Encoding::Blocks(Blocks { scales, width, block, rounding: None });
            let operands = [encoded(&mut memory, DType::Q8, &form)];
            let job = QuantizedJob::new(Job::default(), &operands).unwrap();
            assert_eq!((job.lanes, job.share, job.blocks as usize), (lanes, share, blocks));
            assert_eq!((job.scales[0], job.before), (scales.address(), 0));
            assert_eq!(job.pieces(), 1);
            let part = QuantizedJob::new(Job::default(), &operands.map(|o| o.part(block.min(width), 16384)))
                .unwrap();
            assert_eq!(part.scales[0], scales.address() + 4);
            assert_eq!(part.before as usize, usize::from(block < width));
        }
    }

    #[test]
    fn new_refuses_states_that_cannot_be_written() {
        let (mut memory, mut other, bare) = (vec![0; 8], vec![0; 8], vec![0; 8]);
        let (mut scales, mut few) = (vec![0; 8], vec![0; 1]);
        let (scales, few) = (pointer(&mut scales, DType::F32), pointer(&mut few, DType::F32));
        let [one, two, short] = [(32, 16, scales), (32, 8, scales), (32, 16, few)]
            .map(|(width, block, scales)| Encoding::Blocks(Blocks { scales, width, block, rounding: None }));
        let new = |operands: [FlatView<'_>; 2]| QuantizedJob::new(Job::default(), &operands);
        let flat = encoded(&mut memory, DType::Q8, &one);
        let mut with = |encoding| {
            let other = encoded(&mut other, DType::UQ8, encoding);
            (new([flat, other]).is_ok(), new([flat.part(4, 12), other.part(4, 12)]).is_ok())
        };
        assert_eq!(with(&one), (true, false));
        assert_eq!(with(&two), (false, false));
        assert_eq!(with(&short), (false, false));
        assert!(new([flat, FlatView::over(&bare, DType::UQ8)]).is_err());
    }

    #[test]
    fn new_gives_positions_to_numbers_rounded_at_random() {
        let mut memory = vec![0; 16];
        let spans = |shape: &[usize], part: &[(usize, usize)]| {
            let places = Places::new(shape, part);
            Encoding::Rounding(Rounding { key: [1, 2], places, stays_positive: false })
        };
        let mut one = |form: &Encoding| {
            QuantizedJob::new(Job::default(), &[encoded(&mut memory, DType::BF16, form).part(3, 60)])
        };
        let job = one(&spans(&[10, 8, 9], &[(2, 4), (0, 8), (1, 2)])).unwrap();
        assert_eq!((job.random, job.tag[0], job.rounding.key, job.rounding.first), (1, 2, 1, 3));
        assert_eq!(
            (job.rounding.spans, job.rounding.span[0], job.rounding.span[1]),
            (2, [80, 16, 32], [9, 1, 2])
        );
        assert_eq!((job.width, job.blocks, job.block), (60, 1, 256));
        let job = one(&spans(&[], &[])).unwrap();
        assert_eq!((job.rounding.spans, job.rounding.span[0]), (1, [1, 0, 1]));
        assert!(one(&spans(&[2; 5], &[(0, 1); 5])).is_err());
    }
}
