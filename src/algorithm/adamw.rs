//! `AdamW`: decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101), optional `AMSGrad` and cautious decay.
//!
//! m ← β₁m + (1-β₁)g, v ← β₂v + (1-β₂)g², x ← (1-lr·λ)x - lr/(1-β₁ᵗ) · m / (√v/√(1-β₂ᵗ) + ε).

use super::elementwise::Elementwise;
use super::stage::{StageIo, UnitIo, jobs};
use super::{Entry, MOMENTS, STORAGE};
use crate::error::Result;
use crate::kernels;
use crate::spec::{Code, Hyper, Options, ParamSpec, StateSpec, StateStorage};
use crate::tensor::DType;

pub(super) const ENTRY: Entry = Entry {
    name: AdamW::NAME,
    options: &[&["amsgrad", "decay_order", "momentum_dtype", "variance_dtype"], &STORAGE],
    states: &[&MOMENTS, &[("max_variance", "max_exp_avg_sq")]],
    new: |options| Ok(Box::new(AdamW::new(options)?)),
};

const LR: usize = 0;
const BETA1: usize = 1;
const BETA2: usize = 2;
const EPSILON: usize = 3;
const WEIGHT_DECAY: usize = 4;

/// The counter of the steps among the states.
const STEP: usize = 2;

#[derive(Debug)]
struct AdamW {
    amsgrad: bool,
    /// The counter of the steps, which is where the parameters are for graphs that count.
    step: StateSpec,
    cautious: bool,
    /// True if weight decay comes after the update.
    late: bool,
    momentum_dtype: Option<DType>,
    variance_dtype: Option<DType>,
    storage: StateStorage,
}

impl AdamW {
    fn new(options: &Options) -> Result<Self> {
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
}

impl Elementwise for AdamW {
    const NAME: &'static str = "adamw";
    const SCALARS: &'static [&'static str] = &["lr", "beta1", "beta2", "epsilon", "weight_decay"];
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

    fn is_late(&self) -> bool {
        self.late
    }

    fn update(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let counters = io.units.iter_mut().map(|unit| unit.take_state(STEP).into_all()).collect();
        let (corrections, steps) = kernels::count_steps(counters, h[LR], [h[BETA1], h[BETA2]])?;
        let update = kernels::AdamW {
            beta1: h[BETA1],
            beta2: h[BETA2],
            epsilon: h[EPSILON],
            decay: h[LR] * h[WEIGHT_DECAY],
            cautious: self.cautious,
            late: self.late,
            grad_factor: io.grad_factor,
            corrections,
            steps,
        };
        let operands =
            io.units.iter_mut().map(|UnitIo { param, grad, state: [m, v, _, largest, ..], .. }| {
                ([*grad], [param.reborrow(), m.reborrow(), v.reborrow(), largest.reborrow()])
            });
        if self.amsgrad {
            return kernels::run(&update, &mut jobs(operands));
        }
        kernels::run(&update, &mut jobs(operands.map(|(grad, [x, m, v, _])| (grad, [x, m, v]))))
    }
}
