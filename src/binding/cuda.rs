//! Settings of the CUDA side of the core that Python makes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use tch::Tensor;

use super::enter::Enter as _;
use super::error::to_python;
use super::tensor::unpack;
use crate::error::{Error, Result};
use crate::kernels::cuda::State;
use crate::kernels::{self, Content, Family, Tier, cuda};
use crate::linalg::views;
use crate::tensor;

/// Keeps machine code that is compiled on this machine in a folder; None keeps none. NVRTC is looked for at the paths that
/// `nvrtc` has, in their order, and then by the loader. `emulated`: memory of the host
/// counts as memory of device 0, which is refused unless the driver is the emulator of the tests, or libtorch alone computes.
/// `tier` says what does: `"auto"`, `"libtorch"` or `"kernels"`. `only_asked`: a step uses no source of kernels that was not loaded
/// before it.
#[pyfunction]
#[pyo3(signature = (folder, nvrtc=Vec::new(), *, tier="auto", emulated=false, only_asked=false))]
pub(super) fn prepare_devices(
    folder: Option<PathBuf>,
    nvrtc: Vec<PathBuf>,
    tier: &str,
    emulated: bool,
    only_asked: bool,
) -> PyResult<()> {
    cuda::keep_in(folder);
    cuda::use_only_asked(only_asked);
    cuda::look_for_nvrtc_at(nvrtc);
    let tier =
        Tier::named(tier).ok_or_else(|| PyValueError::new_err(format!("there is no tier {tier:?}")))?;
    tier.set();
    match (emulated, tier) {
        (false, _) => Ok(()),
        (true, Tier::Libtorch) => {
            tensor::emulate();
            Ok(())
        }
        (true, _) => cuda::emulate().map_err(to_python),
    }
}

/// Has the memory of a tensor of the host count as that of the emulated device with this number, or of none: for tests of
/// several devices.
#[pyfunction]
pub(super) fn count_as(tensor: &Bound<'_, PyAny>, number: Option<u8>) -> PyResult<()> {
    tensor::emulate_at(&unpack(tensor, "tensor")?, number.map_or(tensor::Device::Cpu, tensor::Device::Cuda));
    Ok(())
}

/// A source's name, its state ("not loaded", "loaded" or "off"), the origin of its machine code, the seconds that loading took
/// and why it is off.
type SourceState = (&'static str, &'static str, Option<&'static str>, f64, Option<String>);

fn states_of(number: usize) -> Result<Vec<SourceState>> {
    let described = |(name, state): (&'static str, State)| match state {
        State::NotLoaded => (name, "not loaded", None, 0.0, None),
        State::Loaded { origin, seconds } => (name, "loaded", Some(origin.name()), seconds, None),
        State::Off(reason) => (name, "off", None, 0.0, Some(reason)),
    };
    Ok(kernels::states(number)?.into_iter().map(described).collect())
}

/// The state of each CUDA source on a device, without loading any.
#[pyfunction]
pub(super) fn source_states(py: Python<'_>, device: usize) -> PyResult<Vec<SourceState>> {
    py.enter(|| states_of(device))
}

/// Loads sources by name on a device where they are missing, outside of a capture of the stream, and returns the states of all.
/// One that cannot be loaded is off.
#[pyfunction]
pub(super) fn load_sources(
    py: Python<'_>,
    device: usize,
    stream: usize,
    names: Vec<String>,
) -> PyResult<Vec<SourceState>> {
    py.enter(move || {
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        drop(kernels::enter_with(device, stream, &names, true)?);
        states_of(device)
    })
}

/// Turns a source off for this process, on one device or on every one: nothing of it is launched any more.
#[pyfunction]
#[pyo3(signature = (name, reason, device=None))]
pub(super) fn turn_source_off(
    py: Python<'_>,
    name: &str,
    reason: &str,
    device: Option<usize>,
) -> PyResult<()> {
    py.enter(|| match device {
        Some(device) => kernels::turn_off_on(device, name, reason),
        None => kernels::turn_off(name, reason),
    })
}

/// Name of a device, its compute capability, its multiprocessors and the version of CUDA of its driver.
#[pyfunction]
pub(super) fn device_facts(py: Python<'_>, device: usize) -> PyResult<(String, String, u32, String)> {
    let found = py.enter(|| cuda::facts(device))?;
    let capability = found.capability.map(|(major, minor)| format!("{major}.{minor}"));
    let driver = format!("{}.{}", found.driver / 1000, found.driver % 1000 / 10);
    Ok((found.name, capability.unwrap_or_default(), found.multiprocessors, driver))
}

/// Has no operation on a device use these sources of kernels until this is called again.
#[pyfunction]
pub(super) fn hide_sources(py: Python<'_>, device: usize, names: Vec<String>) -> PyResult<()> {
    py.enter(move || cuda::hide(device, names))
}

/// SHA-256 of the machine code of each source that is loaded on a device, by name.
#[pyfunction]
pub(super) fn source_images(py: Python<'_>, device: usize) -> PyResult<BTreeMap<&'static str, String>> {
    Ok(py.enter(|| cuda::images(device))?.into_iter().collect())
}

/// Copies the rectangle of a matrix that begins at `corner` to `to`, and writes the sum of the matrix's rows times a factor to
/// `total`, as steps on several ranks copy and add up their messages: for checks of that on one device.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "Python names them")]
pub(super) fn exchange_on_device(
    py: Python<'_>,
    device: usize,
    stream: usize,
    matrix: &Bound<'_, PyAny>,
    corner: (usize, usize),
    to: &Bound<'_, PyAny>,
    factor: f64,
    total: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let [matrix, mut to, mut total] = [unpack(matrix, "matrix")?, unpack(to, "to")?, unpack(total, "total")?];
    py.enter(move || {
        let number =
            u8::try_from(device).map_err(|_| Error::Value(format!("there is no device {device}")))?;
        let (place, ((row, col), of)) = (tensor::Device::Cuda(number), (corner, |x: &Tensor| x.size2()));
        let ((rows, cols), (high, wide)) = (of(&matrix)?, of(&to)?);
        let [rows, cols, high, wide] = [rows, cols, high, wide].map(|n| usize::try_from(n).unwrap_or(0));
        if row + high > rows || col + wide > cols || total.numel() != cols {
            return Err(Error::Value("the rectangle or the total does not fit the matrix".into()));
        }
        let _there = kernels::enter(device, stream, false, &["copies.cu", "messages.cu"])?;
        let from = views::read(&matrix)?.on(place);
        kernels::copy(vec![kernels::Copy {
            from: from.matrix(row * cols + col, [high, wide], cols),
            to: views::write(&mut to)?.on(place).into_matrix(0, [high, wide], wide),
        }])?;
        let messages = kernels::Messages { all: from, pitch: cols, count: rows };
        kernels::sum(&messages, factor, views::write(&mut total)?.on(place))
    })
}

/// Returns the classes of symmetric products; each class gets one choice of kernel or fallback. A class is rows, columns of
/// the factors, number of matrices, and whether something is added.
#[pyfunction]
pub(super) fn symmetric_classes() -> Vec<(usize, usize, usize, bool)> {
    kernels::ProductClass::all().into_iter().map(|c| (c.rows, c.depth, c.count, c.adds)).collect()
}

/// Says for each class on a device whether the kernel is the faster way, None where that was not measured; an empty list where
/// nothing was.
#[pyfunction]
pub(super) fn set_symmetric_wins(device: usize, wins: Vec<Option<bool>>) {
    kernels::set_measured(device, wins);
}

/// Computes `out <- A Aᵀ`, plus `addend` if given, of bfloat16 or float16 `[count, rows, columns]` on a device. Uses the
/// kernel that steps would use, even where it is slower than the fallback, or the warpgroup kernel in `blocks` blocks if
/// given. Returns false where there is no kernel.
#[pyfunction]
#[pyo3(signature = (device, stream, out, a, addend=None, blocks=None))]
pub(super) fn symmetric_product_on_device(
    py: Python<'_>,
    device: usize,
    stream: usize,
    out: &Bound<'_, PyAny>,
    a: &Bound<'_, PyAny>,
    addend: Option<&Bound<'_, PyAny>>,
    blocks: Option<u32>,
) -> PyResult<bool> {
    let (out, a) = (unpack(out, "out")?, unpack(a, "a")?);
    let addend = addend.map(|addend| unpack(addend, "addend")).transpose()?;
    py.enter(move || {
        let by = if blocks.is_some() { "symmetric_wgmma.cu" } else { "symmetric_mma.cu" };
        let _there = kernels::enter(device, stream, false, &[by])?;
        let add: Vec<(f64, &Tensor)> = addend.iter().map(|addend| (1.0, addend)).collect();
        match blocks {
            Some(blocks) => kernels::symmetric_product_by_groups(&out, [&a, &a], &add, blocks),
            None => kernels::symmetric_product(&out, [&a, &a], &add, [1.0, 0.0]),
        }
    })
}

/// Why the driver cannot give the launches of a graph other parameters, if it cannot.
#[pyfunction]
pub(super) fn graphs_refusal() -> PyResult<Option<String>> {
    cuda::graphs_refusal().map_err(to_python)
}

/// Name of the source that a kernel is from, by the kernel's whole name.
#[pyfunction]
pub(super) fn source_of_kernel(name: &str) -> Option<&'static str> {
    kernels::source_of(name)
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
