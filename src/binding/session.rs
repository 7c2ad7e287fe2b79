//! The session as Python sees it: identity checks, gradients in, instructions, written parameters out.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use sha2::{Digest, Sha256};
use tch::Tensor;

use super::enter::Enter;
use super::error::to_python;
use super::gradient::{Gradient, gradient};
use super::plan::PyPlan;
use super::{group, handles, logs, tensor};
use crate::error::{Error, Result};
use crate::kernels::cuda::{self, Tape};
use crate::plan::{GroupSpec, Plan};
use crate::session::{AverageStep, Details, FastPath, Session};
use crate::spec::Hyper;
use crate::threads;

/// Marks the names of parameters whose gradients have other placements than they have.
const MISPLACED: &str = " (gradient of other placements)";

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
    /// Objects kept alive for `known`.
    _state: Vec<Py<PyAny>>,
    known: tensor::Known,
    /// The states of each parameter, for their version counters.
    states: Vec<Vec<Py<PyAny>>>,
    /// Flag set from `begin` to `end`: a step of the same optimizer from another thread or a log handler is refused.
    stepping: AtomicBool,
    /// Digests of what is planned, by the ranks of an axis.
    prints: Mutex<BTreeMap<Vec<u64>, i64>>,
    /// Parameters that were frozen when the plan was made: it does not cover them.
    unplanned: Vec<bool>,
    /// Launches of the step that was captured.
    launches: Mutex<Tape>,
    /// Parameters whose gradients have to be redistributed before the step that has begun can be executed.
    misplaced: Mutex<Vec<usize>>,
}

#[pymethods]
impl PySession {
    /// Binds `plan` to the parameters of `groups`, to `states` (a list of tensors for each parameter, in the order of
    /// the plan's specs), which live in the dict `state`, and to the parts of a float32 workspace, one for each of
    /// `Plan.arena_parts`.
    #[new]
    fn new(
        py: Python<'_>,
        plan: &PyPlan,
        groups: Vec<Bound<'_, PyDict>>,
        states: Vec<Vec<Bound<'_, PyAny>>>,
        state: &Bound<'_, PyDict>,
        arena: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let (mut params, mut locals, mut tensors) = (Vec::new(), Vec::new(), Vec::new());
        let mut owners = Vec::new();
        for group in &groups {
            for object in group::params(group)?.iter() {
                let local = handles::local(&object)?;
                tensors.push(tensor::unpack(&local, "parameter")?);
                owners.push(tensor::owner(&local));
                locals.push((!local.is(&object)).then(|| local.unbind()));
                params.push(object.unbind());
            }
        }
        let objects: Vec<Vec<Py<PyAny>>> =
            states.iter().map(|list| list.iter().map(|s| s.clone().unbind()).collect()).collect();
        let states = states
            .iter()
            .map(|list| list.iter().map(|s| tensor::unpack(&handles::local(s)?, "state")).collect())
            .collect::<PyResult<Vec<Vec<Tensor>>>>()?;
        let arena = arena.iter().map(|part| tensor::unpack(part, "arena")).collect::<PyResult<Vec<_>>>()?;
        let unplanned: Vec<bool> = plan.plan.params.iter().map(|m| m.frozen).collect();
        let mut inner = py.enter(|| Session::new(Arc::clone(&plan.plan), tensors, states, arena))?;
        for (i, object) in params.iter().enumerate() {
            // The gradient of a tensor of another class is what its class says.
            if unplanned[i] || !tensor::is_plain(object.bind(py))? {
                inner.invalidate(i);
            }
        }
        inner.own(owners);
        if plan.groups.iter().any(|group| group.options.has_functions()) {
            inner.expect_functions();
        }
        let mut keep = Vec::new();
        let known = tensor::Known::of(state, &params, &objects, &mut keep)?;
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
            launches: Mutex::default(),
            misplaced: Mutex::default(),
            plan: Arc::clone(&plan.plan),
        })
    }

    /// Starts a step with the gradients and live scalars of `groups`. Returns false, with nothing done, when parameters,
    /// states or structural settings are not those that were bound: the caller then plans and binds again. `streams` are
    /// torch's current ones on the devices of `Plan.arena_parts`.
    #[pyo3(signature = (groups, state, grad_factor, num_threads, streams=Vec::new()))]
    fn begin(
        &self,
        groups: Vec<Bound<'_, PyDict>>,
        state: &Bound<'_, PyDict>,
        grad_factor: f64,
        num_threads: usize,
        streams: Vec<usize>,
    ) -> PyResult<bool> {
        if groups.len() != self.groups.len() || !self.known.is(state) {
            return Ok(false);
        }
        if self.stepping.swap(true, Ordering::AcqRel) {
            return Err(to_python(Error::Busy));
        }
        let begun = self
            .lock()
            .map(|mut inner| inner.set_streams(streams))
            .map_err(to_python)
            .and_then(|()| self.take(state.py(), &groups, grad_factor, num_threads));
        if !matches!(begun, Ok(true)) {
            // Not waited for: a step that fails here has taken nothing that another would see.
            self.lock().into_iter().for_each(|mut inner| inner.abandon());
            self.stepping.store(false, Ordering::Release);
        }
        begun
    }

    /// Numbers that the ranks of an axis must agree on in the step that has begun: what they plan, which gradients
    /// there are, and the live scalars.
    fn summary(&self, ranks: Vec<u64>) -> PyResult<Vec<i64>> {
        let inner = self.lock().map_err(to_python)?;
        let mut prints = self.prints.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let plan = prints
            .entry(ranks.clone())
            .or_insert_with(|| digest(self.plan.agreed(&ranks).join("\n").as_bytes()));
        let (gradients, mut scalars) = inner.live(&ranks);
        // They are redistributed before the step: ranks have to agree on them also where steps need no others.
        let misplaced = self.misplaced();
        let here = misplaced.iter().filter(|&&at| self.plan.params[at].layout.lives_on(&ranks));
        scalars.extend(here.flat_map(|at| self.plan.params[*at].spec.name.bytes().chain([0])));
        Ok(vec![*plan, digest(&gradients), digest(&scalars)])
    }

    /// The names of the parameters on an axis of these ranks, with whether each has a gradient in the step that has
    /// begun, and the scalars of the algorithms.
    fn details(&self, ranks: Vec<u64>) -> PyResult<Details> {
        let (mut gradients, scalars) = self.lock().map_err(to_python)?.details(&ranks);
        for at in self.misplaced().iter() {
            let name = &self.plan.params[*at].spec.name;
            gradients.iter_mut().filter(|(other, _)| other == name).for_each(|(name, _)| {
                name.push_str(MISPLACED);
            });
        }
        Ok((gradients, scalars))
    }

    /// Parameters whose gradients have other placements on their mesh than they have, in the step that has begun: to be
    /// redistributed and given to `place_gradient`.
    fn misplaced_gradients(&self, py: Python<'_>) -> Vec<(usize, Py<PyAny>)> {
        self.misplaced().iter().map(|&at| (at, self.params[at].clone_ref(py))).collect()
    }

    /// Gives the step that has begun the local part of a gradient that was redistributed.
    fn place_gradient(&self, at: usize, local: &Bound<'_, PyAny>) -> PyResult<()> {
        let tensor = tensor::unpack(local, "gradient")?;
        local.py().enter(move || self.lock()?.place_gradient(at, &tensor))
    }

    /// Returns the parameters that are replicated on the ranks of an axis.
    fn copies(&self, ranks: Vec<u64>) -> Vec<usize> {
        let params = self.plan.params.iter().enumerate();
        params.filter(|(_, param)| param.layout.copied_on(&ranks)).map(|(at, _)| at).collect()
    }

    /// Lines that the ranks of an axis must agree on, as `Plan.agreed`.
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

    /// Returns the pattern of the step that has begun, on which its launches depend, whether no replay can repeat it, and
    /// the names of the parameters that are, with their states, computed on in copies. Steps with equal patterns have the
    /// same launches.
    fn pattern(&self) -> PyResult<(Vec<usize>, bool, Vec<String>)> {
        let inner = self.lock().map_err(to_python)?;
        let (taken, due) = inner.pattern();
        Ok((taken, due, inner.copied().into_iter().map(str::to_owned).collect()))
    }

    /// Notes the launches of this thread, which are captured, until `keep_launches`.
    #[staticmethod]
    fn note_launches() {
        cuda::note();
    }

    /// Ends what `note_launches` began, and keeps what was noted.
    fn keep_launches(&self) {
        *self.launches.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = cuda::noted();
    }

    /// Gives the launches of an executable graph the parameters that this thread would launch with, instead of
    /// launching, until `finish_launches`. Memory that they name is kept until `drop_scratch`.
    fn set_launches(&self, graph: usize) {
        cuda::set(self.launches.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone(), graph);
    }

    /// Ends what `set_launches` or `note_launches` began.
    #[staticmethod]
    fn finish_launches() -> PyResult<()> {
        cuda::finish().map_err(to_python)
    }

    /// Gives memory back that this thread has kept since `set_launches` for the graph, which has been launched.
    #[staticmethod]
    fn drop_scratch(py: Python<'_>) {
        py.detach(cuda::let_go);
    }

    /// Runs compute instruction `k`.
    fn compute(&self, py: Python<'_>, k: usize) -> PyResult<()> {
        self.lock().and_then(|inner| inner.look_before(k)).map_err(to_python)?;
        logs::after(|| py.enter(|| self.lock()?.compute(k)))
    }

    /// Works on the averages of the weights, before or after the instructions of the step that has begun.
    fn average(&self, py: Python<'_>, is_late: bool) -> PyResult<()> {
        self.lock().and_then(|inner| inner.look_before_averages()).map_err(to_python)?;
        logs::after(|| py.enter(|| self.lock()?.average(is_late)))
    }

    /// Ends the step; returns the parameters and states that were written and whose changes are still to be counted.
    fn end<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let uncounted = logs::after(|| py.enter_attached(|| self.lock()?.end()));
        self.stepping.store(false, Ordering::Release);
        let uncounted = uncounted?;
        let list = PyList::empty(py);
        for i in uncounted {
            list.append(&self.params[i])?;
            self.states[i].iter().try_for_each(|state| list.append(state))?;
            if let Some(local) = &self.locals[i] {
                list.append(local)?;
            }
        }
        Ok(list)
    }

    /// Seconds that the mathematics of algorithms took since this was last asked for: all but the session's own work.
    fn inside(&self) -> PyResult<f64> {
        Ok(self.lock().map_err(to_python)?.take_inside().as_secs_f64())
    }

    /// Asks for measurements of the steps that follow.
    fn measure(&self, on: bool) -> PyResult<()> {
        self.lock().map_err(to_python)?.set_probe(on);
        Ok(())
    }

    /// Measurements by name as (parameter index, value), and milliseconds of each compute of the last step.
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
    /// Takes parameters and gradients for a step; see `begin`.
    fn take(
        &self,
        py: Python<'_>,
        groups: &[Bound<'_, PyDict>],
        grad_factor: f64,
        num_threads: usize,
    ) -> PyResult<bool> {
        let Some((params, live)) = self.read(groups, grad_factor)? else { return Ok(false) };
        threads::set(num_threads);
        let mut closely = Vec::new();
        {
            let mut inner = self.lock().map_err(to_python)?;
            let objects = params.iter().flat_map(PyListMethods::iter);
            for (at, object) in objects.enumerate() {
                if !self.params.get(at).is_some_and(|p| p.is(&object)) {
                    return Ok(false);
                }
                if inner.try_fast(at) == FastPath::Unknown {
                    closely.push((at, object));
                }
            }
        }
        let (mut grads, mut misplaced) = (Vec::new(), Vec::new());
        let has_run_python = !closely.is_empty();
        for (at, object) in closely {
            match self.look_closely(py, at, &object)? {
                Look::Absent => {}
                Look::Ready(local) => grads.push((at, local)),
                Look::Misplaced(room) => {
                    grads.push((at, room));
                    misplaced.push(at);
                }
                Look::Changed => return Ok(false),
            }
        }
        if has_run_python {
            self.lock().and_then(|inner| inner.look_at_all()).map_err(to_python)?;
        }
        *self.misplaced() = misplaced;
        let Live { hypers, rates, factors, steps, averages } = live;
        py.enter(|| self.lock()?.begin(grads, hypers, rates, factors, &steps, &averages)).map(|()| true)
    }

    /// The parameters of the groups and what steps read of each; none where the plan is not theirs. All of it is read before
    /// memory is looked for, as a value may run Python.
    #[allow(clippy::type_complexity)] // plain values for one caller
    fn read<'py>(
        &self,
        groups: &[Bound<'py, PyDict>],
        grad_factor: f64,
    ) -> PyResult<Option<(Vec<Bound<'py, PyList>>, Live)>> {
        for (group, settings) in groups.iter().zip(&self.groups) {
            if group::spec(group)? != *settings {
                return Ok(None);
            }
        }
        let mut live = Live::default();
        let plan = &self.plan;
        let places = plan.algorithm_groups.iter().zip(&plan.algorithm_devices);
        for (algorithm, (&number, &device)) in plan.algorithms.iter().zip(places) {
            let rate = group::rate_at(&groups[number], device)?;
            live.hypers.push(group::hyper(&groups[number], algorithm, rate.is_some())?);
            live.rates.push(rate);
            live.factors.push(if group::maximize(&groups[number])? { -grad_factor } else { grad_factor });
            live.steps.push(group::step(&groups[number])?);
        }
        live.averages = groups.iter().map(group::average).collect::<PyResult<Vec<_>>>()?;
        let params = groups.iter().map(group::params).collect::<PyResult<Vec<_>>>()?;
        if params.iter().map(PyListMethods::len).sum::<usize>() != self.params.len() {
            return Ok(None);
        }
        Ok(Some((params, live)))
    }

    /// Checks a parameter for which the fast path does not suffice.
    fn look_closely(&self, py: Python<'_>, at: usize, object: &Bound<'_, PyAny>) -> PyResult<Look> {
        if !self.local_is_bound(object, at)? {
            return Ok(Look::Changed);
        }
        let planned = &self.plan.params[at];
        let own = tensor::unpack(&handles::local(object)?, "parameter")?;
        let fits = py.enter_attached(|| {
            let mut inner = self.lock()?;
            inner.hold(at, own);
            Ok(inner.fits(at))
        })?;
        if !fits {
            return Ok(Look::Changed);
        }
        let grad = object.getattr(intern!(py, "grad"))?;
        if grad.is_none() {
            return Ok(Look::Absent);
        }
        if self.unplanned[at] {
            return Ok(Look::Changed);
        }
        let found = gradient(object, &grad, planned.spec.dtype)
            .map_err(|e| super::error::with_name(py, &e, &planned.spec.name))?;
        match found {
            Gradient::Ready { local, added } if planned.layout.contributions().eq(added.iter().copied()) => {
                Ok(Look::Ready(local))
            }
            Gradient::Misplaced(kind) if planned.layout.contributions().next().is_none() => {
                py.enter(|| self.lock()?.gradient_room(at, kind)).map(Look::Misplaced)
            }
            _ => Ok(Look::Changed),
        }
    }

    fn misplaced(&self) -> MutexGuard<'_, Vec<usize>> {
        self.misplaced.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The session, unless a step is computing: waiting for it here could wait for the interpreter lock too.
    fn lock(&self) -> Result<MutexGuard<'_, Session>> {
        match self.inner.try_lock() {
            Ok(guard) => Ok(guard),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(Error::Busy),
        }
    }

    fn local_is_bound(&self, object: &Bound<'_, PyAny>, at: usize) -> PyResult<bool> {
        match self.locals.get(at) {
            Some(Some(local)) => Ok(handles::local(object)?.is(local)),
            Some(None) => Ok(true),
            None => Ok(false),
        }
    }
}

/// Numbers that a step reads of the groups, by the plan's algorithms; averages by group.
#[derive(Default)]
struct Live {
    hypers: Vec<Hyper>,
    rates: Vec<Option<Tensor>>,
    factors: Vec<f64>,
    steps: Vec<u64>,
    averages: Vec<Option<AverageStep>>,
}

/// Outcome of a close look at a parameter.
enum Look {
    /// It has no gradient.
    Absent,
    /// It has this one.
    Ready(Tensor),
    /// Its gradient has to be redistributed, to this memory.
    Misplaced(Tensor),
    /// It is not as it was planned.
    Changed,
}

/// The first 62 bits of a SHA-256: its negative is a number too.
fn digest(bytes: &[u8]) -> i64 {
    let hash = Sha256::digest(bytes);
    hash.iter().take(8).fold(0, |number, &byte| (number << 8 | i64::from(byte)) & (i64::MAX >> 1))
}
