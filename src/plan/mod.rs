//! Joins algorithms and layouts: parameters in, a frozen schedule over buffers out.

mod arena;
mod bucket;
mod fmt;
mod program;
mod schedule;
mod verify;

pub use arena::{Arena, Place};
pub use bucket::{Bucket, Member, Unit};
pub use program::{BufferId, BufferSpec, Program, ProgramOp, Stage, Target};
pub use schedule::{Compute, Instr};
pub use verify::{Footprints, verify};

use std::collections::BTreeMap;

use crate::algorithm::{self, AnyAlgorithm};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::options::Options;
use crate::spec::ParamSpec;

/// What the plan needs to know of a group.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupSpec {
    /// Name of its algorithm.
    pub algorithm: String,
    /// Its structural settings.
    pub options: Options,
}

/// What the plan needs to know of a parameter.
#[derive(Clone, Debug)]
pub struct ParamInput {
    /// Global facts.
    pub spec: ParamSpec,
    /// Where its elements live.
    pub layout: Layout,
    /// Index of its group.
    pub group: usize,
    /// Whether it takes no gradients: it gets no state and no work.
    pub frozen: bool,
    /// Types of states that exist already, by role: they are taken as they are.
    pub state_dtypes: BTreeMap<String, DType>,
}

/// One step of one optimizer, compiled. Frozen.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Parameters in order.
    pub members: Vec<Member>,
    /// The algorithms in use, each with the settings of one group.
    pub algorithms: Vec<AnyAlgorithm>,
    /// The group of each algorithm.
    pub algorithm_groups: Vec<usize>,
    /// Buckets in order of execution.
    pub buckets: Vec<Bucket>,
    /// Memory of the buffers.
    pub arena: Arena,
    /// Stages between communication.
    pub computes: Vec<Compute>,
    /// The instructions.
    pub schedule: Vec<Instr>,
}

impl Plan {
    /// Compiles a plan.
    ///
    /// # Errors
    /// `Error::Value` for settings or shapes that an algorithm refuses, `Error::Layout` for shardings that it cannot
    /// work on.
    pub fn build(params: Vec<ParamInput>, groups: &[GroupSpec]) -> Result<Self> {
        let mut names: Vec<(usize, String)> = Vec::new();
        let mut algorithms: Vec<AnyAlgorithm> = Vec::new();
        let mut members = Vec::with_capacity(params.len());
        for ParamInput { spec, layout, group, frozen, state_dtypes } in params {
            let settings = groups.get(group).ok_or_else(|| Error::Internal(format!("no group {group}")))?;
            refuse_distributed(&spec, &layout)?;
            let name = algorithm::name_for(&settings.algorithm, &spec, &settings.options)?;
            let key = (group, name.to_owned());
            let algorithm = if let Some(i) = names.iter().position(|k| *k == key) {
                i
            } else {
                algorithms.push(algorithm::build(name, &settings.options)?);
                names.push(key);
                names.len() - 1
            };
            let (blocks, mut states) = if frozen {
                (Vec::new(), Vec::new())
            } else {
                let blocks = algorithms[algorithm].blocks(&spec)?;
                let states = algorithms[algorithm].state(&spec, &blocks)?;
                (blocks, states)
            };
            for state in &mut states {
                state.dtype = state_dtypes.get(state.role).copied().unwrap_or(state.dtype);
            }
            members.push(Member { spec, layout, group, algorithm, frozen, blocks, states });
        }
        let limits =
            groups.iter().map(|g| g.options.optional_count("max_batch_bytes")).collect::<Result<Vec<_>>>()?;
        let buckets = bucket::buckets(&members, &algorithms, &limits)?;
        let arena = Arena::lay_out(&buckets, &vec![0; buckets.len()]);
        let (computes, schedule) = schedule::schedule(&buckets);
        let prints = Footprints {
            computes: computes.iter().map(|c| arena.places[c.bucket].clone()).collect(),
            collectives: Vec::new(),
        };
        verify(&schedule, &prints)?;
        let algorithm_groups = names.into_iter().map(|(group, _)| group).collect();
        Ok(Self { members, algorithms, algorithm_groups, buckets, arena, computes, schedule })
    }
}

/// Only axes of one rank are lowered: anything else is refused before it could go wrong.
fn refuse_distributed(spec: &ParamSpec, layout: &Layout) -> Result<()> {
    match layout.distributed_axes().next() {
        None => Ok(()),
        Some((axis, placement)) => Err(Error::Layout {
            param: spec.name.clone(),
            what: format!(
                "placement {placement:?} on mesh axis '{}' of {} ranks",
                axis.name,
                axis.ranks.len()
            ),
            way_out: "This version optimizes parameters that live on one device; use a mesh of one rank"
                .into(),
        }),
    }
}
