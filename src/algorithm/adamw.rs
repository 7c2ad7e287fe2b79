//! `AdamW`: decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101), optional `AMSGrad` and cautious decay.
//!
//! m ← β₁m + (1-β₁)g, v ← β₂v + (1-β₂)g², x ← (1-lr·λ)x - lr/(1-β₁ᵗ) · m / (√v/√(1-β₂ᵗ) + ε).

use std::sync::Arc;

use super::elementwise::Elementwise;
use super::stage::{StageIo, UnitIo, jobs};
use super::{Entry, MOMENTS, STORAGE};
use crate::error::Result;
use crate::kernels;
use crate::spec::{Code, Hyper, Options, ParamSpec, StateSpec, StateStorage};
use crate::tensor::DType;

pub(super) const ENTRY: Entry = Entry {
    name: AdamW::NAME,
    options: &[
        &["amsgrad", "capturable", "cautious_wd", "decay_order", "momentum_dtype", "variance_dtype"],
        &STORAGE,
    ],
    states: &[&MOMENTS, &[("max_variance", "max_exp_avg_sq")]],
    new: |options| Ok(Arc::new(AdamW::new(options)?)),
};

const LR: usize = 0;
const BETA1: usize = 1;
const BETA2: usize = 2;
const EPSILON: usize = 3;
const WEIGHT_DECAY: usize = 4;

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
            step: StateSpec { on_host: !options.flag("capturable")?, ..StateSpec::counter("step") },
            cautious: options.flag("cautious_wd")?,
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
        let moment = |role, dtype, code| self.storage.like(role, p, dtype).eight_bit(code, &self.storage);
        let mut states = vec![
            moment("momentum", self.momentum_dtype, Code::Signed),
            moment("variance", self.variance_dtype, Code::Unsigned),
            self.step.clone(),
        ];
        if self.amsgrad {
            states.push(moment("max_variance", self.variance_dtype, Code::Unsigned));
        }
        states
    }

    fn update(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let grad_factor = io.grad_factor;
        let (mut counters, mut areas) =
            (Vec::with_capacity(io.units.len()), Vec::with_capacity(io.units.len()));
        let mut largest = Vec::new();
        for UnitIo { param, grad, state: [m, v, step, max, ..], .. } in &mut io.units {
            counters.push(step.row(0));
            areas.push(([*grad], [param.reborrow(), m.reborrow(), v.reborrow()]));
            if self.amsgrad {
                largest.push(max.reborrow());
            }
        }
        let (corrections, steps) = kernels::count_steps(counters, h[LR], [h[BETA1], h[BETA2]])?;
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
            kernels::run(&update, &mut jobs(areas))?;
        } else {
            kernels::run(&update, &mut jobs(areas))?;
        }
        Ok(())
    }
}
