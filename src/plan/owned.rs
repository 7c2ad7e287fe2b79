//! Owner-sharded states (ZeRO-1, `Program::owned`), and sums to which every process adds (`Program::contributed`): which
//! blocks of them this process has.

use std::collections::BTreeMap;

use super::Param;
use super::bucket::Bucket;
use super::ir::shared;
use super::local::{self, BlockShard, LocalState, Owned};
use crate::algorithm::AnyAlgorithm;
use crate::error::{Error, Result};
use crate::layout::{Layout, Placement};
use crate::spec::{Rect, Side, StateSpec};

/// Gives every process the blocks of such states that it owns or adds to. `open` are the buckets with all units, also those
/// that are stored elsewhere, `closed` those with owners.
///
/// # Errors
/// `Error::Internal` for a parameter that has such states in some of its blocks only; errors of the algorithm.
pub(super) fn assign_owner_layout(
    params: &mut [Param],
    algorithms: &[AnyAlgorithm],
    open: &[Bucket],
    closed: &[Bucket],
) -> Result<()> {
    contributions(params, algorithms, open)?;
    let mut found: BTreeMap<usize, (&[usize], Vec<usize>)> = BTreeMap::new();
    for bucket in open {
        for unit in &bucket.units {
            let (states, _) = found.entry(unit.param).or_insert((&bucket.program.owned, Vec::new()));
            if *states != bucket.program.owned {
                let name = &params[unit.param].spec.name;
                return Err(Error::Internal(format!("{name}: blocks differ in the states that are owned")));
            }
        }
    }
    found.retain(|_, (states, _)| !states.is_empty());
    for bucket in closed.iter().filter(|bucket| !bucket.program.owned.is_empty()) {
        for unit in &bucket.units[shared(bucket, bucket.owner_axes.len())] {
            if let Some((_, blocks)) = found.get_mut(&unit.param) {
                blocks.push(unit.shard.index);
            }
        }
    }
    for (index, (states, mut mine)) in found {
        mine.sort_unstable();
        let planned = &mut params[index];
        let (alone, whole) = (Layout::default(), whole_blocks(planned, algorithms)?);
        let axes: Vec<_> = planned.layout.distributed_axes().map(|(axis, _)| axis.ranks.clone()).collect();
        for &state in states {
            let scales = planned.states.iter().position(|scales| scales.scales_of == Some(state));
            let all = LocalState::of(planned.states[state].spec.clone(), &alone);
            let parts: Vec<_> = whole.iter().map(|block| all.part(block)).collect();
            let owned = |parts: &[Rect]| {
                let blocks = mine.iter().map(|&block| (block, parts[block])).collect();
                Some(Owned { blocks, axes: axes.clone(), is_sum: false, takes: true })
            };
            if let Some(scales) = scales {
                planned.states[scales].owned =
                    owned(&parts_of_scales(&planned.spec.name, &all.spec, &parts)?);
            }
            planned.states[state].owned = owned(&parts);
        }
    }
    Ok(())
}

/// Places of the scales of each block, of a state of 8 bits.
///
/// # Errors
/// `Error::Value` for blocks side by side of several widths, `Error::Internal` for a state that has no scales.
fn parts_of_scales(name: &str, state: &StateSpec, parts: &[Rect]) -> Result<Vec<Rect>> {
    let (Some(quantized), Some(&width)) = (state.quantized, state.shape.last()) else {
        return Err(Error::Internal(format!("{name}: state '{}' has no scales", state.role)));
    };
    let first = parts.first().map_or(width, |part| part.cols.min(width));
    if parts.iter().any(|part| part.cols.min(width) != first) {
        return Err(Error::Value(format!(
            "{name}: its 8-bit states are sharded by owners of matrices, and these are side by side with several widths. \
             Set state_bits=32 in its group"
        )));
    }
    let scales = width.div_ceil(quantized.block);
    let of = |part: &Rect| {
        let (row, col) = (part.offset / width, part.offset % width);
        Rect {
            offset: row * scales + col / quantized.block,
            rows: part.numel() / first,
            cols: first.div_ceil(quantized.block),
            stride: scales * (part.stride / width).max(1),
        }
    };
    Ok(parts.iter().map(of).collect())
}

/// The states that are sums, with the sides over which they are, and the blocks that this process has parts of.
type Sums<'a> = (&'a [(usize, Side)], Vec<usize>);

/// Gives every process the blocks that it has parts of, of each state that is a sum over a side.
fn contributions(params: &mut [Param], algorithms: &[AnyAlgorithm], open: &[Bucket]) -> Result<()> {
    let mut found: BTreeMap<usize, Sums<'_>> = BTreeMap::new();
    for bucket in open.iter().filter(|bucket| !bucket.program.contributed.is_empty()) {
        for unit in &bucket.units {
            let (_, mine) = found.entry(unit.param).or_insert((&bucket.program.contributed, Vec::new()));
            mine.extend(unit.shard.lead.map(|_| unit.shard.index));
        }
    }
    for (index, (states, mut mine)) in found {
        mine.sort_unstable();
        let planned = &mut params[index];
        let (alone, whole) = (Layout::default(), whole_blocks(planned, algorithms)?);
        for &(state, over) in states {
            let dim = sides_of(planned, algorithms)[over.index()];
            let cut = planned.layout.distributed_axes().filter(
                |(_, placement)| matches!(placement, Placement::Shard(d) | Placement::Strided(d) if *d == dim),
            );
            let (axes, coordinates): (Vec<_>, Vec<_>) =
                cut.map(|(axis, _)| (axis.ranks.clone(), axis.coordinate)).unzip();
            let state = &mut planned.states[state];
            let all = LocalState::of(state.spec.clone(), &alone);
            let blocks = mine.iter().map(|&block| (block, all.part(&whole[block]))).collect();
            let takes = coordinates.iter().all(|&at| at == 0);
            state.owned = Some(Owned { blocks, axes, is_sum: true, takes });
        }
    }
    Ok(())
}

/// The first dimensions of rows and columns of a parameter's matrices.
fn sides_of(planned: &Param, algorithms: &[AnyAlgorithm]) -> [usize; 2] {
    let algorithm = &algorithms[planned.algorithm];
    [algorithm.leading(&planned.spec), algorithm.columns(&planned.spec)]
}

/// The blocks of a parameter where one process has all of them.
fn whole_blocks(planned: &Param, algorithms: &[AnyAlgorithm]) -> Result<Vec<BlockShard>> {
    let blocks = algorithms[planned.algorithm].blocks(&planned.spec)?;
    local::shards(&planned.spec, &blocks, sides_of(planned, algorithms), &Layout::default(), None)
}
