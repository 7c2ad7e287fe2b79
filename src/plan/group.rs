//! Groups the blocks of all parameters into buckets: same group, algorithm, layout and shape class.

use std::collections::BTreeSet;

use super::bucket::{Bucket, BucketAxis, Unit};
use super::choice::{Choice, choose};
use super::owners::Loads;
use super::param::Param;
use super::split::{Limit, gradient_bytes, linear_bytes, split};
use crate::algorithm::AnyAlgorithm;
use crate::error::Result;
use crate::layout::{Axis, Layout, Placement, Reduction, ShardingAxes};
use crate::program::{BufferSpec, Program};
use crate::spec::{DimSharding, Side, UnitShape};
use crate::tensor::{DType, Device};

/// Returns the buckets with all their units, in the order of their first parameter. Where possible, it takes routes on
/// which one matrix is within the workspace limit that the user gave.
///
/// # Errors
/// Whatever an algorithm says against a shape.
pub(super) fn open(
    params: &[Param],
    algorithms: &[AnyAlgorithm],
    choices: &[Choice],
    workspace: super::workspace::Limit,
) -> Result<Vec<Bucket>> {
    let most = workspace.given.then_some(workspace.bytes);
    let mut open: Vec<(Bucket, &Layout)> = Vec::new();
    for planned in params {
        let algorithm = &algorithms[planned.algorithm];
        let whole_parameter = algorithm.whole_parameter();
        let sides =
            (!algorithm.flat()).then(|| [algorithm.leading(&planned.spec), algorithm.columns(&planned.spec)]);
        let leading = sides.map(|[leading, _]| leading);
        let transposed = leading.is_some()
            && !whole_parameter
            && planned.spec.oriented(planned.shards.iter().map(|p| p.block));
        let num_shards = planned.num_shards(algorithm);
        for shard in &planned.shards {
            if shard.block.numel() == 0 && !algorithm.flat() && !whole_parameter {
                continue;
            }
            // Blocks of an algorithm that takes any shape share a bucket.
            let any = algorithm.flat() || whole_parameter;
            let [rows, cols] = if any { [1, 0] } else { [shard.block.rows, shard.block.cols] };
            let inner = match leading.map(|leading| &planned.spec.shape[leading..]) {
                None => Vec::new(),
                Some(behind) if whole_parameter => vec![0; behind.len()],
                Some(behind) if behind.len() != 2 && shard.block.between == 0 => behind.to_vec(),
                Some(_) => vec![rows, cols],
            };
            let shape = UnitShape {
                rows,
                cols,
                transposed,
                num_shards,
                alone: planned.layout.distributed_axes().next().is_none(),
                copies: planned.layout.has_copies(),
                device: planned.device,
                bound: algorithm.binds(inner.len()).then(|| planned.radius()),
                inner,
                largest: if algorithm.sees_largest() { planned.largest() } else { [0, 0] },
                param: planned.spec.dtype,
                weights: if planned.master().is_some() { DType::F32 } else { planned.spec.dtype },
                state: planned.states.iter().map(|s| s.spec.dtype).collect(),
            };
            let unit = Unit { param: planned.spec.index, shard: *shard, owner: Vec::new() };
            let found = open.iter_mut().find(|(b, layout)| {
                b.group == planned.group
                    && b.algorithm == planned.algorithm
                    && b.shape == shape
                    && b.leading == leading
                    && b.whole == planned.whole
                    && **layout == planned.layout
            });
            if let Some((bucket, _)) = found {
                bucket.units.push(unit);
            } else {
                let program = algorithm.program(&shape)?;
                let new = |program, gathered| {
                    let kind = (sides, whole_parameter);
                    start(planned, program, gathered, shape.clone(), unit.clone(), kind)
                };
                let keep = new(program, Vec::new());
                let is_sharded = keep.axes.iter().any(|axis| axis.shards.is_some());
                let bucket = match algorithm.gathered_program(&shape)? {
                    Some(_) if is_sharded => {
                        let axes = keep.axes.clone();
                        let make = |gathered: Vec<usize>| {
                            let left = UnitShape { num_shards: left(&axes, &gathered), ..shape.clone() };
                            Ok(new(algorithm.gathered_program(&left)?.unwrap_or_default(), gathered))
                        };
                        choose(keep, &choices[planned.group], most, make)?
                    }
                    _ => keep,
                };
                open.push((bucket, &planned.layout));
            }
        }
    }
    Ok(open.into_iter().map(|(bucket, _)| bucket).collect())
}

/// Numbers of processes over which rows and columns remain sharded where some axes are gathered.
fn left(axes: &[BucketAxis], gathered: &[usize]) -> [usize; 2] {
    let kept = || axes.iter().enumerate().filter(|(a, _)| !gathered.contains(a)).map(|(_, axis)| axis);
    [Side::Rows, Side::Cols].map(|side| {
        kept().filter(|axis| axis.shards == Some(side)).map(|axis| axis.axis.ranks.len()).product()
    })
}

/// The buckets split so that each takes its share of the workspace, with the owners of their units, device by device, on each
/// the costliest algorithms first, within the limits of its group on the host and on devices; the bucket that needs most where one does not fit, with the bytes of one matrix.
///
/// # Errors
/// As the lowering of programs.
pub(super) fn close(
    open: &[Bucket],
    params: &[Param],
    algorithms: &[AnyAlgorithm],
    limits: &[[Limit; 2]],
    multiprocessors: impl Fn(Device) -> usize,
    bounds: (usize, bool),
) -> Result<std::result::Result<Vec<Bucket>, (usize, usize)>> {
    let mut loads = Loads::default();
    let mut closed: Vec<Bucket> = Vec::with_capacity(open.len());
    let mut excess: Option<(usize, usize)> = None;
    for (number, bucket) in open.iter().enumerate() {
        let [host, device] = limits[bucket.group];
        let limit = if bucket.shape.device == Device::Cpu { host } else { device };
        match split(bucket, limit, multiprocessors(bucket.shape.device), bounds)? {
            Ok(parts) => closed.extend(parts),
            Err(least) => excess = excess.max(Some((least, number))),
        }
    }
    if let Some((least, number)) = excess {
        return Ok(Err((number, least)));
    }
    closed.sort_by_key(|b| (b.shape.device.turn(), algorithms[b.algorithm].flat(), b.whole_parameter));
    // The plan must not depend on which rank stores what: the ranks would start collectives in other orders.
    for bucket in &mut closed {
        bucket.units.retain(|unit| unit.shard.lead.is_some());
    }
    // The dearest matrices first: the others then even out what is left over of these.
    let cost = |bucket: &Bucket| {
        let algorithm = &algorithms[bucket.algorithm];
        bucket.units.first().map_or(0.0, |unit| {
            let spec = &params[unit.param].spec;
            bucket.flops(&algorithm.describe(spec, &[unit.shard.block], bucket.shape.num_shards)).1
        })
    };
    let mut order: Vec<(f64, &mut Bucket)> = closed.iter_mut().map(|bucket| (cost(bucket), bucket)).collect();
    order.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    for (cost, bucket) in order {
        loads.assign(bucket, cost);
    }
    Ok(Ok(closed))
}

/// The first dimensions of the rows and of the columns, none for elements; and whether parameters are taken whole.
type Kind = (Option<[usize; 2]>, bool);

/// A bucket with its first unit.
fn start(
    planned: &Param,
    program: Program,
    gathered: Vec<usize>,
    shape: UnitShape,
    unit: Unit,
    (dims, whole_parameter): Kind,
) -> Bucket {
    let layout = &planned.layout;
    let leading = dims.map(|[leading, _]| leading);
    let side = |dim: usize| {
        let side = match dims {
            Some([rows, _]) if dim == rows => Side::Rows,
            Some([_, cols]) if dim == cols => Side::Cols,
            _ => return None,
        };
        (planned.whole != Some(side)).then_some(side)
    };
    let stack = |placement: &Placement| match (placement, leading) {
        (Placement::Shard(dim) | Placement::Strided(dim), Some(_)) => whole_parameter || side(*dim).is_none(),
        (Placement::Shard(_) | Placement::Strided(_), None) => true,
        _ => false,
    };
    let stacked = layout.mesh.axes.iter().zip(&layout.placements).filter(|(_, placement)| stack(placement));
    let stacks = stacked.map(|(axis, _)| axis.ranks.len()).product();
    let mut axes = Vec::new();
    let mut kept = vec![None; layout.placements.len()];
    for (at, (axis, placement)) in layout.mesh.axes.iter().zip(&layout.placements).enumerate() {
        if axis.ranks.len() <= 1 {
            continue;
        }
        let pending = match placement {
            Placement::Partial(how) => Some(*how),
            _ => None,
        };
        let shards = match placement {
            Placement::Shard(dim) | Placement::Strided(dim) => side(*dim),
            _ => None,
        };
        let copies = leading.is_some() && !whole_parameter && *placement == Placement::Replicate;
        let stack = whole_parameter && shards.is_none() && stack(placement);
        if pending.is_some() || copies || stack || shards.is_some() {
            kept[at] = Some(axes.len());
            axes.push(BucketAxis { axis: axis.clone(), shards, pending, stack });
        }
    }
    let sharding = |d: usize| match dims {
        None => (ShardingAxes::default(), Vec::new()),
        Some(_) if planned.whole == Some([Side::Rows, Side::Cols][d]) => {
            (ShardingAxes::default(), Vec::new())
        }
        Some(dims) => {
            let (sharding, at) = ShardingAxes::of(layout, dims[d]);
            (sharding, at.into_iter().filter_map(|i| kept[i]).collect())
        }
    };
    let mut bucket = Bucket {
        group: planned.group,
        algorithm: planned.algorithm,
        units: vec![unit],
        stacks,
        widest: 0,
        leading,
        whole_parameter,
        copies: Vec::new(),
        joined: Vec::new(),
        whole: planned.whole,
        sides: [sharding(0), sharding(1)],
        gradient: None,
        owner_axes: Vec::new(),
        gathered,
        alternatives: Vec::new(),
        axes,
        program,
        shape,
    };
    if whole_parameter && !layout.mesh.irregular {
        let replicas = layout.distributed_axes().filter(|(_, placement)| *placement == Placement::Replicate);
        bucket.copies = replicas.map(|(axis, _)| axis.clone()).collect();
        let summed = bucket.program.buffers.iter().map(|spec| bucket.summed(spec));
        let sets: BTreeSet<Vec<usize>> = summed.filter(|axes| axes.len() > 1).collect();
        let parts = |set: &[usize]| set.iter().map(|&a| &bucket.axes[a].axis).collect::<Vec<_>>();
        bucket.joined = sets.into_iter().map(|set| (set.clone(), Axis::joined(&parts(&set)))).collect();
    }
    average_gradient(&mut bucket);
    bucket
}

/// Adds a buffer for the reduced gradient where averaging the buffers that are linear in it is no cheaper, or where it is
/// a sum of contributions: every copy then has the same momentum.
fn average_gradient(bucket: &mut Bucket) {
    let spec = if bucket.whole_parameter {
        BufferSpec::stored("gradient", bucket.shape.weights)
    } else {
        BufferSpec::new("gradient", bucket.shape.rows, bucket.shape.cols, bucket.shape.weights)
            .sharded(DimSharding::LikeParam(Side::Rows), DimSharding::LikeParam(Side::Cols))
    };
    let is_pending = |how| bucket.axes.iter().any(|a| a.pending == Some(how));
    let dearer = || linear_bytes(bucket).is_none_or(|bytes| bytes >= gradient_bytes(bucket, &spec));
    if is_pending(Reduction::Sum) || is_pending(Reduction::Avg) && dearer() {
        bucket.gradient = Some(bucket.program.buffers.len());
        bucket.program = std::mem::take(&mut bucket.program).buffer(spec);
    }
}
