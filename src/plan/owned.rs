//! States that lie with the owners of matrices (`Program::owned`): which blocks of them this process has.

use std::collections::BTreeMap;

use super::Param;
use super::bucket::Bucket;
use super::local::{self, LocalState, Owned};
use super::redistribute::shared;
use crate::algorithm::AnyAlgorithm;
use crate::error::{Error, Result};
use crate::layout::Layout;

/// Gives every process the blocks of such states that it owns. `open` are the buckets with all units, also those that are
/// stored elsewhere, `closed` those with owners.
///
/// # Errors
/// `Error::Internal` for a parameter of which some blocks have such states and others do not; whatever the algorithm says.
pub(super) fn settle(
    params: &mut [Param],
    algorithms: &[AnyAlgorithm],
    open: &[Bucket],
    closed: &[Bucket],
) -> Result<()> {
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
        let (algorithm, alone) = (&algorithms[planned.algorithm], Layout::default());
        let sides = [algorithm.leading(&planned.spec), algorithm.columns(&planned.spec)];
        let blocks = algorithm.blocks(&planned.spec)?;
        let whole = local::shards(&planned.spec, &blocks, sides, &alone, None)?;
        let axes: Vec<_> = planned.layout.distributed_axes().map(|(axis, _)| axis.ranks.clone()).collect();
        for &state in states {
            let state = &mut planned.states[state];
            if state.spec.dtype.is_quantized() {
                return Err(Error::Value(format!(
                    "{}: state '{}' is of 8 bits, and owned_states keeps those of 32: load it without owned_states",
                    planned.spec.name, state.spec.role
                )));
            }
            let all = LocalState::of(state.spec.clone(), &alone);
            let blocks = mine.iter().map(|&block| (block, all.part(&whole[block]))).collect();
            state.owned = Some(Owned { blocks, axes: axes.clone() });
        }
    }
    Ok(())
}
