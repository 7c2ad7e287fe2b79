//! Elementwise algorithms whose update lies in a buffer before the last step: they work on the matrices of a parameter.
//!
//! The update for a learning rate of 1, without decay, is what the algorithm subtracts from zeros.

use super::Algorithm;
use super::last_step::LastStep;
use super::stage::{Buffers, StageIo, UnitIo};
use crate::error::{Error, Result};
use crate::program::{BufferId, BufferSpec, Program, Stage};
use crate::spec::{Block, Description, DimSharding, Hyper, Options, ParamSpec, Side, StateSpec, UnitShape};
use crate::tensor::{DType, FlatViewMut, MatrixViewMut};

const U: BufferId = 0;

const STEP: Stage = 0;
const APPLY: Stage = 1;

/// The learning rate at which zeros become the update.
const ALONE: f64 = -1.0;

#[derive(Debug)]
pub(super) struct ByMatrix {
    algorithm: Box<dyn Algorithm>,
    cautious: bool,
    /// Positions of the learning rate and of the decay among the scalars.
    lr: usize,
    weight_decay: usize,
    /// Position of the counter of steps among the states, if there is one.
    counter: Option<usize>,
}

impl ByMatrix {
    pub(super) fn new(algorithm: Box<dyn Algorithm>, options: &Options) -> Result<Self> {
        if options.capturable()? {
            return Err(Error::Value("capturable needs weight_norm='free'".into()));
        }
        let find = |name| algorithm.scalars().iter().position(|scalar| *scalar == name);
        let (Some(lr), Some(weight_decay)) = (find("lr"), find("weight_decay")) else {
            return Err(Error::Internal(format!("{} has no lr and weight_decay", algorithm.name())));
        };
        let any = ParamSpec::of_shape(&[1, 1], DType::F32);
        let counter = algorithm.state(&any, &[])?.iter().position(|state| state.role == "step");
        Ok(Self { cautious: options.cautious()?, lr, weight_decay, counter, algorithm })
    }

    /// The algorithm's pass on units; a matrix that lies in pieces is several. Each counts its steps in memory of this call,
    /// since the matrices of a parameter have one counter, which the session keeps.
    #[expect(clippy::cast_possible_truncation, reason = "counters are float32")]
    fn pass<'s>(
        &self,
        units: impl Iterator<Item = UnitIo<'s>>,
        facts: (&'s UnitShape, f64),
        h: &Hyper,
    ) -> Result<()> {
        let mut units: Vec<UnitIo<'_>> = units.flat_map(pieces).collect();
        let mut counters = vec![0_u64; units.len()];
        if let Some(counter) = self.counter {
            for (unit, memory) in units.iter_mut().zip(counters.chunks_mut(1)) {
                let mut count = FlatViewMut::over(memory, DType::F32).into_part(0, 1);
                count.slice_mut::<f32>()[0] = unit.steps as f32;
                unit.state[counter] = count.into_matrix(0, [1, 1], 1);
            }
        }
        let (class, grad_factor) = facts;
        let (group, buffers) = (Vec::new(), Buffers(Vec::new()));
        self.algorithm.run(0, &mut StageIo { units, class, grad_factor, group, probe: None, buffers }, h)
    }

    /// States, and the update of matrices to its buffer.
    fn step(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let mut alone = h.clone();
        (alone.0[self.lr], alone.0[self.weight_decay]) = (ALONE, 0.0);
        let StageIo { units, buffers, class, grad_factor, .. } = io;
        let u = buffers.get_mut(U)?;
        u.clear(units)?;
        let updates = u.matrices(units)?;
        let all = units.iter_mut().zip(updates).map(|(unit, param)| UnitIo { param, ..unit.reborrow() });
        self.pass(all, (class, *grad_factor), &alone)
    }
}

/// A unit, or one for each of its rows where these do not lie together.
fn pieces(unit: UnitIo<'_>) -> Vec<UnitIo<'_>> {
    let is_flat = unit.grad.is_flat() && unit.param.is_flat();
    if is_flat && unit.state.iter().all(MatrixViewMut::is_flat) {
        return vec![unit];
    }
    let UnitIo { param, grad, state, .. } = unit;
    let mut states = state.map(|state| state.into_groups(1));
    let rows = param.into_groups(1).enumerate();
    let piece = |(row, param)| {
        let state = states.each_mut().map(|rows| rows.next().unwrap_or(MatrixViewMut::EMPTY));
        UnitIo { param, grad: grad.rows(row, 1), state, ..unit }
    };
    rows.map(piece).collect()
}

impl Algorithm for ByMatrix {
    fn name(&self) -> &'static str {
        self.algorithm.name()
    }

    fn scalars(&self) -> &'static [&'static str] {
        self.algorithm.scalars()
    }

    fn takes_vectors(&self) -> bool {
        true
    }

    fn counted(&self) -> bool {
        self.counter.is_some()
    }

    fn leaves_update(&self) -> bool {
        true
    }

    fn blocks(&self, p: &ParamSpec) -> Result<Vec<Block>> {
        if p.shape.len() < 2 {
            return Ok(vec![Block { rows: p.numel(), cols: 1, ..Block::default() }]);
        }
        self.view(p).blocks(p)
    }

    fn state(&self, p: &ParamSpec, blocks: &[Block]) -> Result<Vec<StateSpec>> {
        self.algorithm.state(p, blocks)
    }

    fn program(&self, shape: &UnitShape) -> Result<Program> {
        if shape.bound.is_none() {
            return Ok(Program::new().local(APPLY, "apply"));
        }
        let update = BufferSpec::new("update", shape.rows, shape.cols, shape.param.arithmetic())
            .sharded(DimSharding::LikeParam(Side::Rows), DimSharding::LikeParam(Side::Cols));
        Ok(Program::new().buffer(update).local(STEP, "step").local(APPLY, "apply"))
    }

    fn run(&self, stage: Stage, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        if stage == STEP {
            return self.step(io, h);
        }
        let facts = (io.class, io.grad_factor);
        self.pass(io.units.iter_mut().map(UnitIo::reborrow), facts, h)
    }

    fn update(&self, class: &UnitShape) -> Option<(Stage, BufferId)> {
        class.bound.map(|_| (APPLY, U))
    }

    fn last_step(&self, _io: &mut StageIo<'_>, h: &Hyper) -> Result<LastStep> {
        let (lr, late) = (h[self.lr], self.algorithm.is_late());
        Ok(LastStep { lr, scale: 1.0, decay: lr * h[self.weight_decay], cautious: self.cautious, late })
    }

    fn describe(&self, p: &ParamSpec, blocks: &[Block], num_shards: [usize; 2]) -> Description {
        let about = self.algorithm.describe(p, blocks, num_shards);
        if p.shape.len() < 2 { about } else { Description { view: self.view(p).phrase(p), ..about } }
    }
}
