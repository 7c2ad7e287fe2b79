//! Told to a kernel's formula beside its operands.

use tch::{Kind, Tensor};

use super::value::Value::{self, Known, There};
use crate::error::Result;
use crate::kernels::cuda_call::Pass;
use crate::kernels::stay::followed_rate;
use crate::tensor::{DType, FlatView};

/// The formula of a kernel: it puts what it writes in the place of the operand, and returns sums or what is summed.
pub(in crate::kernels) type Formula = fn(&Given<'_>, &mut [Value]) -> Vec<Value>;

/// Scalars, and what a job has of its own.
pub(in crate::kernels) struct Given<'p> {
    pass: &'p Pass<'p>,
    job: usize,
    rate: Value,
    step: Option<Value>,
    live: Option<Tensor>,
    /// Types in which the operands are stored.
    stored: Vec<DType>,
    /// By row and by column what an element is scaled by.
    scales: Vec<[Value; 2]>,
}

impl<'p> Given<'p> {
    /// Of job number `job` of a pass.
    pub(super) fn new(
        pass: &'p Pass<'p>,
        job: usize,
        stored: Vec<DType>,
        scales: Vec<[Value; 2]>,
    ) -> Result<Self> {
        let wide =
            |x: &FlatView<'_>| -> Result<Tensor> { Ok(x.tensor(&[x.len()])?.f_to_kind(Kind::Double)?) };
        let step = match pass.steps.get(job) {
            Some(step) => Some(There(wide(step)?.f_sum(Kind::Double)?)),
            None => None,
        };
        let live = pass.live.get(job).map(wide).transpose()?;
        Ok(Self { pass, job, rate: followed_rate()?, step, live, stored, scales })
    }

    /// A scalar by its name; NaN where the kernel has none of that name.
    pub(in crate::kernels) fn scalar(&self, name: &str) -> Value {
        let Some(at) = self.pass.declared.scalars.iter().position(|scalar| scalar.name == name) else {
            return Known(f64::NAN);
        };
        let own = Known(self.pass.scalars[at]);
        if self.pass.per_rate >> at & 1 == 1 { own * &self.rate } else { own }
    }

    /// A scalar that says yes or no.
    pub(in crate::kernels) fn is(&self, name: &str) -> bool {
        matches!(self.scalar(name), Known(x) if x != 0.0)
    }

    /// One of the two factors of the job.
    pub(in crate::kernels) fn factor(&self, at: usize) -> Value {
        Known(self.pass.factors.get(self.job).map_or(f64::NAN, |own| own[at]))
    }

    /// The number of the step, where a device counts.
    pub(in crate::kernels) fn step(&self) -> Option<&Value> {
        self.step.as_ref()
    }

    /// The learning rate that a device has; 1 where the host knows it.
    pub(in crate::kernels) fn rate(&self) -> &Value {
        &self.rate
    }

    /// One of the factors that the device left.
    pub(in crate::kernels) fn live(&self, at: i64) -> Value {
        match &self.live {
            Some(all) => all.f_select(0, at).into(),
            None => Known(f64::NAN),
        }
    }

    /// The factors of Adam's moments, as `AdamW::corrections` gives them: `rate / (1 - β₁ᵗ)` and `1 / √(1 - β₂ᵗ)`.
    pub(in crate::kernels) fn corrections(&self, rate: &Value) -> [Value; 2] {
        let own = [self.factor(0), self.factor(1)];
        let Some(step) = &self.step else { return own };
        let power = |name| match self.scalar(name) {
            Known(beta) => step.power_of(beta),
            other => other,
        };
        let [first, second] = [power("beta1"), power("beta2")];
        [&own[0] * rate / (1.0 - first), 1.0 / (1.0 - second).sqrt()]
    }

    /// An operand as it is once it is stored.
    pub(in crate::kernels) fn as_stored(&self, x: &Value, operand: usize) -> Value {
        match (x, self.stored.get(operand)) {
            (There(x), Some(dtype)) if dtype.is_narrow() => {
                let rounded = x.f_kind().and_then(|kind| x.f_to_kind(dtype.kind())?.f_to_kind(kind));
                rounded.into()
            }
            _ => x.clone(),
        }
    }

    /// By row and by column what an element is scaled by.
    pub(in crate::kernels) fn scale(&self, number: usize) -> [Value; 2] {
        self.scales.get(number).cloned().unwrap_or([Known(1.0), Known(1.0)])
    }
}
