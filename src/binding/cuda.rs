//! Settings of the CUDA side of the core that Python makes.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::error::to_python;
use crate::kernels::{self, Content, Family, Tier, cuda};
use crate::tensor;

/// Keeps machine code that is compiled on this machine in a folder; None keeps none. `emulated`: memory of the host
/// counts as memory of device 0, which is refused unless the driver is the emulator of the tests, or libtorch alone computes
/// (`OXIDION_CUDA=libtorch`). `kernels`: whether this torch is one that they are for; else libtorch computes.
#[pyfunction]
#[pyo3(signature = (folder, *, emulated=false, kernels=true))]
pub(super) fn prepare_devices(folder: Option<PathBuf>, emulated: bool, kernels: bool) -> PyResult<()> {
    cuda::keep_in(folder);
    if !kernels {
        Tier::without_kernels();
    }
    match (emulated, Tier::wanted().map_err(to_python)?) {
        (false, _) => Ok(()),
        (true, Tier::Libtorch) => {
            tensor::emulate();
            Ok(())
        }
        (true, _) => cuda::emulate().map_err(to_python),
    }
}

/// The kernels of declared operations, in order: of each its name, its operation on devices, its pass, the names of its
/// scalars, those that are flags and those that follow the learning rate, its operands, those that are read and written,
/// what each holds, and whether it has a form for operands that are more than numbers of their type.
#[pyfunction]
pub(super) fn device_kernels(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let list = PyList::empty(py);
    for kernel in kernels::device_kernels() {
        let all = PyDict::new(py);
        let family = match kernel.family {
            Family::Elementwise => "elementwise",
            Family::Sum => "sum",
            Family::Mean => "mean",
            Family::Row => "row",
        };
        let contents = kernel.operands.iter().map(|operand| match operand.content {
            Content::Param => "param",
            Content::Plain => "plain",
            Content::Signed => "signed",
            Content::Unsigned => "unsigned",
        });
        all.set_item("name", kernel.name)?;
        all.set_item("operation", kernel.device)?;
        all.set_item("family", family)?;
        all.set_item("scalars", kernel.scalars.iter().map(|s| s.name).collect::<Vec<_>>())?;
        all.set_item("flags", kernel.scalars.iter().map(|s| s.is_flag).collect::<Vec<_>>())?;
        all.set_item("follows_rate", kernel.scalars.iter().map(|s| s.follows_rate).collect::<Vec<_>>())?;
        all.set_item("operands", kernel.operands.iter().map(|o| o.name).collect::<Vec<_>>())?;
        all.set_item("reads", kernel.operands.iter().map(|o| o.reads).collect::<Vec<_>>())?;
        all.set_item("writes", kernel.operands.iter().map(|o| o.writes).collect::<Vec<_>>())?;
        all.set_item("contents", contents.collect::<Vec<_>>())?;
        all.set_item("encoded", kernel.has_encoded_form())?;
        list.append(all)?;
    }
    Ok(list)
}

/// Headers of the CUDA sources, by name, that are written from the declarations of operations.
#[pyfunction]
pub(super) fn generated_headers(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let headers = PyDict::new(py);
    for (name, text) in kernels::generated_headers() {
        headers.set_item(name, text)?;
    }
    Ok(headers)
}
