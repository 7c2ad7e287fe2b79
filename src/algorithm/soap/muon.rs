//! SOAP-Muon: momentum that is tempered in an eigenbasis before it is orthonormalized.
//!
//! M ← μM + (1-μ)G, N = (1-μ)G + μM. The first gradient: D = N. Afterwards, with the bases P and Q: Y = Pᵀ·N·Q,
//! V ← β₂V + (1-β₂)Y², D = P·(Y / max(V, ε²)^p)·Qᵀ, scaled to the Schatten-4 norm of N. X ← (1-lr·λ)X - lr·s·orth(D), then
//! L, R and the bases as in SOAP.

use tch::Tensor;

use super::basis::Bases;
use super::layout::{BASES, BEHIND, SINCE};
use super::stages::turn;
use crate::algorithm::last_step::LastStep;
use crate::algorithm::orthonormal::{BETA2, EPSILON, MOMENTUM, MU, Orthonormal, U};
use crate::algorithm::stage::{Buffers, StageIo, UnitIo, gradients, jobs};
use crate::algorithm::{Algorithm, flops};
use crate::error::{Error, Result};
use crate::kernels;
use crate::linalg::OneThread;
use crate::program::{BufferId, BufferSpec, Program, Stage, Target};
use crate::spec::{
    Block, Code, Description, DimSharding, Hyper, Matrices, Options, ParamSpec, Side, StateSpec,
    StateStorage, UnitShape,
};
use crate::tensor::DType;

const SCALARS: [&str; 7] = ["lr", "mu", "weight_decay", "epsilon", "beta2", "eps", "shampoo_beta?"];
const EPS: usize = 5;
const SHAMPOO_BETA: usize = 6;

const VARIANCE: usize = 1;

/// The gradient, between the buffers of the orthonormalization and those of the bases.
const GRADIENT: BufferId = 2;
/// The look-ahead of the momentum, behind the buffers of the bases.
const LOOKAHEAD: BufferId = BASES + BEHIND;
/// The squared norms by which matrices are divided before they are orthonormalized, where these are not Frobenius norms.
const NORM: BufferId = LOOKAHEAD + 1;

const STEP: Stage = 0;
const LOAD: Stage = 1;
const APPLY: Stage = 2;
const ORTHONORMALIZE: Stage = 7;

#[derive(Debug)]
pub(in crate::algorithm) struct SoapMuon {
    bases: Bases,
    common: Orthonormal,
    storage: StateStorage,
    power: f64,
    /// True if matrices are divided by their Schatten-4 norm, not by their Frobenius norm.
    schatten: bool,
}

impl SoapMuon {
    pub(in crate::algorithm) fn new(options: &Options) -> Result<Self> {
        let schatten = options.either("orth_norm", "frobenius", "schatten4")?;
        if schatten && options.either("orth_preset", "exact", "fast")? {
            return Err(Error::Value(
                "orth_preset 'fast' divides by a norm of its own: leave orth_norm='schatten4' out".into(),
            ));
        }
        Ok(Self {
            bases: Bases::new(options, true)?,
            common: Orthonormal::new(options)?,
            storage: StateStorage::from_options(options)?,
            power: options.real("denom_power")?,
            schatten,
        })
    }

    /// The momentum and its look-ahead, the gradient in the type of products.
    fn look_ahead(io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let grad_factor = io.grad_factor;
        let StageIo { units, buffers, .. } = io;
        gradients(units, buffers.get_mut(GRADIENT)?, grad_factor)?;
        let momentum =
            kernels::Momentum { mu: h[MU], grad_factor: grad_factor * (1.0 - h[MU]), nesterov: true };
        let out = buffers.get_mut(LOOKAHEAD)?.matrices(units)?;
        let all = units.iter_mut().zip(out);
        let all = all.map(|(unit, n)| ([unit.grad], [unit.state[MOMENTUM].reborrow(), n]));
        kernels::run(&momentum, &mut jobs(all))
    }

    /// The same at the owners, who have the gradients.
    fn look_ahead_owned(io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let StageIo { units, buffers, .. } = io;
        for unit in units.iter().filter(|unit| !unit.active) {
            buffers.get_mut(U)?.flat(unit)?.clear()?;
        }
        units.retain(|unit| unit.active);
        let momentum = kernels::Momentum { mu: h[MU], grad_factor: 1.0 - h[MU], nesterov: true };
        let [gradient, ahead] = buffers.several([GRADIENT, LOOKAHEAD])?;
        let pairs = gradient.matrices(units)?.into_iter().zip(ahead.matrices(units)?);
        let all = units.iter_mut().zip(pairs);
        let all = all.map(|(unit, (g, n))| ([g.into_view()], [unit.state[MOMENTUM].reborrow(), n]));
        kernels::run(&momentum, &mut jobs(all))
    }

    /// The gradients that owners of matrices take.
    fn load(io: &mut StageIo<'_>) -> Result<()> {
        let StageIo { units, buffers, grad_factor, .. } = io;
        gradients(units, buffers.get_mut(GRADIENT)?, *grad_factor)
    }

    /// Squares of the gradient, and the look-ahead tempered in the basis, to what is orthonormalized.
    fn temper(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let sides = self.bases.sides_in(io.class);
        let StageIo { units, buffers, class, .. } = io;
        let _alone = OneThread::for_small(class.rows * class.cols * class.rows.max(class.cols));
        for unit in &*units {
            let gradient = buffers.get(GRADIENT)?.read_tensor(unit)?.f_alias()?;
            self.bases.squares(class, &gradient, unit, buffers)?;
        }
        // The gradient is not needed any more: its buffer has what is tempered.
        let turned = |unit: &UnitIo<'_>, buffers: &mut Buffers<'_>, back| {
            let mut x = buffers.get_mut(GRADIENT)?.tensor(unit)?.f_alias()?;
            turn(&mut x, sides, |at| Bases::basis(unit, at, sides[at]), back)
        };
        let moves = |unit: &UnitIo<'_>| unit.steps > 0.0 && !sides.is_empty();
        let [gradient, ahead] = buffers.several([GRADIENT, LOOKAHEAD])?;
        let pairs = ahead.matrices(units)?.into_iter().zip(gradient.matrices(units)?);
        let pairs = pairs.map(|(n, y)| ([n.into_view()], [y]));
        kernels::run(&kernels::Convert { factor: 1.0 }, &mut jobs(pairs))?;
        for unit in units.iter().filter(|unit| moves(unit)) {
            turned(unit, buffers, false)?;
        }
        let (beta2, least, power) = (h[BETA2], h[EPS] * h[EPS], self.power);
        let y = buffers.get_mut(GRADIENT)?.matrices(units)?;
        let all = units.iter_mut().zip(y).filter(|(unit, _)| moves(unit));
        let all = all.map(|(unit, y)| ([], [y, unit.state[VARIANCE].reborrow()]));
        if power.to_bits() == 0.5_f64.to_bits() {
            kernels::run(&kernels::Temper { beta2, least }, &mut jobs(all))?;
        } else {
            kernels::run(&kernels::TemperTo { beta2, least, power }, &mut jobs(all))?;
        }
        for unit in units.iter().filter(|unit| moves(unit)) {
            turned(unit, buffers, true)?;
            let is_made = is_there(&*unit.state[SINCE].view().tensor()?)?;
            let [gradient, ahead] = buffers.several([GRADIENT, LOOKAHEAD])?;
            let (mut d, n) = (gradient.tensor(unit)?, ahead.tensor(unit)?);
            scale_like(&mut d, &n, &is_made)?;
        }
        Self::to_update(units, buffers)
    }

    /// Copies the tempered matrices to the buffer that is orthonormalized.
    fn to_update(units: &[UnitIo<'_>], buffers: &mut Buffers<'_>) -> Result<()> {
        let [gradient, update] = buffers.several([GRADIENT, U])?;
        let pairs = gradient.matrices(units)?.into_iter().zip(update.matrices(units)?);
        let pairs = pairs.map(|(d, u)| ([d.into_view()], [u]));
        kernels::run(&kernels::Convert { factor: 1.0 }, &mut jobs(pairs))
    }

    /// Orthonormalizes the updates of all units.
    fn orthonormalize(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        if self.schatten {
            let StageIo { units, buffers, .. } = &mut *io;
            for unit in &*units {
                let [update, norm] = buffers.several([U, NORM])?;
                let wide = update.read_tensor(unit)?.f_to_kind(unit_kind(update.flat.dtype()))?;
                let size = schatten4(&wide)?.f_to_kind(tch::Kind::Double)?;
                norm.tensor(unit)?.f_copy_(&size.f_square()?)?;
            }
        }
        self.common.orthonormalize(io, h[EPSILON], self.schatten.then_some(NORM))
    }

    /// Buffers and stages for matrices of a class.
    fn compose(&self, shape: &UnitShape) -> Result<Program> {
        let (orth, product) = (self.common.product(shape.param), shape.param.arithmetic());
        let like = |name, dtype| {
            BufferSpec::new(name, shape.rows, shape.cols, dtype)
                .sharded(DimSharding::LikeParam(Side::Rows), DimSharding::LikeParam(Side::Cols))
        };
        let program = Program { exclusive: true, ..self.bases.states_of(shape) };
        let program = program.buffer(like("u", orth));
        let program = self.common.scratch(program, shape, [shape.rows, shape.cols], orth)?;
        let norm = BufferSpec::new("norm", 1, usize::from(self.schatten), DType::F64);
        let program = self.bases.buffers(program.buffer(like("gradient", product)), shape);
        let mut program = program.buffer(like("ahead", product)).buffer(norm);
        if !self.bases.is_owned(shape) {
            program = program.local(STEP, "step").redistribute(U, Target::Whole).same_placement_as(NORM, U);
            program = program.local(ORTHONORMALIZE, "orthonormalize").release(NORM);
            program = program.redistribute(U, Target::Storage);
            return Ok(self.bases.learn(program.local(APPLY, "apply"), shape));
        }
        let mut same_placement = self.bases.left(shape);
        same_placement.extend([LOOKAHEAD, NORM]);
        program = program.local(LOAD, "load").redistribute(GRADIENT, Target::Whole);
        program = same_placement
            .iter()
            .chain(&[U])
            .fold(program, |p, &buffer| p.same_placement_as(buffer, GRADIENT));
        program = self.bases.learn(program.local(STEP, "step"), shape);
        program = program.local(ORTHONORMALIZE, "orthonormalize");
        program = same_placement.into_iter().chain([GRADIENT]).fold(program, Program::release);
        program = program.redistribute(U, Target::Storage);
        Ok(program.local(APPLY, "apply"))
    }
}

/// The type in which norms of matrices of this type are computed.
fn unit_kind(dtype: DType) -> tch::Kind {
    dtype.arithmetic().kind()
}

/// `(Σ σ⁴)^(1/4)`: the root of the Frobenius norm of the smaller Gram matrix, of elements of at most 1, whose fourth powers
/// are neither too large nor too small.
fn schatten4(x: &Tensor) -> Result<Tensor> {
    let (rows, cols) = x.size2()?;
    let largest = x.f_abs()?.f_amax([0, 1].as_slice(), false)?.f_clamp_min(f64::from(f32::MIN_POSITIVE))?;
    let unit = x.f_div(&largest)?;
    let turned = unit.f_tr()?;
    let gram = if rows <= cols { unit.f_mm(&turned)? } else { turned.f_mm(&unit)? };
    Ok(gram.f_norm()?.f_sqrt()?.f_mul(&largest)?)
}

/// A truth value: something in a tensor is not zero.
fn is_there(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_abs()?.f_amax([0, 1].as_slice(), false)?.f_ne(0.0)?)
}

/// `D ← D·s₄(N)/s₄(D)`, or N where the flag is false.
fn scale_like(d: &mut Tensor, n: &Tensor, flag: &Tensor) -> Result<()> {
    kernels::frozen(|| {
        let factor = schatten4(n)?.f_div(&schatten4(d)?.f_clamp_min(f64::from(f32::MIN_POSITIVE))?)?;
        let scaled = d.f_mul(&factor)?.f_where_self(flag, n)?;
        Ok(d.f_copy_(&scaled)?)
    })
}

impl Algorithm for SoapMuon {
    fn name(&self) -> &'static str {
        "soap_muon"
    }

    fn sees_largest(&self) -> bool {
        true
    }

    fn scalars(&self) -> &'static [&'static str] {
        &SCALARS
    }

    fn orientation(&self, num_shards: [usize; 2]) -> Option<bool> {
        self.bases.orientation(num_shards)
    }

    fn counted(&self) -> bool {
        true
    }

    fn due(&self, _stream: u64, steps: f64) -> bool {
        self.bases.due(steps)
    }

    fn first_refresh(&self) -> Option<usize> {
        Some(SINCE)
    }

    fn view(&self, p: &ParamSpec) -> Matrices {
        self.bases.view(p)
    }

    fn leaves_update(&self) -> bool {
        true
    }

    fn replays(&self, _encoded: bool) -> bool {
        self.common.replays()
    }

    fn blocks(&self, p: &ParamSpec) -> Result<Vec<Block>> {
        self.bases.blocks(p)
    }

    fn state(&self, p: &ParamSpec, blocks: &[Block]) -> Result<Vec<StateSpec>> {
        let variance = StateSpec::like("variance", p, p.dtype.arithmetic());
        let mut states = self.common.states(p, blocks, None);
        states.push(variance.eight_bit(Code::Unsigned, &self.storage));
        states.push(StateSpec::counter("step"));
        states.extend(self.bases.states(p, blocks));
        Ok(states)
    }

    fn program(&self, shape: &UnitShape) -> Result<Program> {
        self.compose(shape)
    }

    fn run(&self, stage: Stage, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        match stage {
            STEP => {
                if self.bases.is_owned(io.class) {
                    Self::look_ahead_owned(io, h)?;
                } else {
                    Self::look_ahead(io, h)?;
                }
                self.temper(io, h)
            }
            LOAD => Self::load(io),
            ORTHONORMALIZE => self.orthonormalize(io, h),
            _ => self.bases.run(stage, io, [h[SHAMPOO_BETA], h[BETA2]]),
        }
    }

    fn update(&self, _class: &UnitShape) -> Option<(Stage, BufferId)> {
        Some((APPLY, U))
    }

    fn last_step(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<LastStep> {
        Ok(self.common.last_step(io.class, h))
    }

    fn describe(&self, p: &ParamSpec, blocks: &[Block], num_shards: [usize; 2]) -> Description {
        let (products, refresh) = Bases::flops(blocks, self.bases.sides_of(p, blocks));
        let refresh = refresh / flops(self.bases.frequency);
        let about = self.common.describe(p, blocks, |b| [b.rows, b.cols]);
        let whole = if num_shards == [1, 1] { refresh } else { products + refresh };
        Description {
            flops: about.flops + products + refresh,
            whole_flops: about.whole_flops + whole,
            ..about
        }
    }
}
