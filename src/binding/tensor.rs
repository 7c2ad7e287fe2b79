//! Python tensors to libtorch tensors that share their memory, and back. All unsafe handling of objects is here.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use tch::Tensor;
use tch::python::CPyObject;

use super::enter::Enter;
use super::error::to_python;
use crate::batch::Slab;
use crate::error::Error;
use crate::linalg::random::{Key, fill_normal as normals};

static TENSOR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static PARAMETER: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// Whether the object is a tensor or parameter of torch's own class: nothing to unwrap.
pub(super) fn is_plain(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let (py, ty) = (object.py(), object.get_type());
    Ok(ty.is(TENSOR.import(py, "torch", "Tensor")?)
        || ty.is(PARAMETER.import(py, "torch.nn", "Parameter")?))
}

/// A tensor that shares the object's memory. Subclasses with a dispatch of their own are refused: an operation on
/// them would re-enter Python and act on something else than their memory.
pub(super) fn unpack(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Tensor> {
    let py = object.py();
    if !is_plain(object)? {
        let (tensor, ty) = (TENSOR.import(py, "torch", "Tensor")?, object.get_type());
        let dispatch = intern!(py, "__torch_dispatch__");
        let plain = object.is_instance(tensor)? && ty.getattr(dispatch)?.is(&tensor.getattr(dispatch)?);
        if !plain {
            return Err(PyTypeError::new_err(format!(
                "{what} must be a torch.Tensor with memory of its own, got {}",
                ty.name()?
            )));
        }
    }
    // SAFETY: the object is an instance of torch.Tensor, checked above, and alive while `object` borrows it.
    let unpacked = unsafe { Tensor::pyobject_unpack(object.as_ptr().cast::<CPyObject>()) };
    unpacked
        .map_err(|e| to_python(e.into()))?
        .ok_or_else(|| PyTypeError::new_err(format!("{what} must be a torch.Tensor")))
}

/// A Python tensor for a libtorch tensor.
pub(super) fn pack<'py>(py: Python<'py>, tensor: &Tensor) -> PyResult<Bound<'py, PyAny>> {
    let object = tensor.pyobject_wrap().map_err(|e| to_python(e.into()))?;
    // SAFETY: `pyobject_wrap` returns a new reference to a live object, or null with a Python error set.
    unsafe { Bound::from_owned_ptr_or_err(py, object.cast()) }
}

/// Fills a contiguous float32 CPU tensor with N(0, 1) numbers that depend only on seed, stream and position.
#[pyfunction]
pub(super) fn fill_normal(tensor: &Bound<'_, PyAny>, seed: u64, stream: u64) -> PyResult<()> {
    let target = unpack(tensor, "tensor")?;
    tensor.py().enter(move || {
        let slab = Slab::of(&target)?;
        if slab.dtype() != crate::dtype::DType::F32 {
            return Err(Error::Type("normal numbers are made in float32".into()));
        }
        // SAFETY: `target` is alive, contiguous float32 on the CPU, and Python's caller does not touch it meanwhile.
        normals(unsafe { slab.slice::<f32>() }, Key { seed, stream }, 0, 0, 0);
        Ok(())
    })
}

/// `ValueError` unless the tensor is on the CPU.
pub(super) fn require_cpu(tensor: &Tensor, name: &str) -> PyResult<()> {
    if tensor.device() == tch::Device::Cpu {
        return Ok(());
    }
    Err(PyValueError::new_err(format!(
        "{name}: parameters must be on the CPU in this version, got {:?}. Move the model with .cpu()",
        tensor.device()
    )))
}
