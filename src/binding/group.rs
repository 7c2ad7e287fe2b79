//! Groups (dicts) to options and live scalars.

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString};
use tch::Tensor;

use super::{defaults, tensor};
use crate::algorithm::{AnyAlgorithm, FALLBACK, option_keys};
use crate::error::Error;
use crate::linalg::orthonormalizer::Function;
use crate::plan::{GroupSpec, Place};
use crate::session::{AverageRule, AverageStep};
use crate::spec::{Callback, Hyper, OptionValue, Options};
use crate::tensor::{DType, Device, Dispatch, is_emulated, look_at_what_is_in_use, require_memory};

/// The parameters of a group.
pub(super) fn params<'py>(group: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyList>> {
    required(group, "params")?.cast_into::<PyList>().map_err(Into::into)
}

fn required<'py>(group: &Bound<'py, PyDict>, key: &str) -> PyResult<Bound<'py, PyAny>> {
    group
        .get_item(key)?
        .ok_or_else(|| PyValueError::new_err(format!("the group has no '{key}', which its algorithm needs")))
}

/// The value of a key of every group, or its default.
fn common<'py>(group: &Bound<'py, PyDict>, key: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyAny>> {
    match group.get_item(key)? {
        Some(value) => Ok(value),
        None => defaults::find(group.py(), FALLBACK, key.to_str()?)?
            .map_or_else(|| required(group, key.to_str()?), Ok),
    }
}

/// Facts about a group that the plan reads. Keys that the group lacks have the defaults of its algorithm.
pub(super) fn spec(group: &Bound<'_, PyDict>) -> PyResult<GroupSpec> {
    let mut options = Options::default();
    let algorithm: String = required(group, "algorithm")?.extract()?;
    for key in option_keys(&algorithm) {
        let value = match group.get_item(key)? {
            Some(value) => Some(value),
            None => defaults::find(group.py(), &algorithm, key)?,
        };
        if let Some(value) = value {
            options.insert(key, option(key, &value)?);
        }
    }
    Ok(GroupSpec { algorithm, options })
}

/// Reads the place of the parameters of a group without tensors, as of a simulated mesh, from its key "device".
pub(super) fn place(group: &Bound<'_, PyDict>) -> PyResult<Place> {
    let device = group.get_item("device")?.map(|device| device.extract::<String>()).transpose()?;
    let there = |number| Place { device: Device::Cuda(number), matrix_units: true, multiprocessors: 0 };
    Ok(match device.as_deref().and_then(|device| device.strip_prefix("cuda")) {
        Some(number) => there(number.strip_prefix(':').and_then(|number| number.parse().ok()).unwrap_or(0)),
        None if is_emulated() => Place { matrix_units: false, ..there(0) },
        None => Place::HOST,
    })
}

/// One setting.
pub(super) fn option(key: &str, value: &Bound<'_, PyAny>) -> PyResult<OptionValue> {
    if value.is_none() {
        Ok(OptionValue::None)
    } else if value.is_instance_of::<PyBool>() {
        Ok(OptionValue::Bool(value.extract()?))
    } else if value.is_instance_of::<PyInt>() {
        // A number may be written as an integer of any size.
        value.extract().map(OptionValue::Int).or_else(|_| Ok(OptionValue::Float(value.extract()?)))
    } else if value.is_instance_of::<PyFloat>() {
        Ok(OptionValue::Float(value.extract()?))
    } else if value.is_instance_of::<PyString>() {
        Ok(OptionValue::Str(value.extract()?))
    } else if value.get_type().name()? == "dtype" {
        Ok(OptionValue::Str(value.str()?.to_string().trim_start_matches("torch.").into()))
    } else if value.is_callable() {
        callback(value)
    } else {
        listed(value)
            .and_then(|list| of_list(&list))
            .map_err(|_| PyValueError::new_err(format!("{key} has a value of no known kind: {value}")))
    }
}

/// Returns a list of the elements of a sequence: the length that an object reports may be wrong.
fn listed<'py>(value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
    value.py().get_type::<PyList>().call1((value,))?.cast_into().map_err(Into::into)
}

/// One setting that is a list.
fn of_list(list: &Bound<'_, PyList>) -> PyResult<OptionValue> {
    if let Ok(ints) = list.extract::<Vec<i64>>() {
        Ok(OptionValue::Ints(ints))
    } else if let Ok(numbers) = list.extract::<Vec<f64>>() {
        Ok(OptionValue::Floats(numbers))
    } else if let Ok(words) = list.extract::<Vec<String>>() {
        Ok(OptionValue::Strs(words))
    } else {
        let rows = list.iter().map(|row| listed(&row)?.extract::<Vec<f64>>());
        rows.collect::<PyResult<Vec<_>>>().map(OptionValue::Rows)
    }
}

/// A Python function of a batch of matrices and `epsilon`, called with the interpreter attached.
fn callback(function: &Bound<'_, PyAny>) -> PyResult<OptionValue> {
    let part = |name| function.getattr(name).and_then(|part| part.extract::<String>()).ok();
    let name = match (part("__module__"), part("__qualname__")) {
        (Some(module), Some(name)) => format!("{module}.{name}"),
        _ => function.get_type().fully_qualified_name()?.to_string(),
    };
    let (identity, object) = (function.as_ptr() as usize, function.clone().unbind());
    let call: Function = Box::new(move |batch, epsilon| {
        let above = Dispatch::to_python(true);
        Python::attach(|py| {
            let called = || {
                let arguments = PyDict::new(py);
                arguments.set_item("epsilon", epsilon)?;
                let result = object.bind(py).call((tensor::pack(py, batch)?,), Some(&arguments))?;
                tensor::unpack(&result, "the result of newton_schulz_func")
            };
            let result = called().map_err(|raised: PyErr| Error::Foreign(Box::new(raised)));
            drop(above);
            let result = result?;
            require_memory(&result)?;
            // A copy: what the function returned may run Python when it goes, and memory is looked at after that.
            let values = result.f_detach_copy()?;
            drop(result);
            look_at_what_is_in_use()?;
            Ok(values)
        })
    });
    Ok(OptionValue::Callback(Callback::new(name, identity, call)))
}

/// The live scalars of an algorithm, read from its group. Where its learning rate is a number that the device reads
/// (`rate_read`), it is 1: what is proportional to it is for each unit of it.
pub(super) fn hyper(group: &Bound<'_, PyDict>, algorithm: &AnyAlgorithm, rate_read: bool) -> PyResult<Hyper> {
    let average = common(group, intern!(group.py(), "average"))?;
    // It decays the weights at which gradients are taken, before the step.
    let decays = !average.eq("schedule_free").unwrap_or(false);
    let value = |key: &&str| match *key {
        "weight_decay" if !decays => Ok(0.0),
        key if rate_read && key.starts_with("lr") => Ok(1.0),
        key => scalar(group, key),
    };
    algorithm.scalars().iter().map(value).collect::<PyResult<Vec<f64>>>().map(Hyper)
}

/// The average of the weights of a group in a step, if it has one.
pub(super) fn average(group: &Bound<'_, PyDict>) -> PyResult<Option<AverageStep>> {
    let word = common(group, intern!(group.py(), "average"))?;
    if word.is_none() {
        return Ok(None);
    }
    let lr = group.get_item(intern!(group.py(), "lr"))?.filter(|lr| !lr.is_none());
    if word.eq("ema")? {
        // The host does not wait for a rate on a device.
        let is_there = match &lr {
            Some(lr) if tensor::is_plain(lr)? => {
                Device::of(&tensor::unpack(lr, "lr")?).ok() == Some(Device::Cpu)
            }
            other => other.is_some(),
        };
        let rule = AverageRule::Ema {
            decay: scalar(group, "average_decay")?,
            start: scalar(group, "average_start")?,
        };
        return Ok(Some(AverageStep { rule, lr: is_there.then(|| scalar(group, "lr")).transpose()? }));
    }
    let lr = scalar(group, "lr")?;
    let rule = AverageRule::ScheduleFree {
        beta: scalar(group, "average_beta")?,
        lr_power: scalar(group, "average_lr_power")?,
        step_power: scalar(group, "average_step_power")?,
        decay: lr * scalar(group, "weight_decay")?,
    };
    Ok(Some(AverageStep { rule, lr: Some(lr) }))
}

/// The learning rate of a group that is `capturable`, where it is a number on the device of the parameters: the step
/// reads it there when it runs.
pub(super) fn rate_at(group: &Bound<'_, PyDict>, device: Device) -> PyResult<Option<Tensor>> {
    if device == Device::Cpu {
        return Ok(None);
    }
    let Some(lr) = group.get_item(intern!(group.py(), "lr"))? else { return Ok(None) };
    if !common(group, intern!(group.py(), "capturable"))?.is_truthy()? || !tensor::is_plain(&lr)? {
        return Ok(None);
    }
    let rate = tensor::unpack(&lr, "lr")?;
    let is_there = match Device::of(&rate) {
        Ok(Device::Cpu) => is_emulated(),
        other => other.is_ok_and(|own| own == device),
    };
    Ok(Some(rate).filter(|rate| is_there && rate.numel() == 1 && DType::from_kind(rate.kind()).is_some()))
}

/// One scalar by its canonical name; torch's spellings are accepted. `key[i]` is an element of a tuple, `key?` may be
/// None, which is NaN, and of `-key` the negative is taken, which must not be less than zero.
fn scalar(group: &Bound<'_, PyDict>, key: &str) -> PyResult<f64> {
    let (positive, sign) = key.strip_prefix('-').map_or((key, 1.0), |key| (key, -1.0));
    let (whole, element) = match positive.strip_suffix(']').and_then(|key| key.split_once('[')) {
        Some((key, index)) => (key, index.parse::<usize>().ok()),
        None => (positive, None),
    };
    let (bare, optional) = whole.strip_suffix('?').map_or((whole, false), |bare| (bare, true));
    let (mut name, mut value) = spelled(group, bare)?;
    if optional && value.is_none() {
        return Ok(f64::NAN);
    }
    if let Some(index) = element {
        (name, value) = (format!("{name}[{index}]"), value.get_item(index)?);
    }
    // Kernels compute with most of them in float32.
    let most = f64::from(f32::MAX).next_up();
    let (what, bound) = if bare.starts_with("beta") || bare.ends_with("_beta2") {
        ("number >= 0 and < 1", 1.0)
    } else if sign < 0.0 {
        ("finite number <= 0", most)
    } else {
        ("finite number >= 0", most)
    };
    let wrong = || PyValueError::new_err(format!("{name} must be a {what}, got {value}"));
    let number = sign * value.extract::<f64>().map_err(|_| wrong())?;
    // Of a zero its sign is lost.
    if (0.0..bound).contains(&number) { Ok(number + 0.0) } else { Err(wrong()) }
}

/// The value of a scalar under the spelling that the group has.
fn spelled<'py>(group: &Bound<'py, PyDict>, key: &str) -> PyResult<(String, Bound<'py, PyAny>)> {
    let py = group.py();
    let index = match key {
        "beta1" => Some(0),
        "beta2" => Some(1),
        _ => None,
    };
    if let Some(index) = index
        && let Some(betas) = group.get_item(intern!(py, "betas"))?
    {
        return Ok((format!("betas[{index}]"), betas.get_item(index)?));
    }
    if key == "epsilon" && !group.contains(key)? {
        return Ok(("eps".into(), required(group, "eps")?));
    }
    Ok((key.into(), required(group, key)?))
}

/// Tests whether the group maximizes.
pub(super) fn maximize(group: &Bound<'_, PyDict>) -> PyResult<bool> {
    common(group, intern!(group.py(), "maximize"))?.extract()
}

/// Tests whether random numbers of the group's parameters go by their positions, though they have names.
pub(super) fn seeded_by_position(group: &Bound<'_, PyDict>) -> PyResult<bool> {
    Ok(common(group, intern!(group.py(), "seed_by"))?.extract::<&str>()? == "position")
}

/// Number of steps that the group counts.
pub(super) fn step(group: &Bound<'_, PyDict>) -> PyResult<u64> {
    common(group, intern!(group.py(), "step"))?.extract()
}
