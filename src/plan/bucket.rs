//! Groups the blocks of all parameters into buckets: same group, algorithm, layout and shape class.

use crate::algorithm::AnyAlgorithm;
use crate::error::Result;
use crate::layout::{Axis, Cutters, Layout, Placement, Reduction};
use crate::spec::{Cut, Side, UnitShape};

use super::assign::Loads;
use super::member::Member;
use super::place::{Extent, Piece};
use super::program::{BufferSpec, Program};

/// Bytes of buffers that one bucket may take when the user sets no bound. Big matrices then go one by one,
/// through caches that their own buffers fit in; small ones go many at a time.
const DEFAULT_BATCH_BYTES: usize = 32 << 20;
/// The same where matrices are dealt out: a bucket should have one for every process that could take one.
const DEALT_BATCH_BYTES: usize = 1 << 30;

/// One block of one parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Index of the parameter.
    pub param: usize,
    /// The block.
    pub piece: Piece,
    /// Position along each axis over which whole matrices are dealt out, of the process that takes it.
    pub owner: Vec<usize>,
}

impl Unit {
    fn extent(&self, side: Side) -> &Extent {
        match side {
            Side::Rows => &self.piece.rows,
            Side::Cols => &self.piece.cols,
        }
    }
}

/// An axis that the units of a bucket are spread over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketAxis {
    /// The axis.
    pub axis: Axis,
    /// The side of the blocks that it cuts; if none it holds copies.
    pub cuts: Option<Side>,
    /// Whether the copies' gradients have still to be averaged.
    pub pending: bool,
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
    /// Dimensions of the parameters before those of the matrices; none for elements.
    pub leading: Option<usize>,
    /// The side that cuts the parameters into blocks of which every process stores whole ones.
    pub whole: Option<Side>,
    /// Members, sorted by owner, then in parameter order.
    pub units: Vec<Unit>,
    /// What is done to them.
    pub program: Program,
    /// The axes of more than one rank that matter here.
    pub axes: Vec<BucketAxis>,
    /// How rows and columns are cut, and by which of `axes`.
    pub sides: [(Cutters, Vec<usize>); 2],
    /// How many processes the leading dimensions are cut among, each of which has whole matrices of its own; for
    /// elements, how many the parameters are cut among.
    pub stacks: usize,
    /// The most units that any of them has.
    pub widest: usize,
    /// The number of the buffer that gradients are averaged in, if they are.
    pub gradient: Option<usize>,
    /// The axes over which whole matrices are dealt out, in order.
    pub dealt: Vec<usize>,
}

impl Bucket {
    /// Elements of a buffer's dimension `d` that belong to `unit` after as many cuts of each side as `depth` says.
    #[must_use]
    pub fn span(
        &self,
        unit: &Unit,
        spec: &BufferSpec,
        d: usize,
        depth: [usize; 2],
    ) -> std::ops::Range<usize> {
        let length = [spec.rows, spec.cols][d];
        match spec.cuts[d] {
            Cut::Whole => 0..length,
            Cut::With(side) => {
                let (extent, (cutters, _)) = (unit.extent(side), &self.sides[side.index()]);
                extent.clip(cutters.span(extent.dim, depth[side.index()]))
            }
            Cut::Spread(side) => {
                let (start, len) = self.sides[side.index()].0.span(length, depth[side.index()]);
                start..start + len
            }
        }
    }

    /// As `span`, for rank `peer` of cut number `level` of `side`; other dimensions as this process has them.
    #[must_use]
    pub fn peer_span(
        &self,
        unit: &Unit,
        spec: &BufferSpec,
        d: usize,
        depth: [usize; 2],
        (side, level, peer): (Side, usize, usize),
    ) -> std::ops::Range<usize> {
        let cutters = &self.sides[side.index()].0;
        match spec.cuts[d] {
            Cut::With(own) if own == side => {
                let extent = unit.extent(side);
                extent.clip(cutters.part(extent.dim, level, peer))
            }
            Cut::Spread(own) if own == side => {
                let (start, len) = cutters.part([spec.rows, spec.cols][d], level, peer);
                start..start + len
            }
            _ => self.span(unit, spec, d, depth),
        }
    }

    /// How many times each side is cut in storage.
    #[must_use]
    pub fn depth(&self) -> [usize; 2] {
        [self.sides[0].0.depth(), self.sides[1].0.depth()]
    }

    /// Whether any of its work is shared with other processes.
    #[must_use]
    pub fn distributed(&self) -> bool {
        !self.axes.is_empty()
    }
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
        let leading = (!algorithm.flat()).then(|| algorithm.leading(&member.spec));
        let transposed = !algorithm.flat() && member.spec.oriented(member.pieces.iter().map(|p| p.block));
        let ways = member.ways(algorithm);
        for piece in &member.pieces {
            if piece.block.numel() == 0 && !algorithm.flat() {
                continue;
            }
            let (rows, cols) = (piece.block.rows, piece.block.cols);
            let shape = UnitShape {
                rows: if algorithm.flat() { 1 } else { rows },
                cols: if algorithm.flat() { 0 } else { cols },
                transposed,
                ways,
                inner: match leading.map(|leading| &member.spec.shape[leading..]) {
                    None => Vec::new(),
                    Some(behind) if behind.len() > 2 => behind.to_vec(),
                    Some(_) => vec![rows, cols],
                },
                param: member.spec.dtype,
                state: member.states.iter().map(|s| s.spec.dtype).collect(),
            };
            let unit = Unit { param: member.spec.index, piece: *piece, owner: Vec::new() };
            let found = open.iter_mut().find(|(b, layout)| {
                b.group == member.group
                    && b.algorithm == member.algorithm
                    && b.shape == shape
                    && b.leading == leading
                    && b.whole == member.whole
                    && **layout == member.layout
            });
            if let Some((bucket, _)) = found {
                bucket.units.push(unit);
            } else {
                open.push((start(member, algorithm.program(&shape)?, shape, unit, leading), &member.layout));
            }
        }
    }
    let mut loads = Loads::default();
    let mut closed: Vec<Bucket> = open.into_iter().flat_map(|(bucket, _)| split(&bucket, limits)).collect();
    closed.sort_by_key(|b| algorithms[b.algorithm].flat());
    for bucket in &mut closed {
        // What is planned must not depend on what is stored where: the ranks would start collectives in other orders.
        bucket.units.retain(|unit| unit.piece.lead.is_some());
        loads.deal(bucket);
    }
    Ok(closed)
}

/// A bucket with its first unit. `leading` is the number of dimensions before the matrix's; none for elements.
fn start(member: &Member, program: Program, shape: UnitShape, unit: Unit, leading: Option<usize>) -> Bucket {
    let layout = &member.layout;
    let side = |dim: usize| {
        let side = match leading {
            Some(leading) if dim == leading => Side::Rows,
            Some(leading) if dim == leading + 1 => Side::Cols,
            _ => return None,
        };
        (member.whole != Some(side)).then_some(side)
    };
    let stack = |placement: &Placement| match (placement, leading) {
        (Placement::Shard(dim) | Placement::Strided(dim), Some(_)) => side(*dim).is_none(),
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
        let pending = matches!(placement, Placement::Partial(Reduction::Avg));
        let cuts = match placement {
            Placement::Shard(dim) | Placement::Strided(dim) => side(*dim),
            _ => None,
        };
        let copies = leading.is_some() && *placement == Placement::Replicate;
        if pending || copies || cuts.is_some() {
            kept[at] = Some(axes.len());
            axes.push(BucketAxis { axis: axis.clone(), cuts, pending });
        }
    }
    let cutters = |d: usize| match leading {
        None => (Cutters::default(), Vec::new()),
        Some(_) if member.whole == Some([Side::Rows, Side::Cols][d]) => (Cutters::default(), Vec::new()),
        Some(leading) => {
            let (cutters, at) = Cutters::of(layout, leading + d);
            (cutters, at.into_iter().filter_map(|i| kept[i]).collect())
        }
    };
    let mut bucket = Bucket {
        group: member.group,
        algorithm: member.algorithm,
        units: vec![unit],
        stacks,
        widest: 0,
        leading,
        whole: member.whole,
        sides: [cutters(0), cutters(1)],
        gradient: None,
        dealt: Vec::new(),
        axes,
        program,
        shape,
    };
    let spec = BufferSpec::new("gradient", bucket.shape.rows, bucket.shape.cols, bucket.shape.param)
        .cut(Cut::With(Side::Rows), Cut::With(Side::Cols));
    let pending = bucket.axes.iter().any(|a| a.pending);
    if pending && linear_bytes(&bucket).is_none_or(|bytes| bytes >= stored_bytes(&bucket, &spec)) {
        bucket.gradient = Some(bucket.program.buffers.len());
        bucket.program = bucket.program.buffer(spec);
    }
    bucket
}

/// Cuts a bucket so that its buffers fit the bound; at least one unit each, and where whole matrices are dealt out
/// one for every process that could take one, within a wider bound. Counts with the largest shard that any process
/// has, so that all cut alike.
fn split(bucket: &Bucket, limits: &[Option<usize>]) -> Vec<Bucket> {
    let given = limits.get(bucket.group).copied().flatten();
    let part = |units: &[Unit]| Bucket { units: units.to_vec(), ..bucket.clone() };
    if bucket.leading.is_none() {
        let limit = given.unwrap_or(DEFAULT_BATCH_BYTES);
        return if bucket.gradient.is_some() {
            runs(&bucket.units, bucket.stacks, limit / bucket.shape.param.bytes())
                .into_iter()
                .map(part)
                .collect()
        } else {
            vec![bucket.clone()]
        };
    }
    let (mut shared, mut each) = (0, 0);
    for spec in &bucket.program.buffers {
        let bytes = stored_bytes(bucket, spec);
        *(if spec.shared { &mut shared } else { &mut each }) += bytes;
    }
    let fit = |limit: usize| limit.saturating_sub(shared).checked_div(each).unwrap_or(bucket.units.len());
    let (all, cut) = super::assign::takers(bucket);
    let wanted = fit(given.unwrap_or(DEFAULT_BATCH_BYTES)).max(1).next_multiple_of(all);
    let bound = fit(given.unwrap_or(DEALT_BATCH_BYTES)).max(1).next_multiple_of(cut);
    let most = if all == 1 { wanted } else { wanted.min(bound) };
    stacks_of(&bucket.units, most.max(1))
        .into_iter()
        .map(|(units, widest)| Bucket { widest, ..part(&units) })
        .collect()
}

/// Bytes per unit that a process averages when the linear buffers are averaged instead of the gradient; `None` when
/// no buffer is linear. What becomes whole is dealt out before, evenly over all who have a part or a contribution.
fn linear_bytes(bucket: &Bucket) -> Option<usize> {
    let sharers: usize =
        bucket.axes.iter().filter(|a| a.cuts.is_some()).map(|a| a.axis.ranks.len()).product();
    let bytes = |(spec, whole): (&BufferSpec, bool)| {
        if whole {
            (spec.rows * spec.cols * spec.dtype.bytes()).div_ceil(sharers)
        } else {
            stored_bytes(bucket, spec)
        }
    };
    bucket.program.linear_moves().map(bytes).reduce(|a, b| a + b)
}

/// Bytes of a buffer's matrix that a process stores, of the largest part.
fn stored_bytes(bucket: &Bucket, spec: &BufferSpec) -> usize {
    largest(bucket, spec, 0) * largest(bucket, spec, 1) * spec.dtype.bytes()
}

/// The largest part of dimension `d` of a buffer's matrix that any process holds.
fn largest(bucket: &Bucket, spec: &BufferSpec, d: usize) -> usize {
    let length = [spec.rows, spec.cols][d];
    match spec.cuts[d] {
        Cut::With(side) | Cut::Spread(side) if !spec.shared => {
            let axes = &bucket.sides[side.index()].1;
            axes.iter().fold(length, |part, &a| part.div_ceil(bucket.axes[a].axis.ranks.len()))
        }
        _ => length,
    }
}

/// Units in groups of which no process stores more than `most`, with the number that the fullest one stores.
fn stacks_of(units: &[Unit], most: usize) -> Vec<(Vec<Unit>, usize)> {
    let mut groups: Vec<(Vec<Unit>, usize)> = Vec::new();
    // The slots of each parameter follow those of the parameters before it.
    let (mut base, mut next, mut param) = (0, 0, None);
    for unit in units {
        if param != Some(unit.param) {
            (base, param) = (next, Some(unit.param));
        }
        let slot = base + unit.piece.slot;
        next = next.max(slot + 1);
        let group = slot / most;
        if groups.len() <= group {
            groups.resize(group + 1, (Vec::new(), 0));
        }
        let (members, widest) = &mut groups[group];
        members.push(unit.clone());
        *widest = (*widest).max(slot % most + 1);
    }
    groups
}

/// Runs of units of together at most `elements` elements on each of `parts` processes; one unit at least.
fn runs(units: &[Unit], parts: usize, elements: usize) -> Vec<&[Unit]> {
    let (mut runs, mut start, mut sum) = (Vec::new(), 0, 0);
    for (at, unit) in units.iter().enumerate() {
        let size = unit.piece.block.numel().div_ceil(parts);
        if at > start && sum + size > elements {
            runs.push(&units[start..at]);
            (start, sum) = (at, 0);
        }
        sum += size;
    }
    runs.push(&units[start..]);
    runs
}
