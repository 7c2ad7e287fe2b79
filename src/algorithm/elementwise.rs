//! Algorithms whose step on an element depends on that element alone.

use std::fmt::Debug;

use super::stage::StageIo;
use super::{Algorithm, flops, whole};
use crate::error::Result;
use crate::program::{Program, Stage};
use crate::spec::{Block, Description, Hyper, ParamSpec, StateSpec, UnitShape};

/// An algorithm of one pass over elements: parameters of any shape, each one block, share a bucket.
pub(super) trait Elementwise: Debug + Send + Sync {
    /// Name in the group key `algorithm`.
    const NAME: &'static str;
    /// The live scalars, in the order by which `update` indexes them.
    const SCALARS: &'static [&'static str];
    /// Floating-point operations of an element, as `explain()` counts them.
    const FLOPS: usize;

    /// The states kept for a parameter.
    fn states(&self, p: &ParamSpec) -> Vec<StateSpec>;

    /// Tests whether the decay comes after the update.
    fn is_late(&self) -> bool {
        false
    }

    /// The pass.
    ///
    /// # Errors
    /// Whatever libtorch or a kernel says.
    fn update(&self, io: &mut StageIo<'_>, hyper: &Hyper) -> Result<()>;
}

impl<T: Elementwise> Algorithm for T {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn scalars(&self) -> &'static [&'static str] {
        T::SCALARS
    }

    fn flat(&self) -> bool {
        true
    }

    fn is_late(&self) -> bool {
        Elementwise::is_late(self)
    }

    fn blocks(&self, p: &ParamSpec) -> Result<Vec<Block>> {
        Ok(whole(p))
    }

    fn state(&self, p: &ParamSpec, _blocks: &[Block]) -> Result<Vec<StateSpec>> {
        Ok(self.states(p))
    }

    fn program(&self, _shape: &UnitShape) -> Result<Program> {
        Ok(Program::new().local(0, "apply"))
    }

    fn run(&self, _stage: Stage, io: &mut StageIo<'_>, hyper: &Hyper) -> Result<()> {
        self.update(io, hyper)
    }

    fn describe(&self, p: &ParamSpec, _blocks: &[Block], _shards: [usize; 2]) -> Description {
        let (view, flops) = ("elements".into(), flops(T::FLOPS * p.numel()));
        Description { view, lr_factor: 1.0, flops, ..Description::default() }
    }
}
