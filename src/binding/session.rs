//! The session as Python sees it: identity checks, gradients in, instructions, written parameters out.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use sha2::{Digest, Sha256};
use tch::Tensor;

use super::enter::Enter;
use super::error::to_python;
use super::plan::PyPlan;
use super::{group, handles, tensor};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::{GroupSpec, Plan};
use crate::session::Session;
use crate::threads;

/// The objects of `optimizer.state`, in its order: a parameter with its dict, then each key with its value.
type Fingerprint = Vec<(usize, usize)>;

/// A plan bound to the parameters and states of an optimizer.
#[pyclass(name = "Session", module = "oxidion", frozen)]
pub(super) struct PySession {
    inner: Mutex<Session>,
    plan: Arc<Plan>,
    groups: Vec<GroupSpec>,
    /// The parameter objects, in plan order.
    params: Vec<Py<PyAny>>,
    /// The local tensor object of each parameter that is distributed.
    locals: Vec<Option<Py<PyAny>>>,
    /// Kept alive so that the addresses in `known` stay theirs.
    _state: Vec<Py<PyAny>>,
    known: Fingerprint,
    /// The states of each parameter, for their version counters.
    states: Vec<Vec<Py<PyAny>>>,
    /// Set from `begin` to `end`: a step of the same optimizer from another thread or a log handler is refused.
    stepping: AtomicBool,
    /// Digests of what is planned, by the ranks of an axis.
    prints: Mutex<BTreeMap<Vec<u64>, i64>>,
    /// Parameters that were frozen when the plan was made: it does not cover them.
    unplanned: Vec<bool>,
}

/// Addresses of everything in the state dict: no hashing, no look-up.
fn fingerprint(state: &Bound<'_, PyDict>, mut keep: Option<&mut Vec<Py<PyAny>>>) -> PyResult<Fingerprint> {
    let mut seen = Vec::new();
    for (param, entries) in state.iter() {
        seen.push((param.as_ptr() as usize, entries.as_ptr() as usize));
        if let Some(keep) = keep.as_deref_mut() {
            keep.push(entries.clone().unbind());
        }
        for (key, value) in entries.cast::<PyDict>()?.iter() {
            seen.push((key.as_ptr() as usize, value.as_ptr() as usize));
            if let Some(keep) = keep.as_deref_mut() {
                keep.push(key.unbind());
                keep.push(value.unbind());
            }
        }
    }
    Ok(seen)
}

#[pymethods]
impl PySession {
    /// Binds `plan` to the parameters of `groups`, to `states` (a list of tensors for each parameter, in the order of
    /// the plan's specs), which live in the dict `state`, and to a float32 workspace.
    #[new]
    fn new(
        py: Python<'_>,
        plan: &PyPlan,
        groups: Vec<Bound<'_, PyDict>>,
        states: Vec<Vec<Bound<'_, PyAny>>>,
        state: &Bound<'_, PyDict>,
        arena: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let (mut params, mut locals, mut tensors) = (Vec::new(), Vec::new(), Vec::new());
        for group in &groups {
            for object in group::params(group)?.iter() {
                let local = handles::local(&object)?;
                tensors.push(tensor::unpack(&local, "parameter")?);
                locals.push((!local.is(&object)).then(|| local.unbind()));
                params.push(object.unbind());
            }
        }
        let objects = states.iter().map(|list| list.iter().map(|s| s.clone().unbind()).collect()).collect();
        let states = states
            .iter()
            .map(|list| list.iter().map(|s| tensor::unpack(&handles::local(s)?, "state")).collect())
            .collect::<PyResult<Vec<Vec<Tensor>>>>()?;
        let arena = tensor::unpack(arena, "arena")?;
        let unplanned = plan.plan.members.iter().map(|m| m.frozen).collect();
        let inner = py.enter(|| Session::new(Arc::clone(&plan.plan), tensors, states, arena))?;
        let mut keep = Vec::new();
        let known = fingerprint(state, Some(&mut keep))?;
        Ok(Self {
            inner: Mutex::new(inner),
            groups: plan.groups.clone(),
            params,
            locals,
            _state: keep,
            known,
            unplanned,
            states: objects,
            stepping: AtomicBool::new(false),
            prints: Mutex::default(),
            plan: Arc::clone(&plan.plan),
        })
    }

    /// Starts a step with the gradients and live scalars of `groups`. False, with nothing done, when parameters,
    /// states or structural settings are not those that were bound: plan and bind anew.
    fn begin(
        &self,
        groups: Vec<Bound<'_, PyDict>>,
        state: &Bound<'_, PyDict>,
        grad_factor: f64,
        num_threads: usize,
    ) -> PyResult<bool> {
        let py = state.py();
        if groups.len() != self.groups.len() || fingerprint(state, None)? != self.known {
            return Ok(false);
        }
        let mut grads = Vec::with_capacity(self.params.len());
        for (group, settings) in groups.iter().zip(&self.groups) {
            if group::spec(group)? != *settings {
                return Ok(false);
            }
            for object in group::params(group)?.iter() {
                let at = grads.len();
                let same =
                    self.params.get(at).is_some_and(|p| p.is(&object)) && self.local_is_bound(&object, at)?;
                if !same {
                    return Ok(false);
                }
                let grad = object.getattr(intern!(py, "grad"))?;
                if !grad.is_none() && self.unplanned[at] {
                    return Ok(false);
                }
                grads.push(if grad.is_none() {
                    None
                } else {
                    Some(self.named_gradient(&object, &grad, at)?)
                });
            }
        }
        if grads.len() != self.params.len() {
            return Ok(false);
        }
        threads::set(num_threads);
        if !self.lock().map_err(to_python)?.fits() {
            return Ok(false);
        }
        let plan = &self.plan;
        let (mut hypers, mut factors, mut steps) = (Vec::new(), Vec::new(), Vec::new());
        for (algorithm, &number) in plan.algorithms.iter().zip(&plan.algorithm_groups) {
            hypers.push(group::hyper(&groups[number], algorithm)?);
            factors.push(if group::maximize(&groups[number])? { -grad_factor } else { grad_factor });
            steps.push(group::step(&groups[number])?);
        }
        if self.stepping.swap(true, Ordering::AcqRel) {
            return Err(to_python(Error::Busy));
        }
        let begun = py.enter(|| self.lock()?.begin(grads, hypers, factors, &steps));
        if begun.is_err() {
            self.stepping.store(false, Ordering::Release);
        }
        begun.map(|()| true)
    }

    /// Numbers that the ranks of an axis must agree on in the step that has begun: what they plan, which gradients
    /// there are, and the live scalars.
    fn summary(&self, ranks: Vec<u64>) -> PyResult<Vec<i64>> {
        let inner = self.lock().map_err(to_python)?;
        let mut prints = self.prints.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let plan = prints
            .entry(ranks.clone())
            .or_insert_with(|| digest(self.plan.agreed(&ranks).join("\n").as_bytes()));
        let (gradients, scalars) = inner.live(&ranks);
        Ok(vec![*plan, digest(&gradients), digest(&scalars)])
    }

    /// The names of the parameters on an axis of these ranks, with whether each has a gradient in the step that has
    /// begun, and the scalars of the algorithms.
    #[allow(clippy::type_complexity)] // plain values for one caller
    fn details(&self, ranks: Vec<u64>) -> PyResult<(Vec<(String, bool)>, Vec<(String, Vec<f64>)>)> {
        Ok(self.lock().map_err(to_python)?.details(&ranks))
    }

    /// As `Plan.agreed`.
    fn agreed(&self, ranks: Vec<u64>) -> Vec<String> {
        self.plan.agreed(&ranks)
    }

    /// Gives up a step that has begun: nothing has been written.
    fn abandon(&self) -> PyResult<()> {
        self.lock().map_err(to_python)?.abandon();
        self.stepping.store(false, Ordering::Release);
        Ok(())
    }

    /// The collectives that are left out in the step that has begun.
    fn idle(&self) -> PyResult<std::collections::BTreeSet<usize>> {
        Ok(self.lock().map_err(to_python)?.idle())
    }

    /// Runs compute instruction `k`.
    fn compute(&self, py: Python<'_>, k: usize) -> PyResult<()> {
        py.enter(|| self.lock()?.compute(k))
    }

    /// Ends the step; returns the parameters and states that were written.
    fn end<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let written = py.enter(|| self.lock()?.end());
        self.stepping.store(false, Ordering::Release);
        let written = written?;
        let list = PyList::empty(py);
        for i in written {
            list.append(&self.params[i])?;
            self.states[i].iter().try_for_each(|state| list.append(state))?;
            if let Some(local) = &self.locals[i] {
                list.append(local)?;
            }
        }
        Ok(list)
    }

    /// Asks for measurements of the steps that follow.
    fn measure(&self, on: bool) -> PyResult<()> {
        self.lock().map_err(to_python)?.set_probe(on);
        Ok(())
    }

    /// (measurements by name as (parameter index, value), milliseconds of each compute of the last step).
    #[allow(clippy::type_complexity)] // plain values for one caller
    fn measurements<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyDict>, Vec<f64>)> {
        let inner = self.lock().map_err(to_python)?;
        let (probe, spent) = inner.measurements();
        let by_name = PyDict::new(py);
        for (name, values) in probe.into_iter().flatten() {
            by_name.set_item(name, values.clone())?;
        }
        Ok((by_name, spent.iter().map(|d| d.as_secs_f64() * 1e3).collect()))
    }
}

impl PySession {
    /// The session, unless a step is computing: waiting for it here could wait for the interpreter lock too.
    fn lock(&self) -> Result<MutexGuard<'_, Session>> {
        match self.inner.try_lock() {
            Ok(guard) => Ok(guard),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(Error::Busy),
        }
    }

    fn named_gradient(
        &self,
        object: &Bound<'_, PyAny>,
        grad: &Bound<'_, PyAny>,
        at: usize,
    ) -> PyResult<Tensor> {
        let spec = &self.plan.members[at].spec;
        gradient(object, grad, spec.dtype).map_err(|e| super::error::with_name(grad.py(), &e, &spec.name))
    }

    fn local_is_bound(&self, object: &Bound<'_, PyAny>, at: usize) -> PyResult<bool> {
        match self.locals.get(at) {
            Some(Some(local)) => Ok(handles::local(object)?.is(local)),
            Some(None) => Ok(true),
            None => Ok(false),
        }
    }
}

/// The local gradient of a parameter, of the parameter's `dtype` or of the one that the user set as its `grad_dtype`.
pub(super) fn gradient(param: &Bound<'_, PyAny>, grad: &Bound<'_, PyAny>, dtype: DType) -> PyResult<Tensor> {
    let py = param.py();
    let plain = tensor::is_plain(grad)?;
    if !plain && handles::is_distributed(grad)? && !handles::same_layout(grad, param)? {
        return Err(super::error::LayoutError::new_err(
            "a gradient has other placements than its parameter. Redistribute it before step()",
        ));
    }
    let local = if plain { grad.clone() } else { handles::local(grad)? };
    let local = tensor::unpack(&local, "gradient")?;
    if local.kind() != dtype.kind() {
        let (own, allowed) = (grad.getattr(intern!(py, "dtype"))?, param.getattr(intern!(py, "grad_dtype"))?);
        if !allowed.is_none() && !allowed.is(&own) {
            return Err(PyTypeError::new_err(format!(
                "the gradient must have the parameter's dtype {}, got {own}. Convert it, or allow it by setting the \
                 parameter's grad_dtype",
                dtype.name()
            )));
        }
    }
    Ok(local)
}

/// The first 62 bits of a SHA-256: its negative is a number too.
fn digest(bytes: &[u8]) -> i64 {
    let hash = Sha256::digest(bytes);
    hash.iter().take(8).fold(0, |number, &byte| (number << 8 | i64::from(byte)) & (i64::MAX >> 1))
}
