//! A plan bound to tensors: takes gradients, runs the schedule's compute instructions, lets go of the gradients.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tch::{Device, Tensor};

use crate::batch::Slab;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::hyper::Hyper;
use crate::plan::{BufferSpec, Plan};
use crate::stage::{MAX_STATES, Probe, StageIo, UnitIo};

/// A tensor of the user and, when it is not contiguous, the contiguous copy that is worked on.
#[derive(Debug)]
struct Bound {
    tensor: Tensor,
    staged: Option<Tensor>,
    slab: Slab,
}

impl Bound {
    fn new(tensor: Tensor) -> Self {
        Self { tensor, staged: None, slab: Slab::EMPTY }
    }

    /// Finds the memory anew: the user may have swapped it since the last step.
    ///
    /// # Errors
    /// `Error::Value` for a tensor without memory, or with elements that share it.
    fn refresh(&mut self) -> Result<()> {
        // A lazy negation is not in the memory: it has to be written out before a kernel reads it.
        self.staged = if self.tensor.f_is_neg()? {
            Some(self.tensor.f_resolve_neg()?.f_contiguous()?)
        } else if self.tensor.is_contiguous() {
            None
        } else {
            Some(self.tensor.f_contiguous()?)
        };
        self.slab = Slab::of(self.staged.as_ref().unwrap_or(&self.tensor))?;
        Ok(())
    }

    /// Brings the result of a step home.
    fn commit(&mut self) -> Result<()> {
        if let Some(copy) = self.staged.take() {
            self.tensor.f_copy_(&copy)?;
        }
        Ok(())
    }

    fn is(&self, dtype: DType, shape: &[usize]) -> bool {
        DType::from_kind(self.tensor.kind()) == Some(dtype) && same_shape(&self.tensor, shape)
    }
}

/// A parameter with its states and, during a step, its gradient.
#[derive(Debug)]
struct Slot {
    param: Bound,
    states: Vec<Bound>,
    grad: Option<Bound>,
}

/// The executor of one plan.
#[derive(Debug)]
pub struct Session {
    plan: Arc<Plan>,
    slots: Vec<Slot>,
    buffers: Vec<Vec<(BufferSpec, Slab)>>,
    _arena: Tensor,
    hypers: Vec<Hyper>,
    grad_factors: Vec<f64>,
    probe: Option<Probe>,
    spent: Vec<Duration>,
}

impl Session {
    /// Binds a plan to parameters, to their states in the order of the plan's specs, and to an arena of float32.
    ///
    /// # Errors
    /// `Error::Value` for tensors that are not what the plan says.
    pub fn new(
        plan: Arc<Plan>,
        params: Vec<Tensor>,
        states: Vec<Vec<Tensor>>,
        arena: Tensor,
    ) -> Result<Self> {
        if params.len() != plan.members.len() || states.len() != params.len() {
            return Err(Error::Internal("a session needs every parameter of its plan".into()));
        }
        let mut slots = Vec::with_capacity(params.len());
        for ((param, states), member) in params.into_iter().zip(states).zip(&plan.members) {
            let states: Vec<Bound> = states.into_iter().map(Bound::new).collect();
            for (state, spec) in states.iter().zip(&member.states) {
                let dtype = DType::from_kind(state.tensor.kind());
                if dtype != Some(spec.dtype)
                    || state.tensor.device() != Device::Cpu
                    || !same_shape(&state.tensor, &spec.shape)
                {
                    return Err(Error::Value(format!(
                        "{}: state '{}' must be a {} tensor of shape {:?} on the parameter's device, got {:?} {:?} on {:?}",
                        member.spec.name,
                        spec.role,
                        spec.dtype.name(),
                        spec.shape,
                        state.tensor.kind(),
                        state.tensor.size(),
                        state.tensor.device()
                    )));
                }
            }
            if states.len() != member.states.len() || states.len() > MAX_STATES {
                return Err(Error::Internal(format!(
                    "{}: {} states were bound",
                    member.spec.name,
                    states.len()
                )));
            }
            slots.push(Slot { param: Bound::new(param), states, grad: None });
        }
        let memory = Slab::of(&arena)?;
        let carve = |(spec, place): (&BufferSpec, &crate::plan::Place)| {
            Ok((*spec, memory.carve(place.offset, place.bytes / spec.dtype.bytes(), spec.dtype)?))
        };
        let buffers = plan
            .buckets
            .iter()
            .zip(&plan.arena.places)
            .map(|(bucket, places)| bucket.program.buffers.iter().zip(places).map(carve).collect())
            .collect::<Result<Vec<_>>>()?;
        let spent = vec![Duration::ZERO; plan.computes.len()];
        let hypers = vec![Hyper::default(); plan.algorithms.len()];
        Ok(Self { plan, slots, buffers, _arena: arena, hypers, grad_factors: Vec::new(), probe: None, spent })
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// Whether parameters and states still have the types and shapes of the plan; if not, plan anew.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.slots.iter().zip(&self.plan.members).all(|(slot, member)| {
            slot.param.is(member.spec.dtype, &member.spec.shape)
                && slot.states.iter().zip(&member.states).all(|(s, spec)| s.is(spec.dtype, &spec.shape))
        })
    }

    /// Starts a step: `grads[i]` belongs to parameter i, `hypers[k]` and `grad_factors[k]` to the plan's algorithm k.
    /// Nothing is written.
    ///
    /// # Errors
    /// `Error::Type` and `Error::Value` for gradients that cannot be used. The session is unchanged then.
    pub fn begin(
        &mut self,
        grads: Vec<Option<Tensor>>,
        hypers: Vec<Hyper>,
        grad_factors: Vec<f64>,
    ) -> Result<()> {
        for (grad, (slot, member)) in grads.iter().zip(self.slots.iter().zip(&self.plan.members)) {
            if let Some(grad) = grad {
                check_gradient(grad, &slot.param.tensor, &member.spec.name)?;
                check_written(&slot.param.tensor, &member.spec.name)?;
                slot.states.iter().try_for_each(|s| check_written(&s.tensor, &member.spec.name))?;
            }
        }
        for ((slot, grad), member) in self.slots.iter_mut().zip(grads).zip(&self.plan.members) {
            slot.grad = grad.map(Bound::new);
            if let Some(grad) = &mut slot.grad {
                let mut all = [grad, &mut slot.param].into_iter().chain(&mut slot.states);
                all.try_for_each(Bound::refresh).map_err(|e| match e {
                    Error::Value(text) => Error::Value(format!("{}: {text}", member.spec.name)),
                    other => other,
                })?;
            }
        }
        self.hypers = hypers;
        self.grad_factors = grad_factors;
        Ok(())
    }

    /// Runs compute instruction `k` of the schedule.
    ///
    /// # Errors
    /// Whatever the algorithm says; parameters may have been written by then.
    pub fn compute(&mut self, k: usize) -> Result<()> {
        let started = Instant::now();
        let plan = Arc::clone(&self.plan);
        let compute = plan.computes.get(k).ok_or_else(|| Error::Internal(format!("no compute {k}")))?;
        let bucket = &plan.buckets[compute.bucket];
        let units: Vec<UnitIo> = bucket
            .units
            .iter()
            .filter_map(|unit| {
                let slot = &self.slots[unit.param];
                let grad = slot.grad.as_ref()?;
                let (offset, len) = (unit.block.offset, unit.block.numel());
                let mut state = [Slab::EMPTY; MAX_STATES];
                for ((out, bound), spec) in
                    state.iter_mut().zip(&slot.states).zip(&plan.members[unit.param].states)
                {
                    let range = &spec.slices[unit.index];
                    *out = bound.slab.part(range.start, range.len());
                }
                Some(UnitIo {
                    param_index: unit.param,
                    block_index: unit.index,
                    rows: unit.block.rows,
                    cols: unit.block.cols,
                    param: slot.param.slab.part(offset, len),
                    grad: grad.slab.part(offset, len),
                    state,
                })
            })
            .collect();
        if units.is_empty() {
            return Ok(());
        }
        let mut io = StageIo {
            units: &units,
            grad_factor: self.grad_factors[bucket.algorithm],
            probe: self.probe.as_mut(),
            buffers: &self.buffers[compute.bucket],
        };
        let hyper = &self.hypers[bucket.algorithm];
        for (stage, _) in &compute.stages {
            plan.algorithms[bucket.algorithm].run(*stage, &mut io, hyper)?;
        }
        self.spent[k] = started.elapsed();
        Ok(())
    }

    /// Ends a step: brings staged copies home and lets go of the gradients. Returns which parameters were written.
    ///
    /// # Errors
    /// Whatever libtorch says to the copies.
    pub fn end(&mut self) -> Result<Vec<usize>> {
        let mut written = Vec::new();
        for (i, slot) in self.slots.iter_mut().enumerate() {
            if slot.grad.take().is_some() {
                slot.param.commit()?;
                slot.states.iter_mut().try_for_each(Bound::commit)?;
                written.push(i);
            }
        }
        Ok(written)
    }

    /// Asks for measurements of the steps that follow, or stops them.
    pub fn set_probe(&mut self, on: bool) {
        self.probe = on.then(Probe::new);
    }

    /// The measurements taken since they were asked for, and the time that each compute of the last step took.
    #[must_use]
    pub fn measurements(&self) -> (Option<&Probe>, &[Duration]) {
        (self.probe.as_ref(), &self.spent)
    }
}

fn same_shape(tensor: &Tensor, shape: &[usize]) -> bool {
    let size = tensor.size();
    size.len() == shape.len() && size.iter().zip(shape).all(|(a, b)| usize::try_from(*a) == Ok(*b))
}

/// Refuses a tensor to write to whose elements share memory, as an expanded one's do.
fn check_written(tensor: &Tensor, name: &str) -> Result<()> {
    if tensor.is_contiguous()
        || tensor.size().iter().zip(tensor.stride()).all(|(n, step)| *n <= 1 || step != 0)
    {
        return Ok(());
    }
    Err(Error::Value(format!(
        "{name}: parameters and states must not be expanded, got strides {:?} for shape {:?}. Use .clone()",
        tensor.stride(),
        tensor.size()
    )))
}

/// Refuses a gradient that no kernel may touch.
///
/// # Errors
/// `Error::Type` for a sparse or complex one, `Error::Value` for another shape or device.
pub fn check_gradient(grad: &Tensor, param: &Tensor, name: &str) -> Result<()> {
    if grad.is_sparse() || grad.is_mkldnn() {
        return Err(Error::Type(format!(
            "{name}: the gradient must be dense, got a sparse one. Use sparse=False, or torch.optim.SparseAdam for this parameter"
        )));
    }
    let kind = grad.f_kind()?;
    if DType::from_kind(kind).is_none() {
        return Err(Error::Type(format!("{name}: the gradient must be real floating-point, got {kind:?}")));
    }
    if grad.size() != param.size() {
        return Err(Error::Value(format!(
            "{name}: the gradient must have the parameter's shape {:?}, got {:?}",
            param.size(),
            grad.size()
        )));
    }
    if grad.device() != param.device() {
        return Err(Error::Value(format!(
            "{name}: the gradient must be on the parameter's device {:?}, got {:?}",
            param.device(),
            grad.device()
        )));
    }
    Ok(())
}
