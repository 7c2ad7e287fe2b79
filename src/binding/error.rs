//! Errors of the core as Python exceptions.

use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::error::Error;

create_exception!(oxidion, LayoutError, PyValueError, "A sharding that cannot be worked on.");
create_exception!(oxidion, PlanMismatch, PyRuntimeError, "Ranks that disagree about the plan of a step.");
create_exception!(oxidion, PoisonedOptimizer, PyRuntimeError, "A step failed half way; load a checkpoint.");

/// The exception that stands for an error.
pub(super) fn to_python(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Foreign(raised) => {
            raised.downcast::<PyErr>().map_or_else(|_| PyRuntimeError::new_err(text), |raised| *raised)
        }
        Error::Value(_) | Error::Param { .. } => PyValueError::new_err(text),
        Error::Type(_) => PyTypeError::new_err(text),
        Error::Layout { .. } => LayoutError::new_err(text),
        Error::PlanMismatch(_) => PlanMismatch::new_err(text),
        Error::Busy | Error::Mode(_) | Error::Internal(_) | Error::Cuda(_) | Error::Torch(_) => {
            PyRuntimeError::new_err(text)
        }
    }
}

/// Exception of the same class, with the parameter's name in front of its text.
pub(super) fn with_name(py: Python<'_>, error: &PyErr, name: &str) -> PyErr {
    let text = format!("{name}: {}", error.value(py));
    PyErr::from_type(error.get_type(py), text)
}

/// Adds the exception classes to the module.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("LayoutError", py.get_type::<LayoutError>())?;
    module.add("PlanMismatch", py.get_type::<PlanMismatch>())?;
    module.add("PoisonedOptimizer", py.get_type::<PoisonedOptimizer>())
}
