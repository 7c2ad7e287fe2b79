//! Settings of the CUDA side of the core that Python makes.

use std::path::PathBuf;

use pyo3::prelude::*;

use super::error::to_python;
use crate::kernels::cuda;

/// Keeps machine code that is compiled on this machine in a folder; None keeps none. `emulated`: memory of the host
/// counts as memory of device 0, which is refused unless the driver is the emulator of the tests.
#[pyfunction]
#[pyo3(signature = (folder, *, emulated=false))]
pub(super) fn prepare_devices(folder: Option<PathBuf>, emulated: bool) -> PyResult<()> {
    cuda::keep_in(folder);
    if emulated { cuda::emulate().map_err(to_python) } else { Ok(()) }
}
