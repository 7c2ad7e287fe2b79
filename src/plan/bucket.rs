//! Groups the blocks of all parameters into buckets: same group, algorithm, layout and shape class.

use crate::algorithm::AnyAlgorithm;
use crate::error::Result;
use crate::layout::Layout;
use crate::spec::{Block, ParamSpec, StateSpec, UnitShape};

use super::program::Program;

/// Bytes of buffers that one bucket may take when the user sets no bound. Big matrices then go one by one,
/// through caches that their own buffers fit in; small ones go many at a time.
const DEFAULT_BATCH_BYTES: usize = 32 << 20;

/// A parameter with all that the plan knows of it.
#[derive(Clone, Debug)]
pub struct Member {
    /// Global facts.
    pub spec: ParamSpec,
    /// Where its elements live.
    pub layout: Layout,
    /// Index of its group.
    pub group: usize,
    /// Index of its algorithm in the plan's list.
    pub algorithm: usize,
    /// Whether it takes no gradients.
    pub frozen: bool,
    /// Its matrices.
    pub blocks: Vec<Block>,
    /// Its states.
    pub states: Vec<StateSpec>,
}

/// One block of one parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Index of the parameter.
    pub param: usize,
    /// Index of the block within it.
    pub index: usize,
    /// The block.
    pub block: Block,
}

/// Blocks that are handled together.
#[derive(Clone, Debug)]
pub struct Bucket {
    /// Index of the group.
    pub group: usize,
    /// Index of the algorithm.
    pub algorithm: usize,
    /// Shape class.
    pub shape: UnitShape,
    /// Members in parameter order.
    pub units: Vec<Unit>,
    /// What is done to them.
    pub program: Program,
}

/// Buckets in the order of their first parameter within each algorithm, the costliest algorithms first.
///
/// # Errors
/// Whatever an algorithm says against a shape.
pub(super) fn buckets(
    members: &[Member],
    algorithms: &[AnyAlgorithm],
    limits: &[Option<usize>],
) -> Result<Vec<Bucket>> {
    let mut open: Vec<(Bucket, &Layout)> = Vec::new();
    for member in members {
        let algorithm = &algorithms[member.algorithm];
        for (index, block) in member.blocks.iter().enumerate() {
            if block.numel() == 0 && !algorithm.flat() {
                continue;
            }
            let shape = UnitShape {
                rows: if algorithm.flat() { 1 } else { block.rows },
                cols: if algorithm.flat() { 0 } else { block.cols },
                param: member.spec.dtype,
                state: member.states.iter().map(|s| s.dtype).collect(),
            };
            let unit = Unit { param: member.spec.index, index, block: *block };
            let found = open.iter_mut().find(|(b, layout)| {
                b.group == member.group
                    && b.algorithm == member.algorithm
                    && b.shape == shape
                    && **layout == member.layout
            });
            if let Some((bucket, _)) = found {
                bucket.units.push(unit);
            } else {
                let program = algorithm.program(&shape)?;
                let bucket = Bucket {
                    group: member.group,
                    algorithm: member.algorithm,
                    shape,
                    units: vec![unit],
                    program,
                };
                open.push((bucket, &member.layout));
            }
        }
    }
    let mut closed: Vec<Bucket> = open.into_iter().flat_map(|(bucket, _)| split(&bucket, limits)).collect();
    closed.sort_by_key(|b| algorithms[b.algorithm].flat());
    Ok(closed)
}

/// Cuts a bucket so that its buffers fit the bound; at least one unit each.
fn split(bucket: &Bucket, limits: &[Option<usize>]) -> Vec<Bucket> {
    let bytes = |shared| {
        bucket.program.buffers.iter().filter(|b| b.shared == shared).map(|b| b.bytes(1)).sum::<usize>()
    };
    let limit = limits.get(bucket.group).copied().flatten().unwrap_or(DEFAULT_BATCH_BYTES);
    let most = match bytes(false) {
        0 => bucket.units.len(),
        each => (limit.saturating_sub(bytes(true)) / each).max(1),
    };
    bucket.units.chunks(most.max(1)).map(|units| Bucket { units: units.to_vec(), ..bucket.clone() }).collect()
}
