//! The beginning and the end of a step: which tensors take part, and where their memory is.

use tch::{Kind, Tensor};

use super::Session;
use super::average::AverageStep;
use super::tensors::{BoundParam, BoundTensor, FastPath, check_gradient, check_written};
use crate::error::{Error, Result};
use crate::plan::Bucket;
use crate::spec::Hyper;
use crate::tensor::{Device, FlatPtr, InUse, Watch, replaced};

/// Distance of prefetching: prefetches the memory of the parameter that is this many ahead of the current one, and at half
/// the distance what that points to. 4000 vectors with their states are 20000 tensors, which no cache near a core holds.
const AHEAD: usize = 12;

impl Session {
    /// Has parameter `i` looked at closely in every step.
    pub fn invalidate(&mut self, i: usize) {
        if let Some(bound_param) = self.bound.get_mut(i) {
            bound_param.fast = false;
        }
    }

    /// Looks at parameter `i` and takes it for the step that begins where nothing is unusual. The caller keeps others
    /// from setting its gradient.
    #[inline]
    pub fn try_fast(&mut self, i: usize) -> FastPath {
        self.ask_ahead(i);
        let Self { bound, held, .. } = self;
        bound.get_mut(i).map_or(FastPath::Unknown, |bound_param| bound_param.try_fast(held))
    }

    /// Asks for the memory of the parameters that are looked at next.
    fn ask_ahead(&self, i: usize) {
        let watches = |at: usize| self.bound.get(at).into_iter().flat_map(BoundParam::own).filter_map(watch);
        for w in watches(i + AHEAD) {
            w.prefetch(true);
        }
        watches(i + AHEAD / 2).for_each(Watch::prefetch_storage);
        let param = |at: usize| self.bound.get(at).and_then(|bound_param| watch(&bound_param.param));
        if let Some(w) = param(i + AHEAD / 3) {
            w.prefetch_gradient(false);
        }
        if let Some(w) = param(i + AHEAD / 6) {
            w.prefetch_gradient(true);
        }
    }

    /// Takes the tensor that parameter `i` is now, until the step ends.
    pub fn hold(&mut self, i: usize, tensor: Tensor) {
        if let Some(bound_param) = self.bound.get_mut(i) {
            bound_param.param.hold(tensor);
        }
    }

    /// Tests whether parameter `i` and its states still have the types and shapes of the plan; if not, plan again.
    #[must_use]
    pub fn fits(&self, i: usize) -> bool {
        self.bound
            .get(i)
            .zip(self.plan.params.get(i))
            .is_some_and(|(bound_param, planned)| bound_param.fits(planned))
    }

    /// Starts a step with the parameters that `try_fast` took and those of `grads`, gradients by parameter; `hypers[k]`,
    /// `grad_factors[k]` and the number of the step `steps[k]` belong to the plan's algorithm k, `averages[g]` to group g.
    /// Nothing is written.
    /// `rates[k]` is the learning rate as an element of the device that the step reads when it runs; it is 1 in
    /// `hypers[k]` then.
    ///
    /// # Errors
    /// `Error::Type` and `Error::Value` for gradients that cannot be used, `Error::Layout` for parameters that came to share
    /// memory since they were bound, `Error::Cuda` for a device that cannot be used, `Error::Mode` for parameters that
    /// hold their averages.
    /// No parameter is taken for a step then.
    pub fn begin(
        &mut self,
        grads: Vec<(usize, Tensor)>,
        hypers: Vec<Hyper>,
        rates: Vec<Option<Tensor>>,
        grad_factors: Vec<f64>,
        steps: &[u64],
        averages: &[Option<AverageStep>],
    ) -> Result<()> {
        let opened = self.open_devices();
        let element = |(rate, device): (Option<Tensor>, &Device)| {
            rate.map(|rate| FlatPtr::of(&rate).map(|at| (rate, at.on(*device)))).transpose()
        };
        let read =
            rates.into_iter().zip(&self.plan.algorithm_devices).map(element).collect::<Result<Vec<_>>>();
        let read = match opened.and(read).and_then(|read| self.take(grads, steps, &read).map(|()| read)) {
            Ok(read) => read,
            Err(error) => {
                self.abandon();
                return Err(error);
            }
        };
        self.rates = read;
        self.hypers = hypers;
        self.grad_factors = grad_factors;
        self.steps = steps.to_vec();
        let marked = self.mark_due().and_then(|()| self.mark_averages(averages));
        marked.inspect_err(|_| self.abandon())
    }

    fn take(
        &mut self,
        grads: Vec<(usize, Tensor)>,
        steps: &[u64],
        rates: &[Option<(Tensor, FlatPtr)>],
    ) -> Result<()> {
        if self.plan.devices().any(|device| device != Device::Cpu) {
            self.look_at_all()?; // what devices log runs Python
        }
        for (i, grad) in &grads {
            let (bound_param, name) = (&self.bound[*i], &self.plan.params[*i].spec.name);
            if !self.fits(*i) {
                return Err(replaced(name)); // by Python that ran for another parameter
            }
            check_gradient(grad, bound_param.param.tensor()?, name)?;
            bound_param.own().try_for_each(|bound| check_written(bound.tensor()?, name))?;
        }
        for (i, grad) in grads {
            let planned = &self.plan.params[i];
            let step = steps.get(planned.algorithm).copied().unwrap_or(0);
            self.bound[i].take(Some(grad), planned, step, &mut self.held)?;
        }
        self.alias.look(&mut self.bound, &self.plan)?;
        let first = self.held.len();
        for (rate, _) in rates.iter().flatten() {
            self.held.push(rate, rate);
        }
        self.held_rates = first..self.held.len();
        Ok(())
    }

    /// Memory of this type for a gradient of parameter `i` that is still to be redistributed.
    ///
    /// # Errors
    /// Whatever libtorch says.
    pub fn gradient_room(&self, i: usize, kind: Kind) -> Result<Tensor> {
        let param = self.bound[i].param.tensor()?;
        Ok(Tensor::f_empty(param.size(), (kind, param.device()))?)
    }

    /// Copies a gradient that was redistributed to the room that the step which has begun has for it.
    ///
    /// # Errors
    /// `Error::Internal` without such a step; whatever libtorch says to the copy.
    pub fn place_gradient(&mut self, i: usize, local: &Tensor) -> Result<()> {
        let missing = || Error::Internal("no step that waits for a gradient".into());
        let room = self.bound.get_mut(i).and_then(|bound| bound.grad.as_mut()).ok_or_else(missing)?;
        room.fill(local)
    }

    /// Lets go of the gradients of a step that was not taken.
    pub fn abandon(&mut self) {
        self.averages.clear();
        let params =
            self.bound.iter_mut().map(|bound_param| (bound_param.grad.take(), bound_param.param.let_go()));
        // Last, as an object that goes may run Python.
        drop(params.collect::<Vec<_>>());
        self.held.clear();
    }

    /// Looks again at what instruction `k` uses, as Python has run since it was looked for. The caller keeps Python from
    /// running until the result is there.
    ///
    /// # Errors
    /// As `look_again`.
    pub fn look_before(&self, k: usize) -> Result<()> {
        let compute = self.plan.computes.get(k);
        let compute = compute.ok_or_else(|| Error::Internal(format!("no compute {k}")))?;
        self.look_again(self.plan.buckets[compute.bucket].units.iter().map(|unit| unit.param))
    }

    /// As `look_before`, at what was found so far for the step that begins.
    ///
    /// # Errors
    /// As `look_again`.
    pub fn look_at_all(&self) -> Result<()> {
        self.look_again(0..self.bound.len())
    }

    /// As `look_before`, at what `average` uses.
    ///
    /// # Errors
    /// As `look_again`.
    pub fn look_before_averages(&self) -> Result<()> {
        self.look_again(self.averages.iter().map(|(at, ..)| *at))
    }

    /// Looks again at the memory of the parameters that take part in the step that has begun, for Python has run since.
    ///
    /// # Errors
    /// `Error::Mode` that names a parameter whose memory is another one.
    pub(super) fn look_again(&self, which: impl Iterator<Item = usize>) -> Result<()> {
        let mut last = usize::MAX;
        for at in which.filter(|at| std::mem::replace(&mut last, *at) != *at) {
            self.bound[at].look_again(&self.held, &self.plan.params[at])?;
        }
        if !self.held.are_there(self.held_rates.clone()) {
            return Err(replaced("lr"));
        }
        self.memory.look_again()
    }

    /// Has functions of the user, if there are any, look again at what a bucket uses, until the result is dropped.
    pub(super) fn use_in_functions(&self, bucket: &Bucket) -> Option<InUse> {
        if !self.calls_back {
            return None;
        }
        let mut params: Vec<usize> = bucket.units.iter().map(|unit| unit.param).collect();
        params.dedup();
        let named = |at: usize| {
            let held = self.held.again(self.bound[at].held.clone());
            (held, self.plan.params[at].spec.name.clone())
        };
        let workspace = (self.memory.held_again(), "the workspace of the optimizer".to_owned());
        let rates = (self.held.again(self.held_rates.clone()), "lr".to_owned());
        Some(InUse::begin(params.into_iter().map(named).chain([workspace, rates]).collect()))
    }

    /// Ends a step: writes staged copies back, bumps the version counters of what was written and releases the gradients.
    /// Returns the parameters whose counters have still to be bumped. The caller keeps Python from running meanwhile.
    ///
    /// # Errors
    /// As `look_again`, and whatever libtorch says to the copies.
    pub fn end(&mut self) -> Result<Vec<usize>> {
        let (mut uncounted, mut gone) = (Vec::new(), Vec::with_capacity(self.bound.len()));
        for i in 0..self.bound.len() {
            let watches =
                |at: usize| self.bound.get(at).into_iter().flat_map(BoundParam::own).filter_map(watch);
            for w in watches(i + AHEAD) {
                w.prefetch(false);
            }
            watches(i + AHEAD / 2).for_each(Watch::prefetch_counter);
            let bound_param = &mut self.bound[i];
            if bound_param.grad.is_some() {
                bound_param.look_again(&self.held, &self.plan.params[i])?;
                bound_param.count();
                bound_param.param.commit()?;
                bound_param.states.iter_mut().try_for_each(BoundTensor::commit)?;
                let counted = bound_param.took_fast_path
                    && bound_param.own().all(|b| watch(b).map(Watch::bump_version).is_some());
                if !counted {
                    uncounted.push(i);
                }
            }
            gone.extend(bound_param.grad.take().and_then(BoundTensor::into_tensor));
            gone.extend(bound_param.param.let_go());
        }
        self.averages.clear();
        // Last, as an object that goes may run Python.
        drop(gone);
        self.held.clear();
        Ok(uncounted)
    }
}

fn watch(bound: &BoundTensor) -> Option<&Watch> {
    bound.watch.as_ref()
}
