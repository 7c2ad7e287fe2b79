//! `AdamW`: decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101), optional `AMSGrad` and cautious decay.
//!
//! m ← β₁m + (1-β₁)g, v ← β₂v + (1-β₂)g², x ← (1-lr·λ)x - lr/(1-β₁ᵗ) · m / (√v/√(1-β₂ᵗ) + ε).

mod adam_h;

use std::sync::Arc;

use adam_h::AdamH;

use super::elementwise::Elementwise;
use super::stage::{StageIo, UnitIo, jobs};
use super::{AnyAlgorithm, Entry, MOMENTS, STORAGE, weight_norm};
use crate::error::Result;
use crate::kernels;
use crate::spec::{Code, Hyper, Options, ParamSpec, StateSpec, StateStorage};
use crate::tensor::{DType, FlatView};

pub(super) const ENTRY: Entry = Entry {
    name: AdamW::NAME,
    options: &[
        &["amsgrad", "decay_order", "momentum_dtype", "variance_dtype"],
        &weight_norm::OPTIONS,
        &STORAGE,
    ],
    states: &[&MOMENTS, &[("max_variance", "max_exp_avg_sq")]],
    new,
};

/// In one pass where weights are free.
fn new(options: &Options) -> Result<AnyAlgorithm> {
    Ok(match AdamH::bound(options)? {
        Some(bound) => Arc::new(bound),
        None => Arc::new(AdamW::new(options)?),
    })
}

pub(super) const SCALARS: [&str; 5] = ["lr", "beta1", "beta2", "epsilon", "weight_decay"];
pub(super) const LR: usize = 0;
pub(super) const BETA1: usize = 1;
pub(super) const BETA2: usize = 2;
pub(super) const EPSILON: usize = 3;
pub(super) const WEIGHT_DECAY: usize = 4;

/// The counter of the steps among the states.
const STEP: usize = 2;

#[derive(Debug)]
pub(super) struct AdamW {
    amsgrad: bool,
    /// The counter of the steps, which is where the parameters are for graphs that count.
    step: StateSpec,
    pub(super) cautious: bool,
    /// True if weight decay comes after the update.
    pub(super) late: bool,
    momentum_dtype: Option<DType>,
    variance_dtype: Option<DType>,
    storage: StateStorage,
}

impl AdamW {
    pub(super) fn new(options: &Options) -> Result<Self> {
        Ok(Self {
            amsgrad: options.flag("amsgrad")?,
            step: StateSpec::steps(options)?,
            cautious: options.cautious()?,
            late: options.either("decay_order", "torch", "galore")?,
            momentum_dtype: options.dtype("momentum_dtype")?,
            variance_dtype: options.dtype("variance_dtype")?,
            storage: StateStorage::from_options(options)?,
        })
    }

    /// The pass with `corrections` of each unit, or the counters by which a device computes them.
    pub(super) fn pass(
        &self,
        io: &mut StageIo<'_>,
        h: &Hyper,
        corrections: Vec<[f64; 2]>,
        steps: Vec<FlatView<'_>>,
    ) -> Result<()> {
        let grad_factor = io.grad_factor;
        let mut areas = Vec::with_capacity(io.units.len());
        let mut largest = Vec::new();
        for UnitIo { param, grad, state: [m, v, _, max, ..], .. } in &mut io.units {
            areas.push(([*grad], [param.reborrow(), m.reborrow(), v.reborrow()]));
            if self.amsgrad {
                largest.push(max.reborrow());
            }
        }
        let update = kernels::AdamW {
            beta1: h[BETA1],
            beta2: h[BETA2],
            epsilon: h[EPSILON],
            decay: h[LR] * h[WEIGHT_DECAY],
            cautious: self.cautious,
            late: self.late,
            grad_factor,
            corrections,
            steps,
        };
        if self.amsgrad {
            let areas = areas.into_iter().zip(largest);
            let areas = areas.map(|((g, [x, m, v]), largest)| (g, [x, m, v, largest]));
            kernels::run(&update, &mut jobs(areas))
        } else {
            kernels::run(&update, &mut jobs(areas))
        }
    }
}

impl Elementwise for AdamW {
    const NAME: &'static str = "adamw";
    const SCALARS: &'static [&'static str] = &SCALARS;
    const FLOPS: usize = 14;

    fn states(&self, p: &ParamSpec) -> Vec<StateSpec> {
        let (momentum, dtype) = (self.storage.momentum(p, self.momentum_dtype), self.variance_dtype);
        if !self.amsgrad {
            return vec![momentum, self.storage.second_moment(p, dtype), self.step.clone()];
        }
        // The largest of many numbers that are rounded at random is too large: these are not stored in 8 bits.
        let [variance, largest] =
            ["variance", "max_variance"].map(|role| self.storage.moment(role, p, dtype, Code::Unsigned));
        vec![momentum, variance, self.step.clone(), largest]
    }

    fn update(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let counters = io.units.iter_mut().map(|unit| unit.take_state(STEP).into_all()).collect();
        let (corrections, steps) = kernels::count_steps(counters, h[LR], [h[BETA1], h[BETA2]])?;
        self.pass(io, h, corrections, steps)
    }
}
