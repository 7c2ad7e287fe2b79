//! What Python tells the CUDA side of the core.

use std::path::PathBuf;

use pyo3::prelude::*;

use super::error::to_python;
use crate::kernels::cuda::{self, Tape};

/// Keeps machine code that is compiled on this machine in a folder; None keeps none. `emulated`: memory of the host
/// counts as memory of device 0, which is refused unless the driver is the emulator of the tests.
#[pyfunction]
#[pyo3(signature = (folder, *, emulated=false))]
pub(super) fn prepare_devices(folder: Option<PathBuf>, emulated: bool) -> PyResult<()> {
    cuda::keep_in(folder);
    if emulated { cuda::emulate().map_err(to_python) } else { Ok(()) }
}

/// The launches of a captured step, which can have the parameters of another step when they are replayed.
#[pyclass(name = "Launches", module = "oxidion", frozen)]
pub(super) struct PyLaunches(Tape);

#[pymethods]
impl PyLaunches {
    /// Notes the launches of this thread, which are captured, until `noted`.
    #[staticmethod]
    fn note() {
        cuda::note();
    }

    /// Ends what `note` or `set` began; returns what was noted.
    #[staticmethod]
    fn noted() -> Self {
        Self(cuda::noted())
    }

    /// Instead of launching, gives the launches of an executable graph the parameters that this thread launches with,
    /// until `finish`.
    fn set(&self, graph: usize) {
        cuda::set(self.0.clone(), graph);
    }

    /// Ends what `set` began.
    #[staticmethod]
    fn finish() -> PyResult<()> {
        cuda::finish().map_err(to_python)
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }
}
