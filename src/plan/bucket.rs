//! Buckets: blocks of the same group, algorithm, layout and shape class, which are handled together.

use super::local::{BlockShard, Extent};
use super::param::Param;
use crate::layout::{Axis, Reduction, ShardingAxes};
use crate::program::{BufferSpec, Program};
use crate::spec::{Description, DimSharding, Side, UnitShape};

/// One block of one parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Index of the parameter.
    pub param: usize,
    /// The block.
    pub shard: BlockShard,
    /// Owner, by its position along each axis over which whole matrices are sharded by owner.
    pub owner: Vec<usize>,
}

impl Unit {
    pub(super) fn extent(&self, side: Side) -> &Extent {
        match side {
            Side::Rows => &self.shard.rows,
            Side::Cols => &self.shard.cols,
        }
    }
}

/// An axis that the units of a bucket are spread over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketAxis {
    /// The axis.
    pub axis: Axis,
    /// The side of the blocks that it shards; if none it holds copies.
    pub shards: Option<Side>,
    /// Reduction of the gradients of the copies, where that is still to be done.
    pub pending: Option<Reduction>,
    /// True if the axis shards the stack of a parameter that is taken whole.
    pub stack: bool,
}

/// One way to run the program of a bucket.
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    /// The axes that it gathers, by number.
    pub gathered: Vec<usize>,
    /// Bytes that a process sends along each axis of the bucket for a matrix, on average over processes and matrices.
    pub bytes: Vec<f64>,
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
    /// Number of the parameters' dimensions before those of the matrices; none for elements.
    pub leading: Option<usize>,
    /// The side that splits the parameters into blocks such that every process stores whole blocks.
    pub whole: Option<Side>,
    /// Units, sorted by owner, then in parameter order.
    pub units: Vec<Unit>,
    /// Program that runs on the units.
    pub program: Program,
    /// The axes of more than one rank that matter here.
    pub axes: Vec<BucketAxis>,
    /// Sharding of rows and of columns, each with the numbers of its axes in `axes`.
    pub sides: [(ShardingAxes, Vec<usize>); 2],
    /// Sets of `axes` as one axis each, by which sums over all of a parameter are made.
    pub joined: Vec<(Vec<usize>, Axis)>,
    /// True if blocks are parameters that are taken whole.
    pub whole_parameter: bool,
    /// The axes along which such parameters are replicated, in a regular mesh: sums may extend over them too, with one
    /// replica's contributions.
    pub copies: Vec<Axis>,
    /// Number of processes over which the leading dimensions are sharded, each with whole matrices of its own; for
    /// elements, the number over which the parameters are sharded.
    pub stacks: usize,
    /// Most units that any of these processes has.
    pub widest: usize,
    /// The number of the buffer that gradients are averaged in, if they are.
    pub gradient: Option<usize>,
    /// The axes over which whole matrices are sharded by owner, in order: first those that are gathered.
    pub owner_axes: Vec<usize>,
    /// The axes that are gathered for `Program::gathered`, the inner ones of each side first.
    pub gathered: Vec<usize>,
    /// The ways that there were to run the program, if there was a choice.
    pub alternatives: Vec<Alternative>,
}

impl Bucket {
    /// Elements of a buffer's dimension `d` that belong to `unit` after sharding each side as often as `depth` says.
    #[must_use]
    pub fn span(
        &self,
        unit: &Unit,
        spec: &BufferSpec,
        d: usize,
        depth: [usize; 2],
    ) -> std::ops::Range<usize> {
        let length = [spec.rows, spec.cols][d];
        match spec.sharding[d] {
            DimSharding::Replicated if spec.stored && d == 1 => 0..unit.shard.local.numel(),
            DimSharding::Replicated => 0..length,
            DimSharding::PerMatrix => 0..unit.shard.stack,
            DimSharding::LikeParam(side) => {
                let (extent, (sharding, _)) = (unit.extent(side), &self.sides[side.index()]);
                extent.clip(sharding.span(extent.dim, depth[side.index()]))
            }
            DimSharding::Even(side) => {
                let (start, len) = self.sides[side.index()].0.span(length, depth[side.index()]);
                start..start + len
            }
        }
    }

    /// Elements as of `span`, for rank `peer` of axis number `level` of `side`; other dimensions as this process has
    /// them.
    #[must_use]
    pub fn peer_span(
        &self,
        unit: &Unit,
        spec: &BufferSpec,
        d: usize,
        depth: [usize; 2],
        (side, level, peer): (Side, usize, usize),
    ) -> std::ops::Range<usize> {
        let sharding = &self.sides[side.index()].0;
        match spec.sharding[d] {
            DimSharding::LikeParam(own) if own == side => {
                let extent = unit.extent(side);
                extent.clip(sharding.part(extent.dim, level, peer))
            }
            DimSharding::Even(own) if own == side => {
                let (start, len) = sharding.part([spec.rows, spec.cols][d], level, peer);
                start..start + len
            }
            _ => self.span(unit, spec, d, depth),
        }
    }

    /// Number of times that each side is sharded in storage.
    #[must_use]
    pub fn depth(&self) -> [usize; 2] {
        [self.sides[0].0.depth(), self.sides[1].0.depth()]
    }

    /// An axis by its number: those of `joined` follow `axes`.
    #[must_use]
    pub fn axis(&self, number: usize) -> &Axis {
        match self.axes.get(number) {
            Some(axis) => &axis.axis,
            None => &self.joined[number - self.axes.len()].1,
        }
    }

    /// The axes that shard what the stages sum over for a buffer.
    #[must_use]
    pub fn summed(&self, spec: &BufferSpec) -> Vec<usize> {
        let [rows, cols, stack] = spec.summed;
        let over = |axis: &BucketAxis| match axis.shards {
            Some(Side::Rows) => rows,
            Some(Side::Cols) => cols,
            None => axis.stack && stack,
        };
        (0..self.axes.len()).filter(|&a| over(&self.axes[a])).collect()
    }

    /// As `depth`, at the owners of what is gathered.
    #[must_use]
    pub fn kept_depth(&self) -> [usize; 2] {
        [0, 1].map(|d| self.sides[d].1.iter().filter(|&a| !self.gathered.contains(a)).count())
    }

    /// Tests whether a buffer is used only between the ends of `Program::gathered`.
    #[must_use]
    pub fn only_gathered(&self, buffer: usize) -> bool {
        let kept = || self.gradient == Some(buffer) || self.program.carried.buffers().any(|b| b == buffer);
        !self.gathered.is_empty() && !kept()
    }

    /// Name of the way that gathers these axes.
    #[must_use]
    pub fn route(&self, gathered: &[usize]) -> String {
        if gathered.is_empty() {
            return "keep".into();
        }
        let inside = (0..self.axes.len()).filter(|a| gathered.contains(a));
        let names: Vec<&str> = inside.map(|a| self.axes[a].axis.name.as_str()).collect();
        format!("gather {}", names.join(" and "))
    }

    /// The axes by whose positions a unit is worked on whole, or as whole as it gets: those that are gathered, where some are,
    /// else those over which matrices are sharded by owner.
    #[must_use]
    pub fn takers(&self) -> &[usize] {
        if self.gathered.is_empty() { &self.owner_axes } else { &self.gathered }
    }

    /// Bytes that a process sends in a step along each axis in one of the ways, on average over the processes.
    #[must_use]
    #[allow(clippy::cast_precision_loss)] // a number of matrices
    pub fn sent(&self, way: &Alternative) -> Vec<(String, f64)> {
        let count = self.units.len() as f64;
        self.axes.iter().zip(&way.bytes).map(|(a, bytes)| (a.axis.name.clone(), bytes * count)).collect()
    }

    /// Operations on each unit where all of it is stored, and by each process that takes it (`takers`). `about` describes the
    /// unit.
    #[must_use]
    #[allow(clippy::cast_precision_loss)] // a number of processes
    pub fn flops(&self, about: &Description) -> (f64, f64) {
        if self.program.by_owners {
            return (0.0, about.flops);
        }
        if self.gathered.is_empty() {
            return (about.flops - about.whole_flops, about.whole_flops);
        }
        let kept = self
            .axes
            .iter()
            .enumerate()
            .filter(|(a, axis)| axis.shards.is_some() && !self.gathered.contains(a));
        let kept: usize = kept.map(|(_, axis)| axis.axis.ranks.len()).product();
        (0.0, about.flops / kept as f64)
    }

    /// The name of its first parameter.
    pub(super) fn first_name<'p>(&self, params: &'p [Param]) -> &'p str {
        self.units.first().map_or("", |unit| params[unit.param].spec.name.as_str())
    }

    /// Tests whether any work of the bucket is shared with other processes.
    #[must_use]
    pub fn distributed(&self) -> bool {
        !self.axes.is_empty()
    }
}
