//! Orthonormalization and block-wise quantization as functions, on NumPy arrays and on tensors.

use numpy::{PyArray, PyArrayDyn, PyReadonlyArrayDyn, PyUntypedArrayMethods};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tch::{Kind, Tensor};

use super::enter::Enter;
use super::error::to_python;
use super::{group, tensor};
use crate::error::{Error, Result};
use crate::linalg::basis::orthonormal_basis;
use crate::linalg::low_rank::sketches;
use crate::linalg::orthonormalizer::{OPTIONS, Orthonormalizer};
use crate::linalg::qr::{self, QrMethod};
use crate::linalg::random::Key;
use crate::session::enter_device;
use crate::spec::Options;
use crate::spec::storage::MOST_BLOCK;
use crate::tensor::{DType, Device, require_memory};
use crate::threads;

/// Sources of the kernels of polar factors.
const POLAR: &[&str] = &["updates.cu", "symmetric_mma.cu", "sums.cu", "totals.cu"];
/// Sources of the kernels of orthonormal columns: libtorch computes them.
const COLUMNS: &[&str] = &[];
/// Sources of the kernels of 8-bit quantization.
const QUANTIZATION: &[&str] = &["updates.cu", "quantized.cu"];

/// Kind of the object that came from Python, which decides how a result is sent back.
enum Form {
    Tensor,
    Array32,
    Array64,
    /// Array of bytes.
    Quantized,
}

/// An argument of a function.
struct Taken {
    tensor: Tensor,
    form: Form,
    /// Device that computes: the argument's, for arrays the host.
    place: Device,
}

/// Copies the argument into a contiguous tensor of its own.
fn take(x: &Bound<'_, PyAny>) -> PyResult<Taken> {
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
        return Ok(Taken { tensor: owned(&array)?, form: Form::Array32, place: Device::Cpu });
    }
    if let Ok(array) = x.extract::<PyReadonlyArrayDyn<'_, f64>>() {
        return Ok(Taken { tensor: owned(&array)?, form: Form::Array64, place: Device::Cpu });
    }
    let tensor = tensor::unpack(x, "x")?;
    let place = Device::counted(&tensor).map_err(to_python)?;
    if !matches!(tensor.kind(), Kind::Float | Kind::Double | Kind::BFloat16 | Kind::Half) {
        return Err(PyTypeError::new_err(format!("x must be real floating-point, got {:?}", tensor.kind())));
    }
    let tensor = own(x.py(), tensor)?;
    Ok(Taken { tensor, form: Form::Tensor, place })
}

/// A contiguous copy of a tensor that a caller has.
fn own(py: Python<'_>, tensor: Tensor) -> PyResult<Tensor> {
    py.enter(move || {
        require_memory(&tensor)?;
        Ok(tensor.f_detach()?.f_contiguous()?.f_detach_copy()?)
    })
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
        Form::Quantized => Ok(array::<u8>(py, tensor)?.into_any()),
    }
}

/// Views `[..., m, n]` as `[B, m, n]`.
fn as_batch(x: &Tensor) -> Result<Tensor> {
    let size = x.size();
    let [.., m, n] = size[..] else {
        return Err(Error::Value(format!("x must have at least two dimensions, got shape {size:?}")));
    };
    let count = size[..size.len() - 2].iter().product::<i64>();
    Ok(x.f_view([count, m, n])?)
}

/// Approximate or exact polar factors by the method that `settings`, keys of a group, describe. `stream` is torch's current one
/// where `x` is on a device.
#[pyfunction]
#[pyo3(signature = (x, settings, epsilon, stream=0))]
fn orthonormalize<'py>(
    x: &Bound<'py, PyAny>,
    settings: &Bound<'py, PyDict>,
    epsilon: f64,
    stream: usize,
) -> PyResult<Bound<'py, PyAny>> {
    let Taken { tensor: matrix, form, place } = take(x)?;
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
        let _there = enter_device(place, stream, false, POLAR)?;
        threads::set(usize::try_from(tch::get_num_threads()).unwrap_or(1));
        options.on_device = place != Device::Cpu;
        options.matrix_units = matrix.device().is_cuda();
        let orthonormalizer = Orthonormalizer::from_options(&options)?;
        let mut batch = as_batch(&matrix)?;
        let (b, m, n) = batch.size3()?;
        let side = |n: i64| usize::try_from(n).unwrap_or(0);
        if b > 0 && m > 0 && n > 0 {
            let dtype = DType::from_kind(batch.kind()).unwrap_or(DType::F32);
            let scratch = orthonormalizer.scratch_elements(side(m), side(n), dtype, false)?;
            let scratch = i64::try_from(scratch).map_err(|_| Error::Value("x is too large".into()))?;
            let mut scratch = Tensor::f_empty([scratch], (batch.kind(), batch.device()))?;
            orthonormalizer.run(&mut batch, epsilon, &mut scratch)?;
        }
        Ok(matrix)
    })?;
    give(py, &result, &form)
}

/// Orthonormal columns that span those of `x`. A sketch, where the method needs one, is the same in every call. `stream` is
/// torch's current one where `x` is on a device.
#[pyfunction]
#[pyo3(signature = (x, method, stream=0))]
fn orthonormal_columns<'py>(
    x: &Bound<'py, PyAny>,
    method: &str,
    stream: usize,
) -> PyResult<Bound<'py, PyAny>> {
    let Taken { tensor: matrix, form, place } = take(x)?;
    let method = QrMethod::parse(method).map_err(to_python)?;
    let py = x.py();
    let result = py.enter(move || {
        let _there = enter_device(place, stream, false, COLUMNS)?;
        let mut columns = as_batch(&matrix)?;
        let (_, m, r) = columns.size3()?;
        orthonormal_basis(&mut columns, method, |which| {
            let side = |n: i64| usize::try_from(n).unwrap_or(0);
            let key = (Key { seed: 0, stream: 0 }, 0);
            sketches(&vec![key; which.len()], side(qr::sketch_rows(r, 1.25, m)), side(m), 0, 0)
        })?;
        Ok(matrix)
    })?;
    give(py, &result, &form)
}

/// Copies quantized values into a contiguous tensor of their own.
fn take_quantized(quantized: &Bound<'_, PyAny>) -> PyResult<Taken> {
    let wrong = |e: tch::TchError| PyValueError::new_err(e.to_string());
    if let Ok(array) = quantized.extract::<PyReadonlyArrayDyn<'_, u8>>() {
        let shape: Vec<i64> =
            array.shape().iter().map(|&d| i64::try_from(d)).collect::<std::result::Result<_, _>>()?;
        let values: Vec<u8> = array.as_array().iter().copied().collect();
        let tensor = Tensor::f_from_slice(&values).and_then(|t| t.f_view(shape.as_slice())).map_err(wrong)?;
        return Ok(Taken { tensor, form: Form::Array32, place: Device::Cpu });
    }
    let tensor = tensor::unpack(quantized, "quantized")?;
    let place = Device::counted(&tensor).map_err(to_python)?;
    if tensor.kind() != Kind::Uint8 {
        return Err(PyTypeError::new_err(format!("quantized must be uint8, got {:?}", tensor.kind())));
    }
    let tensor = own(quantized.py(), tensor)?;
    Ok(Taken { tensor, form: Form::Tensor, place })
}

/// The shape of the scales of a tensor.
fn scales_shape(size: &[i64], block: usize) -> PyResult<Vec<i64>> {
    if !block.is_power_of_two() || block > MOST_BLOCK {
        let text = format!("block_size must be a power of two of at most {MOST_BLOCK}, got {block}");
        return Err(PyValueError::new_err(text));
    }
    let mut shape = size.to_vec();
    match shape.last_mut() {
        Some(last) => *last = (*last + i64::try_from(block)? - 1) / i64::try_from(block)?,
        None => return Err(PyValueError::new_err("a tensor of at least one dimension is needed, got ()")),
    }
    Ok(shape)
}

/// Returns the quantized values and the scales of blocks along the last dimension. `stream` is torch's current one where
/// `x` is on a device.
#[pyfunction]
#[pyo3(signature = (x, block_size, signed, stream=0))]
fn quantize_blockwise<'py>(
    x: &Bound<'py, PyAny>,
    block_size: usize,
    signed: bool,
    stream: usize,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let Taken { tensor: values, form, place } = take(x)?;
    let shape = scales_shape(&values.size(), block_size)?;
    let py = x.py();
    let (quantized, scales) = py.enter(move || {
        let _there = enter_device(place, stream, true, QUANTIZATION)?;
        let quantized = Tensor::f_zeros(values.size(), (Kind::Uint8, values.device()))?;
        let scales = Tensor::f_zeros(shape, (Kind::Float, values.device()))?;
        tensor::convert_q8([&quantized, &scales, &values], place, block_size, [signed, true])?;
        Ok((quantized, scales))
    })?;
    let (for_quantized, for_scales) = match form {
        Form::Tensor => (Form::Tensor, Form::Tensor),
        _ => (Form::Quantized, Form::Array32),
    };
    Ok((give(py, &quantized, &for_quantized)?, give(py, &scales, &for_scales)?))
}

/// Dequantizes quantized values with their scales to float32. `stream` is torch's current one where they are on a device.
#[pyfunction]
#[pyo3(signature = (quantized, absmax, block_size, signed, stream=0))]
fn dequantize_blockwise<'py>(
    quantized: &Bound<'py, PyAny>,
    absmax: &Bound<'py, PyAny>,
    block_size: usize,
    signed: bool,
    stream: usize,
) -> PyResult<Bound<'py, PyAny>> {
    let Taken { tensor: quantized, form, place } = take_quantized(quantized)?;
    let scales = take(absmax)?.tensor;
    if scales.device() != quantized.device() {
        return Err(PyValueError::new_err(format!(
            "quantized and absmax must be on one device, got {:?} and {:?}",
            quantized.device(),
            scales.device()
        )));
    }
    let shape = scales_shape(&quantized.size(), block_size)?;
    if scales.kind() != Kind::Float || scales.size() != shape {
        return Err(PyValueError::new_err(format!(
            "absmax must be float32 of shape {shape:?} for quantized values of shape {:?} in blocks of {block_size}, got {:?} {:?}",
            quantized.size(),
            scales.kind(),
            scales.size()
        )));
    }
    let py = absmax.py();
    let values = py.enter(move || {
        let _there = enter_device(place, stream, true, QUANTIZATION)?;
        let values = Tensor::f_zeros(quantized.size(), (Kind::Float, quantized.device()))?;
        tensor::convert_q8([&quantized, &scales, &values], place, block_size, [signed, false])?;
        Ok(values)
    })?;
    give(py, &values, &form)
}

/// Adds the functions to the module.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(orthonormalize, module)?)?;
    module.add_function(wrap_pyfunction!(orthonormal_columns, module)?)?;
    module.add_function(wrap_pyfunction!(quantize_blockwise, module)?)?;
    module.add_function(wrap_pyfunction!(dequantize_blockwise, module)?)
}
