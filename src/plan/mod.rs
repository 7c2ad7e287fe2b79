//! Joins algorithms and layouts: parameters in, a frozen schedule over buffers out.

mod arena;
pub mod average;
mod bucket;
mod choice;
mod coalesce;
mod cost;
mod fmt;
mod group;
mod ir;
mod local;
mod master;
mod owned;
mod owners;
mod param;
#[cfg(test)]
mod plan_tests;
mod quantized;
mod redistribute;
mod reductions;
mod route;
mod schedule;
mod split;
mod verify;
mod waves;
mod workspace;

use std::collections::BTreeMap;

pub use arena::Arena;
pub use bucket::{Alternative, Bucket, BucketAxis, Unit};
pub use cost::Work;
pub use fmt::placements;
pub use ir::{ArenaRange, BufferShard, Redistribution, RedistributionKind, StagePoint, Step, owned_by};
pub use local::{BlockShard, Extent, LocalState, Owned};
pub use param::Param;
pub use route::{Counts, Route};
pub use schedule::{Compute, Instr, Transfer};
pub use verify::{Footprints, verify};

use crate::algorithm::{self, AnyAlgorithm};
use crate::error::{Error, Result};
use crate::layout::{Layout, Placement, ShardingAxes, local_shape};
use crate::spec::{Block, MOST_ELEMENTS, Options, ParamSpec, StateSpec};
use crate::tensor::{DType, Device};

/// Facts about a group that the plan needs.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupSpec {
    /// Name of the group's algorithm.
    pub algorithm: String,
    /// Structural settings of the group.
    pub options: Options,
}

impl GroupSpec {
    /// Structural settings of the group's parameters at a place.
    fn options_at(&self, place: Place) -> Options {
        let mut options = self.options.clone();
        options.on_device = place.device != Device::Cpu;
        options.matrix_units = options.on_device && place.matrix_units;
        options
    }
}

/// Place where a parameter is worked on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The device.
    pub device: Device,
    /// True if that is no CPU and has matrix units, which multiply narrow types the fastest.
    pub matrix_units: bool,
    /// Multiprocessors of a device, 0 if that is not known.
    pub multiprocessors: usize,
}

impl Place {
    /// The CPU.
    pub const HOST: Self = Self { device: Device::Cpu, matrix_units: false, multiprocessors: 0 };
}

/// Facts about a parameter that the plan needs.
#[derive(Clone, Debug)]
pub struct ParamInput {
    /// Global facts.
    pub spec: ParamSpec,
    /// Layout of the elements over ranks.
    pub layout: Layout,
    /// Dimensions that axes named by the user shard, with true for the outer axis.
    pub named: Vec<(usize, bool)>,
    /// Index of its group.
    pub group: usize,
    /// Place where it is worked on.
    pub place: Place,
    /// True if the parameter requires no gradient: it gets no state and no work.
    pub frozen: bool,
    /// Types (bytes as `Q8`) and global shapes of states that exist already, by role: they are taken as they are.
    pub states: BTreeMap<String, (DType, Vec<usize>)>,
}

/// One step of one optimizer, compiled. Frozen.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Parameters in order.
    pub params: Vec<Param>,
    /// The algorithms in use, each with the settings of one group on one device.
    pub algorithms: Vec<AnyAlgorithm>,
    /// The group of each algorithm.
    pub algorithm_groups: Vec<usize>,
    /// The device of each algorithm.
    pub algorithm_devices: Vec<Device>,
    /// Buckets in order of execution.
    pub buckets: Vec<Bucket>,
    /// Memory of the buffers.
    pub arena: Arena,
    /// Steps between communication.
    pub computes: Vec<Compute>,
    /// Transfers between ranks.
    pub transfers: Vec<Transfer>,
    /// The instructions.
    pub schedule: Vec<Instr>,
}

impl Plan {
    /// Compiles a plan.
    ///
    /// # Errors
    /// `Error::Value` for settings or shapes that an algorithm refuses, `Error::Layout` for shardings that it cannot
    /// work on and for parameters of a mesh on several devices.
    pub fn build(inputs: Vec<ParamInput>, groups: &[GroupSpec]) -> Result<Self> {
        check_sizes(&inputs)?;
        let devices = devices_of(&inputs)?;
        let places: Vec<Place> = inputs.iter().map(|input| input.place).collect();
        let multiprocessors = |device| {
            places.iter().find(|place| place.device == device).map_or(0, |place| place.multiprocessors)
        };
        let Drafts { mut params, algorithms, names } = drafts(inputs, groups)?;
        let limits = groups.iter().map(split::Limit::of_group).collect::<Result<Vec<_>>>()?;
        let choices = choice::of_groups(groups, &params)?;
        let workspace = workspace::Limit::of(groups, &params)?;
        let open = group::open(&params, &algorithms, &choices, workspace)?;
        let close =
            |cap, few| group::close(&open, &params, &algorithms, &limits, multiprocessors, (cap, few));
        let (buckets, sharing) = workspace.share(close, |number| open[number].first_name(&params))?;
        owned::assign_owner_layout(&mut params, &algorithms, &open, &buckets)?;
        let segments = buckets.iter().map(redistribute::segments).collect::<Result<Vec<_>>>()?;
        let coalesced = coalesce::coalesce(&buckets, &segments);
        let scheduled = schedule::schedule(&coalesced, sharing);
        let of_buckets: Vec<Device> = buckets.iter().map(|bucket| bucket.shape.device).collect();
        let arena = Arena::lay_out(&coalesced, &scheduled.slots, (&of_buckets, &devices));
        let transfers = scheduled.transfers(&buckets, &arena);
        let schedule::Scheduled { computes, order: schedule, .. } = scheduled;
        let prints = Footprints {
            computes: computes.iter().map(|c| arena.places[c.bucket].clone()).collect(),
            collectives: transfers.iter().map(|t| vec![t.send, t.recv]).collect(),
        };
        verify(&schedule, &prints)?;
        let (algorithm_groups, algorithm_devices) =
            names.into_iter().map(|(group, device, _)| (group, device)).unzip();
        Ok(Self {
            params,
            algorithms,
            algorithm_groups,
            algorithm_devices,
            buckets,
            arena,
            computes,
            transfers,
            schedule,
        })
    }

    /// The devices of the parameters, in the order of the first of each: those of the arena's parts.
    pub fn devices(&self) -> impl Iterator<Item = Device> {
        self.arena.parts.iter().map(|(device, _)| *device)
    }

    /// Tests whether an algorithm is one of the same group, on whatever device.
    #[must_use]
    pub fn same_group(&self, one: usize, other: usize) -> bool {
        let about = |at: usize| (self.algorithm_groups[at], self.algorithms[at].name());
        about(one) == about(other)
    }

    /// The buckets whose replicas average something else than the gradient: their momenta differ between replicas.
    pub fn decoupled(&self) -> impl Iterator<Item = &Bucket> {
        self.buckets.iter().filter(|b| b.gradient.is_none() && b.axes.iter().any(|a| a.pending.is_some()))
    }
}

/// The parameters of a plan with the algorithms that are in use.
struct Drafts {
    params: Vec<Param>,
    algorithms: Vec<AnyAlgorithm>,
    /// Group, device and name of each algorithm.
    names: Vec<(usize, Device, String)>,
}

/// Finds the algorithm of each parameter, its blocks and its states.
fn drafts(inputs: Vec<ParamInput>, groups: &[GroupSpec]) -> Result<Drafts> {
    let mut names: Vec<(usize, Device, String)> = Vec::new();
    let mut algorithms: Vec<AnyAlgorithm> = Vec::new();
    let mut params = Vec::with_capacity(inputs.len());
    for ParamInput { mut spec, layout, named, group, place, frozen, states: existing } in inputs {
        let settings = groups.get(group).ok_or_else(|| Error::Internal(format!("no group {group}")))?;
        check_layout(&spec, &layout)?;
        let name = algorithm::name_for(&settings.algorithm, &spec, &settings.options)?;
        let key = (group, place.device, name.to_owned());
        let algorithm = if let Some(i) = names.iter().position(|k| *k == key) {
            i
        } else {
            let mut options = settings.options_at(place);
            if name != settings.algorithm {
                algorithm::release(&mut options);
            }
            algorithms.push(algorithm::build(name, &options)?);
            names.push(key);
            names.len() - 1
        };
        let local = local_shape(&spec.shape, &layout);
        let (shards, whole, states) = if frozen {
            (Vec::new(), None, Vec::new())
        } else {
            let algorithm = &algorithms[algorithm];
            let blocks = algorithm.blocks(&spec)?;
            let leading = algorithm.leading(&spec);
            let sides = [leading, algorithm.columns(&spec)];
            for (dim, outer) in named.into_iter().filter(|(dim, _)| sides.contains(dim)) {
                // The outer axis shards the side of Q, the inner one that of P.
                spec.transposed = Some((dim == leading) == outer);
            }
            let num_shards = sides.map(|dim| ShardingAxes::of(&layout, dim).0.num_shards());
            spec.transposed = spec.transposed.or(algorithm.orientation(num_shards));
            turn(&mut spec, algorithm, &blocks, &existing)?;
            let mut states = algorithm.state(&spec, &blocks)?;
            states.extend(average::states(&spec, &settings.options)?);
            states.extend(master::state(&spec, &settings.options)?);
            let (shards, whole) = if algorithm.flat() {
                (vec![local::flat_shard(&spec, &layout)], None)
            } else if algorithm.whole_parameter() {
                (vec![local::whole_shard(&spec, leading, &layout)], None)
            } else {
                let whole = local::whole_blocks(&spec, &blocks, sides, &layout, &states);
                (local::shards(&spec, &blocks, sides, &layout, whole)?, whole)
            };
            let states = quantized::taken(&spec, states, &existing)?;
            let mut states = quantized::local(&spec, &blocks, states, &layout)?;
            quantized::round_states(&mut states, &settings.options)?;
            (shards, whole, states)
        };
        let rounding = quantized::rounding(&spec, &settings.options)?;
        params.push(Param {
            spec,
            layout,
            local,
            group,
            device: place.device,
            algorithm,
            frozen,
            shards,
            whole,
            states,
            rounding,
        });
    }
    Ok(Drafts { params, algorithms, names })
}

/// Turns a parameter's matrices when only then its basis has the shape of the one that exists: what a checkpoint says
/// goes first.
fn turn(
    spec: &mut ParamSpec,
    algorithm: &AnyAlgorithm,
    blocks: &[Block],
    existing: &BTreeMap<String, (DType, Vec<usize>)>,
) -> Result<()> {
    if !["Q", "proj"].iter().any(|role| existing.contains_key(*role)) {
        return Ok(());
    }
    let fits = |spec: &ParamSpec| -> Result<bool> {
        let same = |s: &StateSpec| existing.get(s.role).is_none_or(|(_, shape)| *shape == s.shape);
        Ok(algorithm.state(spec, blocks)?.iter().all(same))
    };
    let turned = ParamSpec { transposed: Some(!spec.oriented(blocks.iter().copied())), ..spec.clone() };
    if !fits(spec)? && fits(&turned)? {
        *spec = turned;
    }
    Ok(())
}

/// Refuses parameters so large that numbers of their elements or bytes would overflow, alone or together.
fn check_sizes(inputs: &[ParamInput]) -> Result<()> {
    let mut total = 0;
    for input in inputs {
        total += input.spec.checked_extent()?;
        if total > MOST_ELEMENTS {
            return Err(Error::Value(format!(
                "the parameters of an optimizer must have at most 2^47 elements together, got more up to {} of shape {:?}: \
                 use several optimizers",
                input.spec.name, input.spec.shape
            )));
        }
    }
    Ok(())
}

/// The devices of parameters, in the order of the first of each; without any, the host. With a mesh there has to be one.
fn devices_of(inputs: &[ParamInput]) -> Result<Vec<Device>> {
    let mut devices: Vec<Device> = Vec::new();
    for input in inputs {
        if !devices.contains(&input.place.device) {
            devices.push(input.place.device);
        }
    }
    if devices.is_empty() {
        devices.push(Device::Cpu);
    }
    let is_on_mesh = |input: &ParamInput| input.layout.distributed_axes().next().is_some();
    let (Some(first), true) = (devices.first(), inputs.iter().any(is_on_mesh)) else { return Ok(devices) };
    match inputs.iter().find(|input| input.place.device != *first) {
        None => Ok(devices),
        Some(input) => Err(Error::Value(format!(
            "{}: with a mesh all parameters of an optimizer must be on one device, got {} after {first}. Make an optimizer \
             for each device",
            input.spec.name, input.place.device
        ))),
    }
}

/// Refuses layouts that no parameter can have.
fn check_layout(spec: &ParamSpec, layout: &Layout) -> Result<()> {
    let wrong = layout.distributed_axes().find(|(_, placement)| match placement {
        Placement::Shard(dim) | Placement::Strided(dim) => *dim >= spec.shape.len(),
        Placement::OwnerSharded => true,
        Placement::Partial(_) | Placement::Replicate => false,
    });
    match wrong {
        None => Ok(()),
        Some((axis, placement)) => Err(Error::Layout {
            param: spec.name.clone(),
            what: format!(
                "placement {placement:?} on mesh axis '{}' of {} ranks does not fit a parameter of shape {:?}",
                axis.name,
                axis.ranks.len(),
                spec.shape
            ),
            help: "Parameters must be sharded or replicated along every axis".into(),
        }),
    }
}
