//! Carries out recorded formulas, an operation of libtorch for each number that is computed.

use tch::{Kind, Tensor};

use super::value::Value::{self, Computed, Scalar};
use super::value::followed_rate;
use crate::error::{Error, Result};
use crate::kernels::formula::tape::{Binary, Node, Tape, Unary};
use crate::kernels::op::Pass;
use crate::tensor::{DType, FlatView};

/// Arguments of a fallback formula: the call, and what a job has of its own.
pub(super) struct Args<'p> {
    pass: &'p Pass<'p>,
    job: usize,
    rate: Value,
    steps: Option<Value>,
    live: Option<Tensor>,
    /// By row and by column what an element is scaled by.
    scales: Vec<[Value; 2]>,
}

/// Results of a formula: the new numbers of each operand, and the factors of each sum's terms.
pub(super) struct Left {
    pub(super) updated: Vec<Value>,
    pub(super) summed: Vec<Option<[Value; 2]>>,
}

impl<'p> Args<'p> {
    /// Of job number `job` of a pass.
    pub(super) fn new(pass: &'p Pass<'p>, job: usize, scales: Vec<[Value; 2]>) -> Result<Self> {
        let wide =
            |x: &FlatView<'_>| -> Result<Tensor> { Ok(x.tensor(&[x.len()])?.f_to_kind(Kind::Double)?) };
        let steps = match pass.steps.get(job) {
            Some(steps) => Some(Computed(wide(steps)?.f_sum(Kind::Double)?)),
            None => None,
        };
        let live = pass.live.get(job).map(wide).transpose()?;
        Ok(Self { pass, job, rate: followed_rate()?, steps, live, scales })
    }

    /// Carries the formula out on the operands.
    pub(super) fn run(&self, operands: &[Value]) -> Result<Left> {
        let tape = (self.pass.declared.tape)();
        let mut run = Run {
            args: self,
            tape,
            operands,
            done: tape.nodes.iter().map(|_| None).collect(),
            uses: Vec::new(),
        };
        run.uses = run.count_uses()?;
        for at in 0..tape.nodes.len() {
            if run.uses[at] > 0 && run.done[at].is_none() {
                let value = run.compute(at);
                run.done[at] = Some(value);
                run.release_parts(at);
            }
        }
        let value = |at: usize| run.done[at].clone().ok_or_else(not_computed);
        let updated = self.pass.declared.operands.iter().zip(&tape.updated).zip(operands);
        let updated =
            updated.map(|((operand, at), old)| if operand.writes { value(*at) } else { Ok(old.clone()) });
        let summed = tape.summed.iter().map(|pair| match pair {
            Some([a, b]) => Ok(Some([value(*a)?, value(*b)?])),
            None => Ok(None),
        });
        Ok(Left { updated: updated.collect::<Result<_>>()?, summed: summed.collect::<Result<_>>()? })
    }

    /// A scalar of the operation, times the learning rate where it follows that.
    fn scalar(&self, at: usize) -> Value {
        let own = Scalar(self.pass.scalars[at]);
        if self.pass.per_rate >> at & 1 == 1 { own * &self.rate } else { own }
    }
}

/// A formula that is being carried out.
struct Run<'r> {
    args: &'r Args<'r>,
    tape: &'r Tape,
    operands: &'r [Value],
    done: Vec<Option<Value>>,
    /// Uses of each number that are still to come. One without any is freed.
    uses: Vec<usize>,
}

impl Run<'_> {
    /// Counts how often each number is needed, of what the formula leaves backwards. Flags that the host knows decide first:
    /// what they do not choose is not computed.
    fn count_uses(&mut self) -> Result<Vec<usize>> {
        let mut uses = vec![0; self.tape.nodes.len()];
        let kernel = self.args.pass.declared;
        let written = kernel.operands.iter().zip(&self.tape.updated).filter(|(operand, _)| operand.writes);
        let left = written.map(|(_, at)| *at).chain(self.tape.summed.iter().flatten().flatten().copied());
        left.for_each(|at| uses[at] += 1);
        for at in (0..uses.len()).rev() {
            if uses[at] > 0 {
                for part in self.parts(at)? {
                    uses[part] += 1;
                }
            }
        }
        Ok(uses)
    }

    /// The numbers that one is made of, without what a flag that the host knows does not choose.
    fn parts(&mut self, at: usize) -> Result<Vec<usize>> {
        let node = self.tape.nodes[at];
        if let Node::Select(flag, yes, no) = node
            && let Some(is_set) = self.known_flag(flag)?
        {
            return Ok(vec![if is_set { yes } else { no }]);
        }
        Ok(node.parts().collect())
    }

    /// A flag, if the host knows it without anything that is on the device.
    fn known_flag(&mut self, at: usize) -> Result<Option<bool>> {
        let flag = match self.tape.nodes[at] {
            Node::Flag(_) | Node::Never | Node::Counts => self.compute(at),
            Node::Binary(Binary::Both, a, b) => match (self.known_flag(a)?, self.known_flag(b)?) {
                (Some(false), _) | (_, Some(false)) => Scalar(0.0),
                (Some(true), Some(true)) => Scalar(1.0),
                _ => return Ok(None),
            },
            _ => return Ok(None),
        };
        match flag {
            Scalar(x) => Ok(Some(x != 0.0)),
            _ => Err(not_computed()),
        }
    }

    /// Counts the parts of a number that is computed as used.
    fn release_parts(&mut self, at: usize) {
        let Ok(parts) = self.parts(at) else { return };
        for part in parts {
            self.uses[part] -= 1;
            if self.uses[part] == 0 {
                self.done[part] = None;
            }
        }
    }

    fn value(&self, at: usize) -> Value {
        self.done[at].clone().unwrap_or_else(|| Value::Failed("a number that was not computed".into()))
    }

    /// Computes a number whose parts are there.
    fn compute(&mut self, at: usize) -> Value {
        let Args { pass, job, rate, steps, live, scales } = self.args;
        let factors = pass.factors.get(*job).copied().unwrap_or([f64::NAN; 2]);
        match self.tape.nodes[at] {
            Node::Const(x) => Scalar(x),
            Node::Scalar(n) | Node::Flag(n) => self.args.scalar(n),
            Node::Factor(n) => Scalar(factors[n]),
            Node::Live(n) => match live {
                Some(all) => all.f_select(0, i64::try_from(n).unwrap_or(0)).into(),
                None => Scalar(f64::NAN),
            },
            Node::Never => Scalar(0.0),
            Node::Counts => Scalar(f64::from(u8::from(steps.is_some()))),
            Node::Steps => steps.clone().unwrap_or(Scalar(0.0)),
            Node::Rate => rate.clone(),
            Node::Operand(n) => self.operands[n].clone(),
            Node::RowScale(n) => scales.get(n).map_or(Scalar(1.0), |[row, _]| row.clone()),
            Node::ColScale(n) => scales.get(n).map_or(Scalar(1.0), |[_, col]| col.clone()),
            Node::Narrow(a) => self.value(a),
            Node::Unary(what, a) => {
                let a = self.value(a);
                match what {
                    Unary::Neg => -a,
                    Unary::Sqrt => a.sqrt(),
                    Unary::Exp => a.exp(),
                    Unary::Ln => a.ln(),
                }
            }
            Node::Binary(what, a, b) => self.binary(what, a, b),
            Node::Select(flag, yes, no) => match self.known_flag(flag) {
                Ok(Some(is_set)) => self.value(if is_set { yes } else { no }),
                _ => self.value(flag).choose(&self.value(yes), &self.value(no)),
            },
        }
    }

    fn binary(&self, what: Binary, a: usize, b: usize) -> Value {
        let (a, b) = (self.value(a), self.value(b));
        match what {
            Binary::Add => a + b,
            Binary::Sub => a - b,
            Binary::Mul => a * b,
            Binary::Div => a / b,
            Binary::Pow => match b {
                Scalar(exponent) => a.to_the(exponent),
                _ => Value::Failed("an exponent on a device".into()),
            },
            Binary::Power => match a {
                Scalar(base) => b.power_of(base),
                _ => Value::Failed("a power of a number on a device".into()),
            },
            Binary::Less => a.below(&b),
            Binary::AtLeast => b.at_most(&a),
            Binary::Both => match (a, b) {
                (Scalar(x), other) | (other, Scalar(x)) if x != 0.0 => other,
                (Scalar(_), _) | (_, Scalar(_)) => Scalar(0.0),
                // Of answers the product is yes where both are.
                (a, b) => a * b,
            },
        }
    }
}

/// A number as it is once it is stored in a type.
pub(super) fn as_stored(x: &Value, dtype: DType) -> Value {
    match x {
        Computed(x) if dtype.is_narrow() => {
            let rounded = x.f_kind().and_then(|kind| x.f_to_kind(dtype.kind())?.f_to_kind(kind));
            rounded.into()
        }
        _ => x.clone(),
    }
}

fn not_computed() -> Error {
    Error::Internal("a number of a formula that was not computed".into())
}
