//! A plan bound to tensors: takes gradients, runs the schedule's compute instructions, lets go of the gradients.

mod alias;
mod average;
mod buffers;
mod cadence;
mod device;
mod exchange;
mod execute;
mod step;
mod tensors;
mod views;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use alias::AliasCheck;
use average::{AverageCounters, AverageUpdate};
pub use average::{AverageRule, AverageStep};
use buffers::stage_shards;
pub use device::{check_devices, enter as enter_device, sources};
use tch::Tensor;
use tensors::{AveragePlaces, BoundParam, BoundTensor, check_written};
pub use tensors::{FastPath, check_gradient};
use views::{Fixed, Memory, Room, States, fixed, matrix};

use crate::algorithm::stage::{MAX_STATES, MatrixShard, Probe, jobs};
use crate::error::{Error, Result};
use crate::kernels;
use crate::plan::{Bucket, Param, Plan, Redistribution, Step};
use crate::spec::Hyper;
use crate::tensor::{FlatPtr, Held, Owner};

/// Parameters by name with whether each has a gradient, and for each algorithm its group and its scalars by name.
pub type Details = (Vec<(String, bool)>, Vec<(usize, Vec<(String, f64)>)>);

/// Scalars that the ranks must agree on in addition to those of an algorithm.
const OTHER_SCALARS: [&str; 3] = ["factor of the gradient", "lr on the device", "step"];

/// The executor of one plan.
#[derive(Debug)]
pub struct Session {
    plan: Arc<Plan>,
    /// The stream on each device of the plan that the step which has begun runs on.
    streams: Vec<usize>,
    /// True if a parameter or a state is more than numbers of its type.
    encoded: bool,
    /// True if steps call functions of the user.
    calls_back: bool,
    /// Sources of kernels that steps ask for.
    sources: Vec<&'static str>,
    bound: Vec<BoundParam>,
    /// Storages of the parameters, states and gradients of the step that has begun.
    held: Held,
    /// Positions of those of learning rates.
    held_rates: Range<usize>,
    alias: AliasCheck,
    /// The memory of the buckets' buffers and messages.
    memory: Memory,
    /// For each step of each compute instruction that is a stage, the matrices of every buffer.
    shards: Vec<Vec<Vec<Vec<MatrixShard>>>>,
    /// For each bucket what is the same of its units in every step.
    fixed: Vec<Vec<Fixed>>,
    /// For each bucket room for the units of a stage.
    room: Vec<Room>,
    hypers: Vec<Hyper>,
    /// For each algorithm the learning rate that a device reads, and where; none where the host has read it.
    rates: Vec<Option<(Tensor, FlatPtr)>>,
    grad_factors: Vec<f64>,
    /// For each algorithm the number of the step, of its group.
    steps: Vec<u64>,
    /// The averages that the step which has begun works on, by the number of the parameter.
    averages: Vec<(usize, AverageUpdate, AverageCounters)>,
    /// For each bucket whether a unit of it is scheduled (`Algorithm::due`).
    due: Vec<bool>,
    probe: Option<Probe>,
    spent: Vec<Duration>,
    /// The time that algorithms took since it was asked for.
    inside: Duration,
}

/// Binds a parameter to its states in the order of the plan's specs. `counts`: the session counts its steps.
fn bind(planned: &Param, param: Tensor, states: Vec<Tensor>, counts: bool) -> Result<BoundParam> {
    let device = planned.device;
    let states: Vec<BoundTensor> = states
        .into_iter()
        .zip(&planned.states)
        .map(|(s, l)| BoundTensor::watched(s, l.spec.dtype, device::of_state(device, &l.spec)))
        .collect();
    for (state, local) in states.iter().zip(&planned.states) {
        let spec = &local.spec;
        if !state.is(&local.shape()) {
            return Err(Error::Value(format!(
                "{}: state '{}' must be a {} tensor of shape {:?} on {:?}, got {:?} {:?} on {:?}",
                planned.spec.name,
                local.name(),
                spec.dtype.name(),
                local.shape(),
                device::of_state(device, spec).torch(),
                state.tensor()?.kind(),
                state.tensor()?.size(),
                state.tensor()?.device()
            )));
        }
    }
    let counter = planned.states.iter().position(|s| counts && s.spec.role == "step");
    let own = planned.states.iter().filter(|s| s.is_of_algorithm()).count();
    if states.len() != planned.states.len() || own > MAX_STATES {
        return Err(Error::Internal(format!("{}: {} states were bound", planned.spec.name, states.len())));
    }
    if !planned.frozen {
        let states = states.iter().map(BoundTensor::tensor).collect::<Result<Vec<_>>>()?;
        [&param].into_iter().chain(states).try_for_each(|t| check_written(t, &planned.spec.name))?;
    }
    let param = BoundTensor::watched(param, planned.spec.dtype, device);
    let mut bound_param = BoundParam {
        param,
        states,
        grad: None,
        counter,
        average: AveragePlaces::of(planned),
        master: planned.master(),
        held: 0..0,
        steps: 0.0,
        fast: false,
        took_fast_path: false,
    };
    let numbers = !planned.is_rounded() && planned.states.iter().all(|s| s.scales_of.is_none());
    bound_param.fast = numbers && bound_param.fits(planned);
    Ok(bound_param)
}

impl Session {
    /// Binds a plan to parameters, to their states in the order of the plan's specs, and to the parts of its arena, float32 on
    /// each device.
    ///
    /// # Errors
    /// `Error::Value` for tensors that are not what the plan says.
    pub fn new(
        plan: Arc<Plan>,
        params: Vec<Tensor>,
        states: Vec<Vec<Tensor>>,
        arena: Vec<Tensor>,
    ) -> Result<Self> {
        if params.len() != plan.params.len() || states.len() != params.len() {
            return Err(Error::Internal("a session needs every parameter of its plan".into()));
        }
        check_devices(&plan, &params)?;
        let mut bound = Vec::with_capacity(params.len());
        for ((param, states), planned) in params.into_iter().zip(states).zip(&plan.params) {
            let counts = plan.algorithms[planned.algorithm].counted();
            bound.push(bind(planned, param, states, counts)?);
        }
        let alias = AliasCheck::of(&bound, &plan)?;
        let memory = Memory::new(&plan, arena)?;
        let shards = plan.computes.iter().map(|compute| {
            let bucket = &plan.buckets[compute.bucket];
            compute.steps.iter().map(|step| stage_shards(bucket, step)).collect()
        });
        let shards = shards.collect();
        let spent = vec![Duration::ZERO; plan.computes.len()];
        let hypers = vec![Hyper::default(); plan.algorithms.len()];
        let due = vec![false; plan.buckets.len()];
        let fixed = plan.buckets.iter().map(|bucket| fixed(&plan, bucket)).collect();
        let room = plan.buckets.iter().map(|_| Room::default()).collect();
        let encoded = device::has_encodings(&plan);
        let sources = device::sources(&plan);
        Ok(Self {
            plan,
            streams: Vec::new(),
            encoded,
            calls_back: false,
            sources,
            due,
            bound,
            held: Held::default(),
            held_rates: 0..0,
            alias,
            memory,
            shards,
            fixed,
            room,
            hypers,
            rates: Vec::new(),
            grad_factors: Vec::new(),
            steps: Vec::new(),
            averages: Vec::new(),
            probe: None,
            spent,
            inside: Duration::ZERO,
        })
    }

    /// Says whose tensors the parameters are, none where one is the session's own: they are let go between steps, and have to be
    /// held in every step in which `try_fast` knows no better.
    pub fn own(&mut self, owners: Vec<Owner>) {
        for (one, owner) in self.bound.iter_mut().zip(owners) {
            one.param.own(owner);
            one.param.let_go();
        }
    }

    /// Says that steps call functions of the user, which can do anything to what a step uses.
    pub fn expect_functions(&mut self) {
        self.calls_back = true;
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// The params that live on an axis of these ranks.
    fn on_axis<'a>(&'a self, ranks: &'a [u64]) -> impl Iterator<Item = (&'a BoundParam, &'a Param)> {
        self.bound.iter().zip(&self.plan.params).filter(|(_, m)| m.layout.lives_on(ranks))
    }

    /// Facts that the ranks of an axis must agree on in this step: which parameters on it have gradients, and the
    /// scalars of their algorithms, as bytes.
    #[must_use]
    pub fn live(&self, ranks: &[u64]) -> (Vec<u8>, Vec<u8>) {
        let gradients =
            self.on_axis(ranks).map(|(bound_param, _)| u8::from(bound_param.grad.is_some())).collect();
        let used: BTreeSet<usize> = self.on_axis(ranks).map(|(_, m)| m.algorithm).collect();
        // Values that are equal have the same bytes: one zero and one NaN.
        let bytes = |(_, value): (_, f64)| if value.is_nan() { f64::NAN } else { value + 0.0 }.to_le_bytes();
        (gradients, used.into_iter().flat_map(|a| self.scalars(a)).flat_map(bytes).collect())
    }

    /// The scalars of an algorithm, the factor of its gradients, 1 if its learning rate is read on the device, and the
    /// number of its group's step.
    #[allow(clippy::cast_precision_loss)] // steps are fewer than 2^53
    fn scalars(&self, algorithm: usize) -> impl Iterator<Item = (&'static str, f64)> {
        let read = self.rates.get(algorithm).is_some_and(Option::is_some);
        let own = self.hypers[algorithm].0.iter().chain([&self.grad_factors[algorithm]]).copied();
        let values = own.chain([f64::from(u8::from(read)), self.steps[algorithm] as f64]);
        self.plan.algorithms[algorithm].scalars().iter().chain(&OTHER_SCALARS).copied().zip(values)
    }

    /// As `live`, in words.
    #[must_use]
    pub fn details(&self, ranks: &[u64]) -> Details {
        let gradients =
            self.on_axis(ranks).map(|(bound_param, m)| (m.spec.name.clone(), bound_param.grad.is_some()));
        let used: BTreeSet<usize> = self.on_axis(ranks).map(|(_, m)| m.algorithm).collect();
        let named = |a| self.scalars(a).map(|(name, value)| (name.to_owned(), value)).collect();
        let scalars = used.into_iter().map(|a| (self.plan.algorithm_groups[a], named(a)));
        (gradients.collect(), scalars.collect())
    }

    /// Runs compute instruction `k` of the schedule, after `look_before`.
    ///
    /// # Errors
    /// Whatever the algorithm says; parameters may have been written by then.
    pub fn compute(&mut self, k: usize) -> Result<()> {
        let started = Instant::now();
        let plan = Arc::clone(&self.plan);
        let compute = plan.computes.get(k).ok_or_else(|| Error::Internal(format!("no compute {k}")))?;
        let _there = self.enter(plan.buckets[compute.bucket].shape.device)?;
        let (number, bucket) = (compute.bucket, &plan.buckets[compute.bucket]);
        let _in_use = self.use_in_functions(bucket);
        for positions in self.batches(number, &compute.steps) {
            for (at, step) in compute.steps.iter().enumerate() {
                if step.guarded() && !self.due[number] {
                    continue;
                }
                match step {
                    Step::Gradients => self.average_in(number, bucket)?,
                    Step::Load => self.load_states(number, bucket)?,
                    Step::Store => self.store_states(number, bucket)?,
                    Step::Pack(redistribution) => {
                        exchange::pack(bucket, redistribution, number, &mut self.memory)?;
                    }
                    Step::Unpack(redistribution) => {
                        exchange::unpack(bucket, redistribution, number, &mut self.memory)?;
                    }
                    Step::Stage(point) => {
                        let rate = self.rates.get(bucket.algorithm).and_then(Option::as_ref);
                        let _following = kernels::follow(rate.map(|(_, at)| at));
                        self.stage(&plan, number, point, (k, at), positions.clone())?;
                    }
                }
            }
        }
        self.spent[k] = started.elapsed();
        Ok(())
    }

    /// Copies the gradients of a bucket to where they are averaged; a missing one contributes zeros.
    fn average_in(&mut self, number: usize, bucket: &Bucket) -> Result<()> {
        let none = || Error::Internal("no buffer to average gradients in".into());
        let mut rest = self.memory.one(number, bucket.gradient.ok_or_else(none)?)?;
        let mut pairs = Vec::with_capacity(bucket.units.len());
        for unit in &bucket.units {
            let local = unit.shard.local;
            let mut to = rest.take_first(local.numel());
            match &self.bound[unit.param].grad {
                Some(grad) => {
                    let to = to.into_matrix(0, [local.rows, local.cols], local.cols);
                    pairs.push(([matrix(&grad.view(), &local)], [to]));
                }
                None => to.clear()?,
            }
        }
        crate::kernels::run(&crate::kernels::Convert { factor: 1.0 }, &mut jobs(pairs))
    }

    /// Copies the states of a bucket that are sent to owners into the buffers for them; those of parameters without a
    /// gradient are zero there.
    fn load_states(&mut self, number: usize, bucket: &Bucket) -> Result<()> {
        for &(buffer, state) in &bucket.program.carried.states {
            let spec = &bucket.program.buffers[buffer];
            let mut rest = self.memory.one(number, buffer)?;
            let mut copies = Vec::with_capacity(bucket.units.len());
            for (unit, fixed) in bucket.units.iter().zip(&self.fixed[number]) {
                let (bound, (at, part)) = (&self.bound[unit.param], &fixed.states[state]);
                let [rows, cols] = Redistribution::size(bucket, spec, unit, bucket.depth());
                let mut to = rest.take_first(rows * cols);
                if bound.grad.is_some() {
                    let from = matrix(&bound.states[*at].view(), part).first_cols(cols);
                    copies.push(kernels::Copy { from, to: to.into_matrix(0, [rows, cols], cols) });
                } else {
                    to.clear()?;
                }
            }
            kernels::copy(copies)?;
        }
        Ok(())
    }

    /// Copies states that came back from owners to their storage; those of parameters without a gradient are unchanged.
    fn store_states(&mut self, number: usize, bucket: &Bucket) -> Result<()> {
        for &(buffer, state) in &bucket.program.carried.states {
            let spec = &bucket.program.buffers[buffer];
            let from = self.memory.one(number, buffer)?.into_view();
            let states = States::new(&mut self.bound);
            let (mut first, mut copies) = (0, Vec::with_capacity(bucket.units.len()));
            for (unit, fixed) in bucket.units.iter().zip(&self.fixed[number]) {
                let [rows, cols] = Redistribution::size(bucket, spec, unit, bucket.depth());
                let (at, part) = &fixed.states[state];
                if states.takes_part(unit.param) {
                    let to = states.part(unit.param, *at, part).into_first_cols(cols);
                    copies.push(kernels::Copy { from: from.matrix(first, [rows, cols], cols), to });
                }
                first += rows * cols;
            }
            kernels::copy(copies)?;
        }
        Ok(())
    }

    /// The time that the mathematics of algorithms took since this was last asked for: all but the session's own work.
    pub fn take_inside(&mut self) -> Duration {
        std::mem::take(&mut self.inside)
    }

    /// Torch's streams on which the next step runs, one for each device of the plan.
    pub fn set_streams(&mut self, streams: Vec<usize>) {
        self.streams = streams;
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
