//! What projections by a basis need beside their products.

use super::{cpu, cuda};
use crate::batch::{Area, Place, Slab};
use crate::error::Result;

/// Clears each run of elements whose basis has only zeros.
///
/// # Errors
/// `Error::Cuda` where the device refuses it.
pub fn clear_without_basis(all: &[(Area, Slab)]) -> Result<()> {
    if all.first().is_some_and(|(_, out)| out.place() != Place::Cpu) {
        return cuda::clear_without_basis(all);
    }
    let without = |basis: &Area| basis.runs().all(|run| cpu::reduce::only_zeros(&run));
    all.iter().filter(|(basis, _)| without(basis)).try_for_each(|(_, out)| out.clear())
}

/// Whether all elements are finite. The host waits for a device.
///
/// # Errors
/// Whatever libtorch says.
pub fn is_finite(x: &Slab) -> Result<bool> {
    if x.place() == Place::Cpu {
        return Ok(cpu::reduce::sum_of_squares(x).is_finite());
    }
    Ok(bool::try_from(x.tensor(&[x.len()])?.f_isfinite()?.f_all()?)?)
}
