//! The orthonormal right factor of Dion: Q ← Q factor of R (arXiv:2605.16341).

use std::ops::Range;

use super::{Dion, EPSILON, FACTORIZE, LIVE, MOMENTUM, NORMS, Q, R, RIGHT, SELECT, WORK};
use crate::algorithm::stage::{Buffers, StageIo, UnitIo, jobs};
use crate::error::Result;
use crate::kernels::{self, Columns, Kept};
use crate::linalg::basis::{Rounding, Size};
use crate::linalg::qr::Report;
use crate::linalg::right_factor::right_factor;
use crate::program::{BufferSpec, Program, Target};
use crate::spec::{DimSharding, Hyper, UnitShape};
use crate::tensor::FlatViewMut;

/// Rows of the buffer of live columns; the last row marks which columns are live.
const ROWS: usize = 3;
const LAST: i64 = 2;

/// The rows of a unit's buffer of live columns.
fn rows(mut flat: FlatViewMut<'_>) -> [FlatViewMut<'_>; ROWS] {
    let cols = flat.len() / ROWS;
    [(); ROWS].map(|()| flat.take_first(cols))
}

impl Dion {
    /// Adds the buffers of the factorization to a program that may lack some before them.
    pub(super) fn right_buffers(&self, mut program: Program, shape: &UnitShape) -> Program {
        let [_, (short, width)] = Self::sides(shape);
        let rank = self.rank(shape.rows, shape.cols);
        let product = self.product(shape.param, shape.state[MOMENTUM]);
        for _ in program.buffers.len()..RIGHT {
            program = program.scratch("none", 0, product);
        }
        let right = BufferSpec::new("right", width, rank, product);
        program
            .buffer(right.sharded(DimSharding::LikeParam(short), DimSharding::Replicated))
            .buffer(BufferSpec::new("live", ROWS, rank, product))
    }

    /// Appends the factorization, of whole matrices where R is sharded.
    pub(super) fn factorize(program: Program, shape: &UnitShape) -> Program {
        let [_, (short, _)] = Self::sides(shape);
        let program = program.local(SELECT, "select");
        if shape.num_shards[short.index()] == 1 {
            return program.local(FACTORIZE, "factorize");
        }
        program
            .redistribute(LIVE, Target::Whole)
            .redistribute(RIGHT, Target::Whole)
            .local(FACTORIZE, "factorize")
            .release(LIVE)
            .redistribute(RIGHT, Target::Storage)
    }

    /// Copies Q before the step, with all columns, to the buffer of the right factor.
    pub(super) fn keep_basis(io: &mut StageIo<'_>) -> Result<()> {
        let StageIo { units, buffers, .. } = io;
        let [work, right] = buffers.several([WORK, RIGHT])?;
        let all = work.matrices(units)?.into_iter().zip(right.matrices(units)?);
        let all = all.map(|(work, right)| ([work.into_view()], [right]));
        kernels::run(&kernels::Convert { factor: 1.0 }, &mut jobs(all))
    }

    /// Divides the live columns of R by their norms and replaces dead ones by columns of Q. Writes which columns are live
    /// to `LIVE`, and as 1 or 0 over the sums of squares.
    pub(super) fn select(io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let StageIo { units, buffers, .. } = io;
        let [r, work, norms, right, live] = buffers.several([R, WORK, NORMS, RIGHT, LIVE])?;
        let mut kept = Vec::with_capacity(units.len());
        let all = r.flats(units)?.into_iter().zip(work.flats(units)?).zip(norms.flats(units)?);
        for (((r, scaled), sums), q) in all.zip(right.matrices(units)?) {
            let own = 0..sums.len();
            kept.push(Kept { columns: Columns { x: r.into_view(), sums, scaled }, q, own });
        }
        kernels::normalize_columns(&mut kept, h[EPSILON], 1.0, false)?;
        kernels::frozen(|| {
            for mut live in live.flats(units)? {
                let _ = live.tensor(&[live.len()])?.f_fill_(1.0)?;
            }
            Ok(())
        })?;
        let mut kept = Vec::with_capacity(units.len());
        for (live, sums) in live.flats(units)?.into_iter().zip(norms.flats(units)?) {
            let ([ones, other, scaled], cols) = (rows(live), sums.len());
            let (q, own) = (other.into_matrix(0, [1, cols], cols), 0..cols);
            kept.push(Kept { columns: Columns { x: ones.into_view(), sums, scaled }, q, own });
        }
        // A dead column gets 0, by the same numbers as above.
        kernels::normalize_columns(&mut kept, h[EPSILON], 1.0, false)?;
        kernels::frozen(|| {
            for (live, mut sums) in live.flats(units)?.into_iter().zip(norms.flats(units)?) {
                let [_, _, live] = rows(live);
                let shape = [sums.len()];
                let mut sums = sums.tensor(&shape)?;
                sums.f_copy_(&live.view().tensor(&shape)?.f_ne(0.0)?)?;
            }
            Ok(())
        })
    }

    /// Orthonormalizes the right factors in place.
    pub(super) fn orthonormalize_right(&self, io: &mut StageIo<'_>) -> Result<()> {
        let StageIo { units, buffers, class, .. } = io;
        let stored = self.stored(class.state[MOMENTUM], buffers.get(RIGHT)?.flat.dtype());
        let rounding = Rounding { of: Size::Each, stored };
        let [right, live] = buffers.several([RIGHT, LIVE])?;
        let mut report = Report::default();
        if units.iter().enumerate().all(|(i, unit)| unit.position == i) {
            let which = live.batch(units)?.f_select(1, LAST)?;
            report = right_factor(&mut *right.batch(units)?, &which, rounding)?;
        } else {
            for unit in &*units {
                let which = live.tensor(unit)?.f_narrow(0, LAST, 1)?;
                let found = right_factor(&mut right.tensor(unit)?.f_unsqueeze(0)?, &which, rounding)?;
                report.householder += found.householder;
            }
        }
        if report.householder > 0 {
            let (count, all) = (report.householder, units.len());
            log::debug!(target: "oxidion.dion", "{count} of {all} right factors went to Householder QR");
        }
        Ok(())
    }

    /// Copies the columns `own` of the right factors to the state Q.
    pub(super) fn store_basis(
        units: &mut [UnitIo<'_>],
        buffers: &mut Buffers<'_>,
        own: &[Range<usize>],
    ) -> Result<()> {
        let right = buffers.get_mut(RIGHT)?;
        let shapes = units.iter().map(|unit| right.shape(unit)).collect::<Result<Vec<_>>>()?;
        let right = right.flats(units)?.into_iter().zip(shapes);
        let all = units.iter_mut().zip(right).zip(own).map(|((unit, (right, [rows, cols])), own)| {
            let q = unit.state[Q].reborrow().into_first_cols(own.len());
            ([right.into_view().matrix(own.start, [rows, own.len()], cols)], [q])
        });
        kernels::run(&kernels::Convert { factor: 1.0 }, &mut jobs(all))
    }
}
