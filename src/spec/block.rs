//! Blocks, the matrices of parameters: their sides, how they are sharded, and what those of a bucket have in common.

use crate::tensor::{DType, Device};

/// One side of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Rows of the matrix.
    Rows,
    /// Columns of the matrix.
    Cols,
}

impl Side {
    /// Index of the side in an array of rows and columns.
    #[must_use]
    pub fn index(self) -> usize {
        match self {
            Self::Rows => 0,
            Self::Cols => 1,
        }
    }

    /// The other side.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Rows => Self::Cols,
            Self::Cols => Self::Rows,
        }
    }
}

/// Sharding of one dimension of a tensor, relative to that of the parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DimSharding<T> {
    /// Dimension that is never sharded.
    Replicated,
    /// Side (or dimension) of the parameter, sharded as the parameter is.
    LikeParam(T),
    /// Dimension that is none of the parameter's, sharded evenly over the processes that shard that side (or
    /// dimension).
    Even(T),
    /// Dimension of one entry for each matrix that is stored of a parameter that is taken whole.
    PerMatrix,
}

/// A matrix inside the row-major storage of a parameter: `rows × cols` elements from `offset`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// First element.
    pub offset: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Rows of other matrices between two of its rows.
    pub between: usize,
}

impl Block {
    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.rows * self.cols
    }

    /// The elements of a block of whole rows.
    pub fn elements(&self) -> impl Iterator<Item = usize> + use<> {
        let Self { offset, rows, cols, between } = *self;
        (0..rows).flat_map(move |row| {
            let first = offset + row * (between + 1) * cols;
            first..first + cols
        })
    }
}

/// The class of a bucket: what all its units have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitShape {
    /// Rows of each block (1 for flat units).
    pub rows: usize,
    /// Columns of each block (0 for flat units, whose lengths differ).
    pub cols: usize,
    /// True if a low-rank algorithm works on the transpose.
    pub transposed: bool,
    /// Numbers of processes over which rows and columns are sharded.
    pub num_shards: [usize; 2],
    /// True if no other process has a part or a copy of the parameters.
    pub alone: bool,
    /// True if other processes have copies of what this one stores.
    pub copies: bool,
    /// The device of the parameters.
    pub device: Device,
    /// The dimensions of the parameter behind those that number its matrices: those of a flattened matrix are more
    /// than two, those of a vector fewer.
    pub inner: Vec<usize>,
    /// Position of the state with the norm that a matrix keeps, one behind all where it keeps none; not set where weights
    /// are free. The update of weights whose norms are bound has to lie whole in a buffer.
    pub bound: Option<usize>,
    /// Rows of the block with most, and columns of that with most, among all of the parameter; 0 for algorithms that do not
    /// ask.
    pub largest: [usize; 2],
    /// Element type of the parameters.
    pub param: DType,
    /// Type of the weights that steps find and leave: another one than the parameters' where these are weights in two halves.
    pub weights: DType,
    /// Element types of the states, in the order of `Algorithm::state`.
    pub state: Vec<DType>,
}

impl UnitShape {
    /// Tests whether the matrices of a bucket are multiplied together, so that each needs scratch of its own.
    #[must_use]
    pub fn is_batched(&self) -> bool {
        self.device != Device::Cpu
    }
}
