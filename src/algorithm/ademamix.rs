//! `AdEMAMix`: Adam with a second, slow first moment (Pagliardini et al. 2024, arXiv:2409.03137), optional cautious decay.
//!
//! m₁ ← β₁m₁ + (1-β₁)g, m₂ ← β₃m₂ + (1-β₃)g, v ← β₂v + (1-β₂)g²,
//! x ← (1-lr·λ)x - lr · (m₁/(1-β₁ᵗ) + α·m₂) / (√v/√(1-β₂ᵗ) + ε), with α and β₃ that grow in the first steps.

use super::elementwise::Elementwise;
use super::stage::{StageIo, UnitIo, jobs};
use super::{Entry, STORAGE};
use crate::error::Result;
use crate::kernels::{self, Steps};
use crate::spec::{Code, Hyper, Options, ParamSpec, StateSpec, StateStorage};

pub(super) const ENTRY: Entry = Entry {
    name: AdEMAMix::NAME,
    options: &[&STORAGE],
    states: &[&[("momentum", "exp_avg_fast"), ("slow_momentum", "exp_avg_slow"), ("variance", "exp_avg_sq")]],
    new: |options| Ok(Box::new(AdEMAMix::new(options)?)),
};

#[derive(Debug)]
struct AdEMAMix {
    /// The counter of the steps, which is where the parameters are for graphs that count.
    step: StateSpec,
    cautious: bool,
    storage: StateStorage,
}

impl AdEMAMix {
    fn new(options: &Options) -> Result<Self> {
        Ok(Self {
            step: StateSpec::steps(options)?,
            cautious: options.cautious()?,
            storage: StateStorage::from_options(options)?,
        })
    }
}

impl Elementwise for AdEMAMix {
    const NAME: &'static str = "ademamix";
    const SCALARS: &'static [&'static str] =
        &["lr", "betas[0]", "betas[1]", "betas[2]", "alpha", "t_alpha_beta3?", "epsilon", "weight_decay"];
    const FLOPS: usize = 19;

    fn states(&self, p: &ParamSpec) -> Vec<StateSpec> {
        vec![
            self.storage.momentum(p, None),
            self.storage.moment("slow_momentum", p, None, Code::Signed),
            self.storage.second_moment(p, None),
            self.step.clone(),
        ]
    }

    fn update(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let [lr, beta1, beta2, beta3, alpha, warmup, epsilon, weight_decay] = h.all();
        let (cautious, grad_factor, decay) = (self.cautious, io.grad_factor, lr * weight_decay);
        let (known, steps) = (Vec::new(), Vec::new());
        let (mut counters, mut operands) =
            (Vec::with_capacity(io.units.len()), Vec::with_capacity(io.units.len()));
        for UnitIo { param, grad, state: [fast, slow, v, step, ..], .. } in &mut io.units {
            counters.push(step.row(0));
            operands.push(([*grad], [param.reborrow(), fast.reborrow(), slow.reborrow(), v.reborrow()]));
        }
        let steps_taken = Steps::count(counters)?;
        let update = kernels::AdEMAMix {
            lr,
            beta1,
            beta2,
            beta3,
            alpha,
            warmup,
            epsilon,
            decay,
            cautious,
            grad_factor,
            known,
            steps,
        };
        kernels::run(&update.at(steps_taken), &mut jobs(operands))
    }
}
