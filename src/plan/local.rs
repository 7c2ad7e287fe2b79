//! Blocks and states of one parameter within the storage of this process.

use std::ops::Range;

use super::average::is_of_average;
use super::master::MASTER;
use crate::error::{Error, Result};
use crate::layout::{Layout, Placement, ShardingAxes, spans};
use crate::spec::{Block, Code, DimSharding, ParamSpec, Quantization, Rect, Share, Side, StateSpec};
use crate::tensor::Places;

/// Suffix of the names of scales.
pub(super) const SCALES: &str = "_absmax";

/// One side of a block: `len` elements from `start` of a dimension of `dim · scale` elements, each `between + 1` behind the one
/// before. The dimension is sharded in steps of `scale`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Size of the dimension that is sharded.
    pub dim: usize,
    /// Elements of the side for one of the dimension.
    pub scale: usize,
    /// First element of the block.
    pub start: usize,
    /// Elements of other blocks between two of the block's.
    pub between: usize,
    /// Length of the block's side.
    pub len: usize,
}

impl Extent {
    /// A side that is a dimension of its own.
    #[must_use]
    pub fn whole(len: usize) -> Self {
        Self { dim: len, scale: 1, start: 0, between: 0, len }
    }

    /// The part of the block's side inside `len` elements from `start` of the dimension.
    #[must_use]
    pub fn clip(&self, (start, len): (usize, usize)) -> Range<usize> {
        let inside =
            |at: usize| (at * self.scale).saturating_sub(self.start).div_ceil(self.between + 1).min(self.len);
        inside(start)..inside(start + len)
    }
}

/// A block of a parameter and what this process stores of it, perhaps nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockShard {
    /// Index of the block within the parameter.
    pub index: usize,
    /// Index of the block within its matrix.
    pub within: usize,
    /// The block in the parameter's global storage.
    pub block: Block,
    /// Part of the block that this process stores, in local storage.
    pub local: Rect,
    /// First row and column of that part within the stored part of its matrix.
    pub origin: [usize; 2],
    /// Rows and columns of the stored part of its matrix.
    pub stored: [usize; 2],
    /// Index among the matrices that are stored here; none when the matrix is stored elsewhere.
    pub lead: Option<usize>,
    /// Index among the blocks of this parameter that the same process stores, whichever that is.
    pub slot: usize,
    /// Rows of the block within their dimension.
    pub rows: Extent,
    /// Columns of the block within their dimension.
    pub cols: Extent,
    /// Number of stored matrices of a parameter that is taken whole; else one.
    pub stack: usize,
}

/// A state as this process stores it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalState {
    /// The whole state.
    pub spec: StateSpec,
    /// Offset and length of the stored part by dimension.
    pub spans: Vec<(usize, usize)>,
    /// Dimension of the state that each axis of the parameter's layout shards, if any.
    pub shards: Vec<Option<usize>>,
    /// The number of the state whose scales these are.
    pub scales_of: Option<usize>,
    /// The seed of the random numbers by which it is rounded, if it is.
    pub rounding: Option<u64>,
    /// The blocks whose elements lie here, one after the other, where each is whole with its owner or a contribution to a sum;
    /// `spans` and `shards` say then how it lies in a checkpoint.
    pub owned: Option<Owned>,
}

impl LocalState {
    /// The quantization of a state that is stored in 8 bits.
    #[must_use]
    pub fn quantized(&self) -> Option<Quantization> {
        self.spec.quantized.filter(|_| self.spec.dtype.is_quantized())
    }

    /// Tests whether the state is a second moment: of its numbers none is negative.
    #[must_use]
    pub fn is_second_moment(&self) -> bool {
        self.spec.moment == Some(Code::Unsigned)
    }

    /// Positions of the stored elements in the whole state.
    #[must_use]
    pub fn places(&self) -> Places {
        let Some(owned) = &self.owned else { return Places::new(&self.spec.shape, &self.spans) };
        let blocks = owned.blocks.iter().map(|(_, whole)| whole);
        Places::of_matrices(
            blocks.map(|Rect { offset, rows, cols, stride }| [*offset, *rows, *cols, *stride]),
        )
    }

    /// Tests whether an algorithm works on the state: not on scales, states of an average, and halves of weights.
    #[must_use]
    pub fn is_of_algorithm(&self) -> bool {
        self.scales_of.is_none() && !is_of_average(self.spec.role) && self.spec.role != MASTER
    }
}

/// The part of an owner-sharded state (ZeRO-1) that is here, or what this process adds to a state that is a sum.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owned {
    /// Index of each block that this process owns, and where its elements are in the whole state.
    pub blocks: Vec<(usize, Rect)>,
    /// The ranks of each axis among which the blocks are owned, or over which the state is a sum.
    pub axes: Vec<Vec<u64>>,
    /// True if the state is a sum, to which the elements here are what this process adds.
    pub is_sum: bool,
    /// True if elements of a whole state belong here: of a sum they go to one process, and the others add nothing.
    pub takes: bool,
}

impl Owned {
    /// Elements of all blocks.
    fn numel(&self) -> usize {
        self.blocks.iter().map(|(_, whole)| whole.numel()).sum()
    }

    /// The elements of a block here, none of one that another process owns.
    fn part(&self, index: usize) -> Rect {
        let mut offset = 0;
        for (own, Rect { rows, cols, .. }) in &self.blocks {
            if *own == index {
                return Rect::packed(offset, *rows, *cols);
            }
            offset += rows * cols;
        }
        Rect::default()
    }
}

impl LocalState {
    /// Lays a state out as its parameter is.
    #[must_use]
    pub fn of(spec: StateSpec, layout: &Layout) -> Self {
        let source = |sharding: &DimSharding<usize>| match sharding {
            DimSharding::Replicated | DimSharding::PerMatrix => None,
            DimSharding::LikeParam(dim) | DimSharding::Even(dim) => Some(*dim),
        };
        let spans = spec.shape.iter().zip(&spec.sharding).map(|(&size, sharding)| match source(sharding) {
            None => (0, size),
            Some(dim) => {
                let (sharding, _) = ShardingAxes::of(layout, dim);
                sharding.span(size, sharding.depth())
            }
        });
        let spans = spans.collect();
        let shards = layout.placements.iter().map(|placement| match placement {
            Placement::Shard(dim) | Placement::Strided(dim) => {
                spec.sharding.iter().position(|sharding| source(sharding) == Some(*dim))
            }
            _ => None,
        });
        let shards = shards.collect();
        Self { spec, spans, shards, scales_of: None, rounding: None, owned: None }
    }

    /// Name of the state: scales are called after the state that they belong to.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}{}", self.spec.role, if self.scales_of.is_some() { SCALES } else { "" })
    }

    /// The shape that is stored here.
    #[must_use]
    pub fn shape(&self) -> Vec<usize> {
        if let Some(owned) = &self.owned {
            // One dimension more than the whole state has: the shape distinguishes blocks from the whole.
            return self.spec.shape.iter().map(|_| 1).chain([owned.numel()]).collect();
        }
        self.spans.iter().map(|(_, len)| *len).collect()
    }

    /// Length of the rows that are quantized separately.
    #[must_use]
    pub fn width(&self) -> usize {
        let whole = self.spec.shape.last().copied().unwrap_or(1);
        match &self.owned {
            Some(owned) => owned.blocks.first().map_or(whole, |(_, part)| part.cols.min(whole)),
            None => self.spans.last().map_or(1, |(_, len)| *len),
        }
    }

    /// Bytes that are stored here.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shape().iter().product::<usize>() * self.spec.dtype.bytes()
    }

    /// The stored elements that belong to a block. No element belongs to two: all of a state that blocks share is the first
    /// one's.
    #[must_use]
    pub fn part(&self, shard: &BlockShard) -> Rect {
        if let Some(owned) = &self.owned {
            return owned.part(shard.index);
        }
        let shape = self.shape();
        let width = shape.last().copied().unwrap_or(1);
        let Some(lead) = shard.lead else { return Rect::default() };
        match self.spec.share {
            Share::Like => shard.local,
            Share::All if shard.slot > 0 => Rect::default(),
            Share::All => Rect::packed(0, 1, shape.iter().product()),
            Share::Side { side, leading, column } => {
                let (first, rows, height) = match side {
                    Side::Rows => (shard.origin[0], shard.local.rows, shard.stored[0]),
                    Side::Cols => (shard.origin[1], shard.local.cols, shard.stored[1]),
                };
                let behind: usize = shape[leading..].iter().product();
                let width = behind.checked_div(height).unwrap_or(width);
                let offset = (lead * height + first) * width;
                let between = if side == Side::Rows { shard.block.between } else { 0 };
                let stride = (between + 1) * width;
                if column {
                    Rect { offset: offset + shard.within, rows, cols: 1, stride }
                } else {
                    Rect { offset, rows, cols: width, stride }
                }
            }
            Share::Number => Rect::packed(lead, 1, 1),
            Share::Each { cols } => {
                let height = shape[shape.len() - 2];
                let (first, cols) = match cols {
                    None => (0, width),
                    Some(Side::Rows) => (shard.origin[0], shard.local.rows),
                    Some(Side::Cols) => (shard.origin[1], shard.local.cols),
                };
                Rect { offset: lead * height * width + first, rows: height, cols, stride: width }
            }
            Share::Block => {
                let (per_matrix, height) = (shape[shape.len() - 3], shape[shape.len() - 2]);
                Rect::packed((lead * per_matrix + shard.within) * height * width, height, width)
            }
        }
    }
}

/// The blocks of an elementwise parameter: one, everything that is stored here.
#[must_use]
pub(super) fn flat_shard(p: &ParamSpec, layout: &Layout) -> BlockShard {
    let stored = spans(&p.shape, layout).iter().map(|(_, len)| len).product();
    BlockShard {
        index: 0,
        within: 0,
        block: Block { rows: 1, cols: p.numel(), ..Block::default() },
        local: Rect::packed(0, 1, stored),
        origin: [0, 0],
        stored: [1, stored],
        lead: Some(0),
        slot: 0,
        rows: Extent::whole(1),
        cols: Extent::whole(stored),
        stack: 1,
    }
}

/// The one block of a parameter that is taken whole: its matrices over the dimensions behind `leading`, where there are
/// any, as many as are stored.
#[must_use]
pub(super) fn whole_shard(p: &ParamSpec, leading: usize, layout: &Layout) -> BlockShard {
    let spans = spans(&p.shape, layout);
    let width = spans.last().map_or(1, |(_, len)| *len);
    let stored: usize = spans.iter().map(|(_, len)| len).product();
    let rows = stored.checked_div(width).unwrap_or(0);
    let side = |d: usize| Extent::whole(p.shape.get(leading + d).copied().unwrap_or(1));
    BlockShard {
        block: Block { rows: side(0).len, cols: side(1).len, ..Block::default() },
        local: Rect::packed(0, rows, width),
        stored: [rows, width],
        rows: side(0),
        cols: side(1),
        stack: spans[..leading].iter().map(|(_, len)| len).product(),
        ..flat_shard(p, layout)
    }
}

/// Returns the side that is split into equal blocks such that every process stores whole blocks, for matrices with one
/// dimension per side: they need no communication along it.
#[must_use]
pub(super) fn whole_blocks(
    p: &ParamSpec,
    blocks: &[Block],
    [leading, columns]: [usize; 2],
    layout: &Layout,
    states: &[StateSpec],
) -> Option<Side> {
    if columns != leading + 1 {
        return None;
    }
    let (Some(first), [rows, cols]) = (blocks.first(), p.shape.get(leading..)?) else { return None };
    let side = match (first.rows < *rows, first.cols < *cols) {
        (true, false) => Side::Rows,
        (false, true) => Side::Cols,
        _ => return None,
    };
    let (dim, all, each) = match side {
        Side::Rows => (leading, *rows, first.rows),
        Side::Cols => (leading + 1, *cols, first.cols),
    };
    let alike = blocks.iter().all(|b| b.rows == first.rows && b.cols == first.cols && b.between == 0);
    // A state with a part for each block, wherever that is stored, has to be kept up on all processes.
    let common = |s: &StateSpec| matches!(s.share, Share::Block | Share::Side { column: true, .. });
    let (sharding, _) = ShardingAxes::of(layout, dim);
    let even = all.is_multiple_of((sharding.num_shards() * each).max(1));
    (sharding.depth() > 0 && alike && even && !states.iter().any(common)).then_some(side)
}

/// The blocks of a parameter whose rows and columns begin with these dimensions; those before them number its matrices. Along
/// `whole` every process stores whole ones.
///
/// # Errors
/// `Error::Layout` for another dimension of rows or columns that is sharded.
pub(super) fn shards(
    p: &ParamSpec,
    blocks: &[Block],
    [rows_dim, cols_dim]: [usize; 2],
    layout: &Layout,
    whole: Option<Side>,
) -> Result<Vec<BlockShard>> {
    let leading = rows_dim;
    let is_deep = |d: usize| d > rows_dim && d != cols_dim;
    let deep = layout.distributed_axes().find_map(|(axis, placement)| match placement {
        Placement::Shard(d) | Placement::Strided(d) if is_deep(d) => Some((axis, placement, d)),
        _ => None,
    });
    if let Some((axis, placement, dim)) = deep {
        let side = if dim < cols_dim { "rows" } else { "columns" };
        let other = if cols_dim < p.shape.len() { format!(" or {cols_dim}") } else { String::new() };
        return Err(Error::Layout {
            param: p.name.clone(),
            what: format!(
                "placement {placement:?} on axis '{}' shards the {side} of the flattened matrix into pieces that do not lie together",
                axis.name
            ),
            help: format!("Shard dimension {rows_dim}{other} instead"),
        });
    }
    let spans = spans(&p.shape, layout);
    let scale: usize = p.shape.iter().skip(cols_dim + 1).product();
    let row_scale: usize = p.shape.iter().take(cols_dim).skip(rows_dim + 1).product();
    // Of a vector the dimensions that are not there have one element.
    let size = |dim: usize| p.shape.get(dim).copied().unwrap_or(1);
    let span = |dim: usize| spans.get(dim).copied().unwrap_or((0, 1));
    let (rows, cols) = (size(rows_dim) * row_scale, size(cols_dim) * scale);
    let stored_cols = span(cols_dim).1 * scale;
    let stored_rows = span(rows_dim).1 * row_scale;
    let per_matrix = (blocks.len() / p.shape[..leading].iter().product::<usize>().max(1)).max(1);
    let mut shards = Vec::with_capacity(blocks.len());
    for (index, block) in blocks.iter().enumerate() {
        let matrix = (rows * cols).max(1);
        let lead = local_lead(block.offset / matrix, &p.shape[..leading], &spans[..leading]);
        let within = block.offset % matrix;
        let start = within / cols.max(1);
        let between = block.between;
        let row_extent = Extent { dim: size(rows_dim), scale: row_scale, start, between, len: block.rows };
        let start = within % cols.max(1);
        let col_extent = Extent { dim: size(cols_dim), scale, start, between: 0, len: block.cols };
        let (r, c) = (row_extent.clip(span(rows_dim)), col_extent.clip(span(cols_dim)));
        let first_row = (row_extent.start + r.start * (between + 1))
            .saturating_sub(span(rows_dim).0 * row_scale)
            .min(stored_rows);
        let first_col =
            (col_extent.start + c.start).saturating_sub(span(cols_dim).0 * scale).min(stored_cols);
        let offset = (lead.unwrap_or(0) * stored_rows + first_row) * stored_cols + first_col;
        let local = Rect { offset, rows: r.len(), cols: c.len(), stride: stored_cols * (between + 1) };
        let local = if lead.is_some() { local } else { Rect::default() };
        let (matrix, within) = (slot(block.offset / matrix, &p.shape[..leading], layout), index % per_matrix);
        let mut shard = BlockShard {
            index,
            within,
            block: *block,
            local,
            origin: [first_row, first_col],
            stored: [stored_rows, stored_cols],
            lead,
            slot: matrix * per_matrix + within,
            rows: row_extent,
            cols: col_extent,
            stack: 1,
        };
        match whole {
            None => {}
            Some(Side::Rows) => {
                shard.alone(matrix, &ShardingAxes::of(layout, rows_dim).0, r.len(), |p| &mut p.rows);
            }
            Some(Side::Cols) => {
                shard.alone(matrix, &ShardingAxes::of(layout, cols_dim).0, c.len(), |p| &mut p.cols);
            }
        }
        shards.push(shard);
    }
    Ok(shards)
}

impl BlockShard {
    /// Makes the block one that lies whole on one process along a side: here if `stored` elements of that side are. Its
    /// matrix is number `matrix` of those that a process stores parts of.
    fn alone(
        &mut self,
        matrix: usize,
        sharding: &ShardingAxes,
        stored: usize,
        side: impl Fn(&mut Self) -> &mut Extent,
    ) {
        let Extent { dim, scale, start, len, .. } = *side(self);
        let (at, largest) = sharding.offset_of(dim, start / scale.max(1));
        self.slot = (matrix * largest + at) * scale / len.max(1);
        *side(self) = Extent::whole(len);
        if stored == 0 {
            (self.lead, self.local) = (None, Rect::default());
        }
    }
}

/// Index of matrix `index` among those that its process stores, counted as if every process stored as many as the one
/// with most.
fn slot(index: usize, shape: &[usize], layout: &Layout) -> usize {
    let (mut rest, mut slot, mut step) = (index, 0, 1);
    for (dim, &size) in shape.iter().enumerate().rev() {
        let (at, largest) = ShardingAxes::of(layout, dim).0.offset_of(size, rest % size.max(1));
        rest /= size.max(1);
        slot += at * step;
        step *= largest;
    }
    slot
}

/// Index of matrix `index` among those stored here, by leading dimensions; `None` when it is stored elsewhere.
fn local_lead(index: usize, shape: &[usize], spans: &[(usize, usize)]) -> Option<usize> {
    let (mut rest, mut place, mut step) = (index, 0, 1);
    for (&size, &(start, len)) in shape.iter().zip(spans).rev() {
        let at = (rest % size.max(1)).checked_sub(start).filter(|at| *at < len)?;
        rest /= size.max(1);
        place += at * step;
        step *= len;
    }
    Some(place)
}
