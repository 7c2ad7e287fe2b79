//! An algorithm and its last step: decay, and the update from the parameter, with norms of weights free or bound.

use std::ops::Deref;

use super::by_matrix::ByMatrix;
use super::last_step::apply;
use super::norms::{WEIGH, WeightNorm};
use super::stage::StageIo;
use super::{Algorithm, entry};
use crate::error::{Error, Result};
use crate::program::{Program, ProgramOp, Stage};
use crate::spec::{Block, Hyper, Options, ParamSpec, StateSpec, UnitShape};

/// An algorithm with the settings that concern its last step.
#[derive(Debug)]
pub struct Composed {
    algorithm: Box<dyn Algorithm>,
    norm: WeightNorm,
}

impl Composed {
    /// The algorithm of this name with these settings.
    ///
    /// # Errors
    /// `Error::Value` for an unknown name or settings that it refuses.
    pub(super) fn new(name: &str, options: &Options) -> Result<Self> {
        let (algorithm, norm) = ((entry(name)?.new)(options)?, WeightNorm::new(options)?);
        let algorithm = if norm.is_free() || !algorithm.flat() {
            algorithm
        } else {
            Box::new(ByMatrix::new(algorithm, options)?)
        };
        if !norm.is_free() && !algorithm.leaves_update() {
            return Err(Error::Value(format!("{name} takes weight_norm='free' only")));
        }
        Ok(Self { algorithm, norm })
    }

    /// Tests whether the norms of a parameter whose matrices have `dims` dimensions are bound.
    pub fn binds(&self, dims: usize) -> bool {
        self.norm.binds(dims)
    }

    /// As [`Algorithm::state`], with what the last step keeps behind the algorithm's own.
    ///
    /// # Errors
    /// As there.
    pub fn state(&self, p: &ParamSpec, blocks: &[Block]) -> Result<Vec<StateSpec>> {
        let mut states = self.algorithm.state(p, blocks)?;
        states.extend(self.norm.state(p, &self.algorithm.view(p), blocks)?);
        Ok(states)
    }

    /// As [`Algorithm::program`].
    ///
    /// # Errors
    /// As there.
    pub fn program(&self, shape: &UnitShape) -> Result<Program> {
        let mut program = self.algorithm.program(shape)?;
        if shape.bound.is_none() {
            return Ok(program);
        }
        let last = self.algorithm.update(shape).map(|(last, _)| last);
        let is_last = |op: &ProgramOp| matches!(op, ProgramOp::Local { stage, .. } if Some(*stage) == last);
        let at = program.ops.iter().position(is_last).ok_or_else(|| no_update(self.name()))?;
        let (sums, ops) = self.norm.sums_of(shape, program.buffers.len());
        program.buffers.push(sums);
        program.ops.splice(at..at, ops);
        Ok(program)
    }

    /// As [`Algorithm::gathered_program`]. Sums over shards after the update have no place in what is gathered.
    ///
    /// # Errors
    /// As there.
    pub fn gathered_program(&self, shape: &UnitShape) -> Result<Option<Program>> {
        if shape.bound.is_some() { Ok(None) } else { self.algorithm.gathered_program(shape) }
    }

    /// As [`Algorithm::run`].
    ///
    /// # Errors
    /// As there.
    pub fn run(&self, stage: Stage, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let Some((last, update)) = self.algorithm.update(io.class) else {
            return self.algorithm.run(stage, io, h);
        };
        if stage == WEIGH {
            self.algorithm.finish(io, h)?;
            return self.norm.weigh(io, update);
        }
        if stage != last {
            return self.algorithm.run(stage, io, h);
        }
        if io.class.bound.is_none() {
            self.algorithm.finish(io, h)?;
        }
        let step = self.algorithm.last_step(io, h)?;
        match io.class.bound {
            Some(radius) => self.norm.apply(io, &step, update, radius),
            None => apply(io, &step, update),
        }
    }
}

impl Deref for Composed {
    type Target = dyn Algorithm;

    fn deref(&self) -> &Self::Target {
        self.algorithm.as_ref()
    }
}

fn no_update(name: &str) -> Error {
    Error::Internal(format!("{name} has no last step"))
}
