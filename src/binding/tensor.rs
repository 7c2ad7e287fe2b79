//! Python tensors to libtorch tensors that share their memory, and back. All unsafe handling of objects is here.

use std::ffi::{CStr, c_char};

use pyo3::exceptions::{PyImportError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};
use pyo3::{Borrowed, ffi, intern};
use tch::Tensor;
use tch::python::CPyObject;

use super::enter::Enter;
use super::error::to_python;
use crate::error::{Error, Result};
use crate::kernels::{self, Job};
use crate::linalg::random::{Key, fill_normal as normals};
use crate::linalg::sketch::Omega;
use crate::tensor::{Blocks, DType, Device, Encoding, FlatPtr, Owner, has_dispatch, prefetch};

static TENSOR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static PARAMETER: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// Index of the word of a dict that points to its entries. The entries are prefetched by it, not read.
const DICT_KEYS: usize = 4;
/// Number of dicts ahead of the current one that are prefetched.
const DICTS_AHEAD: usize = 12;

// SAFETY: as `src/torch_shim.cpp` defines it.
unsafe extern "C" {
    fn oxidion_shim_abi() -> *const c_char;
}

/// `ImportError` unless the shim over libtorch that is open was made for this core.
pub(super) fn check_shim() -> PyResult<()> {
    // SAFETY: the function takes nothing, and returns a text that ends in a zero and is never freed.
    let found = unsafe { CStr::from_ptr(oxidion_shim_abi()) }.to_string_lossy();
    if found == env!("OXIDION_SHIM_ABI") {
        return Ok(());
    }
    Err(PyImportError::new_err(format!(
        "liboxidion_torch.so has interface {found}, the extension needs {}: they are of different builds. Reinstall \
         oxidion, or run `make build` in the source directory",
        env!("OXIDION_SHIM_ABI")
    )))
}

/// Tests whether the object is a tensor or parameter of torch's own class: nothing to unwrap.
pub(super) fn is_plain(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let (py, ty) = (object.py(), object.get_type());
    Ok(ty.is(TENSOR.import(py, "torch", "Tensor")?)
        || ty.is(PARAMETER.import(py, "torch.nn", "Parameter")?))
}

/// A tensor that shares the object's memory. Subclasses with a dispatch of their own are refused: an operation on
/// them would re-enter Python and act on something else than their memory.
pub(super) fn unpack(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Tensor> {
    let py = object.py();
    let no_memory = |object: &Bound<'_, PyAny>| {
        let name = object.get_type().name().map_or_else(|_| "another object".into(), |name| name.to_string());
        PyTypeError::new_err(format!("{what} must be a torch.Tensor with memory of its own, got {name}"))
    };
    if !is_plain(object)? {
        let tensor = TENSOR.import(py, "torch", "Tensor")?;
        let dispatch = intern!(py, "__torch_dispatch__");
        // Not by `isinstance`, which asks the object's attribute `__class__`.
        // SAFETY: both are objects that are borrowed, the second one a type.
        let is_tensor = unsafe { ffi::PyObject_TypeCheck(object.as_ptr(), tensor.as_type_ptr()) } != 0;
        if !is_tensor || !object.get_type().getattr(dispatch)?.is(&tensor.getattr(dispatch)?) {
            return Err(no_memory(object));
        }
    }
    // SAFETY: the object is an instance of torch.Tensor, checked above, and alive while `object` borrows it.
    let unpacked = unsafe { Tensor::pyobject_unpack(object.as_ptr().cast::<CPyObject>()) };
    let tensor = unpacked
        .map_err(|e| to_python(e.into()))?
        .ok_or_else(|| PyTypeError::new_err(format!("{what} must be a torch.Tensor")))?;
    // The tensor itself says it too: an object may have been given another class.
    if has_dispatch(&tensor) {
        return Err(no_memory(object));
    }
    if Device::of(&tensor).is_err() {
        return Err(elsewhere(object, what)?);
    }
    Ok(tensor)
}

/// The complaint about a tensor that is neither on the CPU nor on a CUDA device, with torch's name of its device.
fn elsewhere(object: &Bound<'_, PyAny>, what: &str) -> PyResult<PyErr> {
    let device = object.getattr("device")?.str()?.to_string();
    let help = if device.starts_with("meta") {
        "It has no memory yet: call model.to_empty(device=...), initialize the parameters, and make the optimizer after \
         that, as to_empty() replaces them"
    } else {
        "Move the model, and make the optimizer after that"
    };
    Ok(PyValueError::new_err(format!(
        "{what}: tensors must be on the CPU or on a CUDA device, got {device}. {help}"
    )))
}

/// The owner of a tensor. The caller keeps the object for as long as it uses the owner.
pub(super) fn owner(object: &Bound<'_, PyAny>) -> Owner {
    // SAFETY: a tensor's object is longer than four words; `PySession` keeps it as long as the session that has the owner.
    unsafe { Owner::new(object.as_ptr().cast()) }
}

/// The states of the parameters as they were bound: each parameter with its dict in `optimizer.state` and how many bound
/// entries that has, and the keys and values of all, in order. Entries of other objects, and those of a parameter under
/// keys that are not bound, are their owner's: nothing is known of them.
#[derive(Debug, Default)]
pub(super) struct Known {
    owners: Vec<(usize, usize, usize)>,
    entries: Vec<(usize, usize)>,
    /// All parameters, sorted.
    params: Vec<usize>,
    /// Bound keys with their text, sorted.
    keys: Vec<(usize, String)>,
}

impl Known {
    /// Records the entries of a state dict of dicts that are the bound `states` of `params`. `keep` gets all of them: no
    /// other object can get their addresses as long as it keeps them.
    pub(super) fn of(
        state: &Bound<'_, PyDict>,
        params: &[Py<PyAny>],
        states: &[Vec<Py<PyAny>>],
        keep: &mut Vec<Py<PyAny>>,
    ) -> PyResult<Self> {
        let address = |object: &Py<PyAny>| object.as_ptr() as usize;
        let mut places: Vec<_> = params.iter().map(address).zip(states).collect();
        places.sort_unstable_by_key(|(param, _)| *param);
        let mut known = Self { params: places.iter().map(|(param, _)| *param).collect(), ..Self::default() };
        for (param, own) in state.iter() {
            let Ok(at) = known.params.binary_search(&(param.as_ptr() as usize)) else { continue };
            let before = known.entries.len();
            for (key, value) in own.cast::<PyDict>()?.iter() {
                if !places[at].1.iter().any(|state| state.is(&value)) {
                    continue;
                }
                let here = key.as_ptr() as usize;
                known.entries.push((here, value.as_ptr() as usize));
                known.keys.push((here, key.extract()?));
                keep.extend([key.unbind(), value.unbind()]);
            }
            let count = known.entries.len() - before;
            known.owners.push((param.as_ptr() as usize, own.as_ptr() as usize, count));
            keep.extend([param.unbind(), own.unbind()]);
        }
        known.keys.sort_unstable();
        known.keys.dedup();
        Ok(known)
    }

    /// Tests whether a state dict still holds the same states: no hashing, no look-up, no counting of references.
    pub(super) fn is(&self, state: &Bound<'_, PyDict>) -> bool {
        let mut entries = self.entries.as_slice();
        let mut number = 0;
        let same = each_entry(state, |param, own| {
            // The dicts of parameters further on are asked for before they are read.
            if let Some((_, ahead, _)) = self.owners.get(number + DICTS_AHEAD) {
                prefetch(*ahead);
            }
            if let Some((_, ahead, _)) = self.owners.get(number + DICTS_AHEAD / 2) {
                // SAFETY: it is one of the dicts that are kept alive, and no dict is shorter than this.
                let keys = unsafe { (*ahead as *const usize).add(DICT_KEYS).read() };
                prefetch(keys);
                prefetch(keys.wrapping_add(64));
            }
            let (param, place) = (param.as_ptr() as usize, own.as_ptr() as usize);
            let Some(&(_, dict, count)) = self.owners.get(number).filter(|(known, _, _)| *known == param)
            else {
                return self.params.binary_search(&param).is_err();
            };
            let (Ok(own), true) = (own.cast::<PyDict>(), dict == place) else { return false };
            let (bound, rest) = entries.split_at(count.min(entries.len()));
            (number, entries) = (number + 1, rest);
            let mut left = bound.iter();
            let same = each_entry(&own, |key, value| {
                let here = (key.as_ptr() as usize, value.as_ptr() as usize);
                if left.as_slice().first() == Some(&here) {
                    left.next();
                    return true;
                }
                !self.is_bound(key, bound)
            });
            same && left.len() == 0
        });
        same && number == self.owners.len()
    }

    /// Tests whether an object is a key of these entries or equal to one.
    fn is_bound(&self, key: Borrowed<'_, '_, PyAny>, entries: &[(usize, usize)]) -> bool {
        let Ok(text) = key.extract::<String>() else { return false };
        entries.iter().any(|(known, _)| {
            let at = self.keys.binary_search_by_key(known, |(address, _)| *address);
            at.is_ok_and(|at| self.keys[at].1 == text)
        })
    }
}

/// Calls `each` for every entry of a dict until it returns false; true if it never did. `each` runs no Python code.
fn each_entry(
    dict: &Bound<'_, PyDict>,
    mut each: impl FnMut(Borrowed<'_, '_, PyAny>, Borrowed<'_, '_, PyAny>) -> bool,
) -> bool {
    let (mut at, mut key, mut value) = (0, std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the interpreter is attached, and nothing changes the dict meanwhile; what it gives is borrowed from it.
    while unsafe { ffi::PyDict_Next(dict.as_ptr(), &raw mut at, &raw mut key, &raw mut value) } != 0 {
        // SAFETY: both are objects of the dict, which holds them until `each` returns.
        let [key, value] = [key, value].map(|object| unsafe { Borrowed::from_ptr(dict.py(), object) });
        if !each(key, value) {
            return false;
        }
    }
    true
}

/// A Python tensor for a libtorch tensor.
pub(super) fn pack<'py>(py: Python<'py>, tensor: &Tensor) -> PyResult<Bound<'py, PyAny>> {
    let object = tensor.pyobject_wrap().map_err(|e| to_python(e.into()))?;
    // SAFETY: `pyobject_wrap` returns a new reference to a live object, or null with a Python error set.
    unsafe { Bound::from_owned_ptr_or_err(py, object.cast()) }
}

/// Fills a contiguous float32 CPU tensor with N(0, 1) numbers that depend only on seed, stream, tag, step and position.
/// The tensor is the part of a larger one of shape `shape` that `spans` (start and length by dimension) selects;
/// without them it is everything.
#[pyfunction]
#[pyo3(signature = (tensor, seed, stream, shape=None, spans=None, *, tag=0, step=0))]
pub(super) fn fill_normal(
    tensor: &Bound<'_, PyAny>,
    seed: u64,
    stream: u64,
    shape: Option<Vec<usize>>,
    spans: Option<Vec<(usize, usize)>>,
    tag: u32,
    step: u64,
) -> PyResult<()> {
    let target = unpack(tensor, "tensor")?;
    require_cpu(&target, "tensor")?;
    tensor.py().enter(move || {
        let flat = FlatPtr::of(&target)?;
        if flat.dtype() != DType::F32 {
            return Err(Error::Type("normal numbers are made in float32".into()));
        }
        let mut shape = shape.unwrap_or_else(|| vec![flat.len()]);
        let mut spans = spans.unwrap_or_else(|| vec![(0, flat.len())]);
        // Whole rows lie together: they count as one dimension with the one before.
        while let ([.., _, size], [.., _, (0, len)]) = (shape.as_slice(), spans.as_slice())
            && size == len
        {
            let size = *size;
            shape.pop();
            spans.pop();
            shape.iter_mut().next_back().into_iter().for_each(|n| *n *= size);
            spans
                .iter_mut()
                .next_back()
                .into_iter()
                .for_each(|(start, n)| (*start, *n) = (*start * size, *n * size));
        }
        // SAFETY: `target` is alive, and Python's caller does not touch it meanwhile.
        let mut view = unsafe { flat.view_mut(None) };
        let numbers = view.as_mut_slice::<f32>()?;
        let run = spans.last().map_or(1, |(_, len)| *len).max(1);
        for (row, out) in numbers.chunks_mut(run).enumerate() {
            normals(out, Key { seed, stream }, tag, step, first_index(row, &shape, &spans));
        }
        Ok(())
    })
}

/// Writes matrix `index` of the sparse sign matrices of this shape that belong to seed, stream, tag and step to a contiguous
/// float64 CPU tensor of two dimensions.
#[pyfunction]
pub(super) fn fill_signs(
    tensor: &Bound<'_, PyAny>,
    seed: u64,
    stream: u64,
    tag: u32,
    step: u64,
    index: usize,
) -> PyResult<()> {
    let target = unpack(tensor, "tensor")?;
    require_cpu(&target, "tensor")?;
    tensor.py().enter(move || {
        let flat = FlatPtr::of(&target)?;
        let (Ok((rows, cols)), DType::F64) = (target.size2(), flat.dtype()) else {
            return Err(Error::Type("signs are written to float64 matrices".into()));
        };
        let shape = [rows, cols].map(|n| usize::try_from(n).unwrap_or(0));
        Omega { key: Key { seed, stream }, tag, step, index, shape }
            // SAFETY: as in `fill_normal`.
            .write(&mut unsafe { flat.view_mut(None) })
    })
}

/// The position in a tensor of shape `shape` of the first element of row `row` of the part that `spans` selects.
fn first_index(row: usize, shape: &[usize], spans: &[(usize, usize)]) -> u64 {
    let Some((&(last_start, _), leading)) = spans.split_last() else { return 0 };
    let (mut rest, mut step) = (row, shape.last().copied().unwrap_or(1));
    let mut index = last_start;
    for (&size, &(start, len)) in shape.iter().rev().skip(1).zip(leading.iter().rev()) {
        index += (start + rest % len.max(1)) * step;
        rest /= len.max(1);
        step *= size;
    }
    index as u64
}

/// Quantizes (`to`) or dequantizes with the signed or unsigned codebook, in blocks of `block` elements along the last
/// dimension, on the device which the thread has entered. The tensors (quantized values, scales, numbers) are used by the
/// caller alone.
///
/// # Errors
/// `Error::Internal` for tensors that are not contiguous.
pub(super) fn convert_q8(
    [q8, scales, numbers]: [&Tensor; 3],
    place: Device,
    block: usize,
    [signed, to]: [bool; 2],
) -> Result<()> {
    let width = q8.size().last().and_then(|n| usize::try_from(*n).ok()).unwrap_or(0);
    let encoding =
        Encoding::Blocks(Blocks { scales: FlatPtr::of(scales)?.on(place), width, block, rounding: None });
    let q8 = FlatPtr::typed(q8, if signed { DType::Q8 } else { DType::UQ8 })?.on(place);
    let numbers = FlatPtr::of(numbers)?.on(place);
    if q8.is_empty() {
        return Ok(());
    }
    // SAFETY: `functional.rs` has made the tensors that are written, or copied what it was given; they are alive.
    let (q8, numbers) = unsafe { (q8.view_mut(Some(&encoding)), numbers.view_mut(None)) };
    let (from, to) = if to { (numbers, q8) } else { (q8, numbers) };
    kernels::run(&kernels::Convert { factor: 1.0 }, &mut [Job { read: [from.into_view()], write: [to] }])
}

/// `ValueError` unless the tensor is on the CPU.
pub(super) fn require_cpu(tensor: &Tensor, name: &str) -> PyResult<()> {
    match tensor.device() {
        tch::Device::Cpu => Ok(()),
        other => Err(PyValueError::new_err(format!("{name} must be on the CPU, got {other:?}"))),
    }
}
