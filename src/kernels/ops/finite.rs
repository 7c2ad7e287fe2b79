//! Operations that projections by a basis need in addition to their products.

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::kernels::cpu;
use crate::kernels::dispatch::frozen;
use crate::tensor::{Device, FlatView, FlatViewMut, MatrixView};

/// Clears each run of elements whose basis has only zeros.
///
/// # Errors
/// `Error::Cuda` where the device refuses it.
pub fn clear_without_basis(all: &mut [(MatrixView<'_>, FlatViewMut<'_>)]) -> Result<()> {
    if all.first().is_some_and(|(_, out)| out.device() != Device::Cpu) {
        return frozen(|| super::channels::fallback::clear_without_basis(all));
    }
    let without = |basis: &MatrixView<'_>| basis.runs().all(|run| cpu::reduce::only_zeros(&run));
    all.iter_mut().filter(|(basis, _)| without(basis)).try_for_each(|(_, out)| out.clear())
}

/// Tests whether a matrix has only zeros. Returns false on a device, which the host does not read.
#[must_use]
pub fn is_zero(matrix: &MatrixView<'_>) -> bool {
    matrix.device() == Device::Cpu && matrix.runs().all(|run| cpu::reduce::only_zeros(&run))
}

/// True if all elements are finite: a truth value that the host knows, or one on a device.
#[derive(Debug)]
pub enum Finite {
    /// Truth value that the host knows.
    Known(bool),
    /// A tensor of one truth value.
    There(Tensor),
}

impl Finite {
    /// Of all elements of some views.
    ///
    /// # Errors
    /// Whatever libtorch says.
    pub fn of(all: &[FlatView<'_>]) -> Result<Self> {
        if all.first().is_none_or(|first| first.device() == Device::Cpu) {
            return Ok(Self::Known(all.iter().all(|x| cpu::reduce::sum_of_squares(x).is_finite())));
        }
        let mut flag = Tensor::f_ones([], (Kind::Bool, all[0].device().torch()))?;
        for x in all {
            let _ = flag.f_logical_and_(&x.tensor(&[x.len()])?.f_isfinite()?.f_all()?)?;
        }
        Ok(Self::There(flag))
    }

    /// `new` where all is finite, else `old`; none where the host knows that nothing is new.
    ///
    /// # Errors
    /// Whatever libtorch says.
    pub fn choose(&self, new: &Tensor, old: &Tensor) -> Result<Option<Tensor>> {
        Ok(match self {
            Self::Known(false) => None,
            Self::Known(true) => Some(new.shallow_clone()),
            Self::There(flag) => Some(new.f_where_self(flag, old)?),
        })
    }
}
