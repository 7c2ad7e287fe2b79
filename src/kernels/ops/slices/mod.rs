//! Rows or columns ("slices") of matrices that are chosen by their absolute sums.

#[cfg(feature = "cuda")]
pub(in crate::kernels) mod device;
pub(in crate::kernels) mod fallback;
mod host;
mod select;

use crate::error::Result;
use crate::kernels::libtorch::on_device;
use crate::kernels::ops::apply::Apply;
use crate::kernels::ops::decode::{decoded, encoded_elements};
use crate::spec::Side;
use crate::tensor::{DType, Device, FlatView, FlatViewMut, MatrixView, MatrixViewMut};

/// Sources of the kernels.
const SOURCES: &[&str] = &["select.cu"];

/// Slices that [`choose`] chose of a matrix: on the host as soon as it has returned, on a device when that gets there.
#[derive(Clone, Copy, Debug)]
pub struct Chosen<'a> {
    /// Their numbers in float64, counted from 1, ascending and filled up with 0.
    pub(in crate::kernels) numbers: FlatView<'a>,
    /// The number of the first slice of the matrix, where chosen slices have the positions in `U` that they have there;
    /// else they follow each other.
    pub(in crate::kernels) first: Option<usize>,
}

impl<'a> Chosen<'a> {
    /// Slices that follow each other in `U`.
    #[must_use]
    pub fn packed(numbers: FlatView<'a>) -> Self {
        Self { numbers, first: None }
    }

    /// Slices at their own positions in `U`. The first slice that is stored has the number `first`.
    #[must_use]
    pub fn in_place(numbers: FlatView<'a>, first: usize) -> Self {
        Self { numbers, first: Some(first) }
    }

    /// Tests whether it is known that no slices were chosen: of a device that is not known.
    #[must_use]
    pub fn is_known_empty(&self) -> bool {
        self.numbers.device() == Device::Cpu && select::chosen(&self.numbers).is_empty()
    }

    /// On the host: a slice of the matrix and that of `U` which belong together, of `stored` slices.
    pub(in crate::kernels) fn pairs(&self, stored: usize) -> Vec<(usize, usize)> {
        let chosen = select::chosen(&self.numbers).into_iter();
        match self.first {
            None => chosen.enumerate().map(|(to, from)| (from, to)).collect(),
            Some(first) => {
                let here = chosen.filter_map(|k| k.checked_sub(first).filter(|k| *k < stored));
                here.map(|k| (k, k)).collect()
            }
        }
    }
}

/// A matrix, and another one for slices of it.
#[derive(Debug)]
pub struct Sliced<'a> {
    /// The matrix.
    pub x: MatrixViewMut<'a>,
    /// Which slices.
    pub chosen: Chosen<'a>,
    /// The other one.
    pub u: MatrixViewMut<'a>,
}

impl Sliced<'_> {
    /// On the host: the pairs of slices.
    pub(in crate::kernels) fn pairs(&self, side: Side) -> Vec<(usize, usize)> {
        self.chosen.pairs(self.x.shape()[side.index()])
    }
}

/// Operation on chosen slices.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) enum Move {
    /// `u ← x`, zero where nothing was chosen, and `x ← keep·x`.
    Take(f64),
    /// `x ← u`.
    Return,
}

fn is_wide(one: &Sliced<'_>) -> bool {
    [one.x.dtype(), one.u.dtype()].contains(&DType::F64)
}

fn device(all: &[Sliced<'_>]) -> Device {
    all.first().map_or(Device::Cpu, |one| one.chosen.numbers.device())
}

/// `sums[i] = Σ |x|` over row i or column i of each matrix. `sums` are float64.
///
/// # Errors
/// `Error::Cuda` where the device refuses it.
pub fn absolute_sums(side: Side, all: &mut [(MatrixView<'_>, FlatViewMut<'_>)]) -> Result<()> {
    if all.first().is_none_or(|(_, sums)| sums.device() == Device::Cpu) {
        for (x, sums) in all {
            host::absolute_sums(x, side, sums);
        }
        return Ok(());
    }
    let mut all: Vec<_> = all.iter().map(|(x, sums)| (*x, sums.view())).collect();
    decoded(
        &mut all,
        |(x, _)| encoded_elements(x),
        |decoded, (x, _)| {
            *x = decoded.read(*x, x.dtype() == DType::F64)?;
            Ok(())
        },
        |_, part| on_device!(SOURCES; device::line_sums(side, true, part), else fallback::line_sums(side, true, part)),
    )
}

/// `m ← m + factor·g` and in the same pass the sums of `absolute_sums` over m. `all` are g, m and the sums. Returns whether
/// it was done: it is not on devices, nor where what is summed up has to be rounded for storage first.
#[must_use]
pub fn add_with_absolute_sums(
    side: Side,
    factor: f64,
    all: &mut [(MatrixView<'_>, MatrixViewMut<'_>, FlatViewMut<'_>)],
) -> bool {
    let in_one_pass = |(g, m, sums): &(MatrixView<'_>, MatrixViewMut<'_>, FlatViewMut<'_>)| {
        let wide = g.dtype() == DType::F64;
        sums.device() == Device::Cpu && (m.dtype() == DType::F64 || (m.dtype() == DType::F32 && !wide))
    };
    let done = all.iter().all(in_one_pass);
    if done {
        for (g, m, sums) in all {
            host::add_with_absolute_sums(g, factor, m, side, sums);
        }
    }
    done
}

/// The numbers of the `count` largest scores (float64, compared in float32, NaN before all, ties to the lowest number),
/// ascending and counted from 1, into a float64 view, which is filled up with 0: a cleared view is one where nothing was
/// chosen. `all` are scores, and where the numbers go.
///
/// # Errors
/// As `absolute_sums`.
pub fn choose(count: usize, all: &mut [(FlatView<'_>, FlatViewMut<'_>)]) -> Result<()> {
    if all.first().is_none_or(|(_, chosen)| chosen.device() == Device::Cpu) {
        for (scores, chosen) in all {
            select::choose(scores, count, chosen);
        }
        return Ok(());
    }
    on_device!(SOURCES; device::choose(count, all), else fallback::choose(count, all))
}

/// Copies the chosen slices of `x` to `u`, whose others become zero, and multiplies them in `x` by `keep`.
///
/// # Errors
/// As `absolute_sums`.
pub fn take(side: Side, keep: f64, all: &mut [Sliced<'_>]) -> Result<()> {
    if device(all) != Device::Cpu {
        return move_decoded(side, Move::Take(keep), all);
    }
    all.iter_mut().try_for_each(|one| {
        one.u.reborrow().into_runs().try_for_each(|mut run| run.clear())?;
        let pairs = one.pairs(side);
        select::take(one.x.reborrow(), side, &pairs, keep, one.u.reborrow());
        Ok(())
    })
}

/// Moves slices on a device, of numbers where a matrix is encoded.
fn move_decoded(side: Side, how: Move, all: &mut [Sliced<'_>]) -> Result<()> {
    decoded(
        all,
        |one| encoded_elements(&one.x.view()) + encoded_elements(&one.u.view()),
        |decoded, one| {
            let wide = is_wide(one);
            decoded.written(wide, &mut one.x)?;
            decoded.written(wide, &mut one.u)
        },
        |_, part| on_device!(SOURCES; device::move_slices(side, how, part), else fallback::move_slices(side, how, part)),
    )
}

/// Copies the slices of `u` to the positions in `x` that [`take`] took them from.
///
/// # Errors
/// As `absolute_sums`.
pub fn put_back(side: Side, all: &mut [Sliced<'_>]) -> Result<()> {
    if device(all) != Device::Cpu {
        return move_decoded(side, Move::Return, all);
    }
    for one in all {
        let back: Vec<_> = one.pairs(side).into_iter().map(|(to, from)| (from, to)).collect();
        select::take(one.u.reborrow(), side, &back, 1.0, one.x.reborrow());
    }
    Ok(())
}

/// Applies the slices of `u` to the chosen slices of `x`; the other slices decay.
///
/// # Errors
/// As `absolute_sums`.
pub fn apply_slices(side: Side, apply: &Apply, all: &mut [Sliced<'_>]) -> Result<()> {
    if device(all) != Device::Cpu {
        return decoded(
            all,
            |one| encoded_elements(&one.x.view()),
            |decoded, one| decoded.written(is_wide(one), &mut one.x),
            |_, part| on_device!(SOURCES; device::apply_slices(side, apply, part), else fallback::apply_slices(side, apply, part)),
        );
    }
    for one in all {
        let pairs = one.pairs(side);
        select::put(one.x.reborrow(), side, &pairs, &one.u.view(), apply);
    }
    Ok(())
}
