//! Orthonormalization as functions of matrices, on NumPy arrays and on tensors.

use numpy::{PyArray, PyArrayDyn, PyReadonlyArrayDyn, PyUntypedArrayMethods};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use tch::{Kind, Tensor};

use super::enter::Enter;
use super::tensor;
use crate::error::{Error, Result};
use crate::linalg::coefficients::by_name;
use crate::linalg::newton_schulz as iteration;
use crate::linalg::qr::{self, QrMethod};

/// A batch of matrices that came from Python, and how to send one back.
enum Form {
    Tensor,
    Array32,
    Array64,
}

/// Copies the argument into a contiguous tensor of its own.
fn take(x: &Bound<'_, PyAny>) -> PyResult<(Tensor, Form)> {
    fn owned<T: numpy::Element + tch::kind::Element + Copy>(
        array: &PyReadonlyArrayDyn<'_, T>,
    ) -> PyResult<Tensor> {
        let shape: Vec<i64> =
            array.shape().iter().map(|&d| i64::try_from(d)).collect::<std::result::Result<_, _>>()?;
        let values: Vec<T> = array.as_array().iter().copied().collect();
        let tensor = Tensor::f_from_slice(&values).and_then(|t| t.f_view(shape.as_slice()));
        tensor.map_err(|e| PyValueError::new_err(e.to_string()))
    }
    if let Ok(array) = x.extract::<PyReadonlyArrayDyn<'_, f32>>() {
        return Ok((owned(&array)?, Form::Array32));
    }
    if let Ok(array) = x.extract::<PyReadonlyArrayDyn<'_, f64>>() {
        return Ok((owned(&array)?, Form::Array64));
    }
    let tensor = tensor::unpack(x, "x")?;
    if !matches!(tensor.kind(), Kind::Float | Kind::Double | Kind::BFloat16 | Kind::Half) {
        return Err(PyTypeError::new_err(format!("x must be real floating-point, got {:?}", tensor.kind())));
    }
    let copy = tensor.f_detach().and_then(|t| t.f_contiguous()).and_then(|t| t.f_detach_copy());
    Ok((copy.map_err(|e| PyValueError::new_err(e.to_string()))?, Form::Tensor))
}

fn give<'py>(py: Python<'py>, tensor: &Tensor, form: &Form) -> PyResult<Bound<'py, PyAny>> {
    fn array<'py, T: numpy::Element + tch::kind::Element + Default + Clone>(
        py: Python<'py>,
        tensor: &Tensor,
    ) -> PyResult<Bound<'py, PyArrayDyn<T>>> {
        let shape: Vec<usize> =
            tensor.size().iter().map(|&d| usize::try_from(d)).collect::<std::result::Result<_, _>>()?;
        let mut values = vec![T::default(); tensor.numel()];
        let flat = tensor.f_contiguous().and_then(|t| t.f_copy_data(&mut values, tensor.numel()));
        flat.map_err(|e| PyValueError::new_err(e.to_string()))?;
        numpy::PyArrayMethods::reshape(&PyArray::from_vec(py, values), shape)
    }
    match form {
        Form::Tensor => tensor::pack(py, tensor),
        Form::Array32 => Ok(array::<f32>(py, tensor)?.into_any()),
        Form::Array64 => Ok(array::<f64>(py, tensor)?.into_any()),
    }
}

/// `[..., m, n]` as `[B, m, n]`.
fn as_batch(x: &Tensor) -> Result<Tensor> {
    let size = x.size();
    let [.., m, n] = size[..] else {
        return Err(Error::Value(format!("x must have at least two dimensions, got shape {size:?}")));
    };
    let count = size[..size.len() - 2].iter().product::<i64>();
    Ok(x.f_view([count, m, n])?)
}

/// Approximate polar factor by the named polynomial.
#[pyfunction]
fn polar_iteration<'py>(
    x: &Bound<'py, PyAny>,
    polynomial: &str,
    epsilon: f64,
) -> PyResult<Bound<'py, PyAny>> {
    let (matrix, form) = take(x)?;
    let rows =
        by_name(polynomial).ok_or_else(|| PyValueError::new_err(format!("no polynomial '{polynomial}'")))?;
    let py = x.py();
    let result = py.enter(move || {
        let mut batch = as_batch(&matrix)?;
        let (b, m, n) = batch.size3()?;
        let scratch =
            Tensor::f_empty([iteration::scratch_elements(b, m, n)], (batch.kind(), batch.device()))?;
        iteration::newton_schulz(&mut batch, rows, epsilon, &scratch)?;
        Ok(matrix)
    })?;
    give(py, &result, &form)
}

/// Orthonormal columns that span those of `x`.
#[pyfunction]
fn orthonormal_columns<'py>(x: &Bound<'py, PyAny>, method: &str) -> PyResult<Bound<'py, PyAny>> {
    let (matrix, form) = take(x)?;
    let method = QrMethod::parse(method).map_err(super::error::to_python)?;
    let py = x.py();
    let result = py.enter(move || {
        let (orthonormal, _) = qr::orthonormalize(&as_batch(&matrix)?, method, None)?;
        Ok(orthonormal.f_view_as(&matrix)?)
    })?;
    give(py, &result, &form)
}

/// Adds the functions to the module.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(polar_iteration, module)?)?;
    module.add_function(wrap_pyfunction!(orthonormal_columns, module)?)
}
