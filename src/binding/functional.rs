//! Orthonormalization as functions of matrices, on NumPy arrays and on tensors.

use numpy::{PyArray, PyArrayDyn, PyReadonlyArrayDyn, PyUntypedArrayMethods};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tch::{Kind, Tensor};

use super::enter::Enter;
use super::{group, tensor};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::linalg::low_rank::sketches;
use crate::linalg::orthonormalizer::{OPTIONS, Orthonormalizer};
use crate::linalg::qr::{self, QrMethod};
use crate::linalg::random::Key;
use crate::options::Options;

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

/// Approximate or exact polar factors by the method that `settings`, keys of a group, describe.
#[pyfunction]
fn orthonormalize<'py>(
    x: &Bound<'py, PyAny>,
    settings: &Bound<'py, PyDict>,
    epsilon: f64,
) -> PyResult<Bound<'py, PyAny>> {
    let (matrix, form) = take(x)?;
    let mut options = Options::default();
    for key in OPTIONS {
        if let Some(value) = settings.get_item(key)? {
            options.insert(key, group::option(key, &value)?);
        }
    }
    if !(epsilon.is_finite() && epsilon >= 0.0) {
        return Err(PyValueError::new_err(format!("epsilon must be a finite number >= 0, got {epsilon}")));
    }
    let py = x.py();
    let result = py.enter(move || {
        let orthonormalizer = Orthonormalizer::from_options(&options)?;
        let mut batch = as_batch(&matrix)?;
        let (b, m, n) = batch.size3()?;
        let side = |n: i64| usize::try_from(n).unwrap_or(0);
        if b > 0 && m > 0 && n > 0 {
            let dtype = DType::from_kind(batch.kind()).unwrap_or(DType::F32);
            let scratch = orthonormalizer.scratch_elements(side(m), side(n), dtype)?;
            let scratch = i64::try_from(scratch).map_err(|_| Error::Value("x is too large".into()))?;
            let scratch = Tensor::f_empty([scratch], (batch.kind(), batch.device()))?;
            orthonormalizer.run(&mut batch, epsilon, &scratch)?;
        }
        Ok(matrix)
    })?;
    give(py, &result, &form)
}

/// Orthonormal columns that span those of `x`. A sketch, where the method needs one, is the same in every call.
#[pyfunction]
fn orthonormal_columns<'py>(x: &Bound<'py, PyAny>, method: &str) -> PyResult<Bound<'py, PyAny>> {
    let (matrix, form) = take(x)?;
    let method = QrMethod::parse(method).map_err(super::error::to_python)?;
    let py = x.py();
    let result = py.enter(move || {
        let batch = as_batch(&matrix)?;
        let (_, m, r) = batch.size3()?;
        let sketch = if method == QrMethod::Rcqr && m > r && r > 0 {
            let side = |n: i64| usize::try_from(n).unwrap_or(0);
            let key = (Key { seed: 0, stream: 0 }, 0);
            Some(sketches(&[key], side(qr::sketch_rows(r, 1.25, m)), side(m), 0, 0)?)
        } else {
            None
        };
        let (orthonormal, _) = qr::orthonormalize(&batch, method, sketch.as_ref())?;
        Ok(orthonormal.f_view_as(&matrix)?)
    })?;
    give(py, &result, &form)
}

/// Adds the functions to the module.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(orthonormalize, module)?)?;
    module.add_function(wrap_pyfunction!(orthonormal_columns, module)?)
}
