//! What the layers say to each other about parameters and their states: shapes, types, blocks. No tensors.

use std::ops::Range;

use crate::dtype::DType;

/// One parameter as the optimizer sees it, with its global shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamSpec {
    /// Position over all groups; also the stream of the parameter's random numbers.
    pub index: usize,
    /// Name given by the user, or `param <index>`.
    pub name: String,
    /// Global shape.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
    /// Whether a low-rank algorithm works on the transpose of its matrices; not set: where they have fewer rows than
    /// columns.
    pub transposed: Option<bool>,
}

/// One side of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Its rows.
    Rows,
    /// Its columns.
    Cols,
}

impl Side {
    /// Its place in an array of rows and columns.
    #[must_use]
    pub fn index(self) -> usize {
        match self {
            Self::Rows => 0,
            Self::Cols => 1,
        }
    }
}

/// How one dimension of a tensor goes along with the parameter when that is spread over several processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut<T> {
    /// Never cut.
    Whole,
    /// It is that side (or dimension) of the parameter and is cut as that is.
    With(T),
    /// It is none of the parameter's, and is cut evenly among the processes that cut that side (or dimension).
    Spread(T),
    /// One for each matrix that is stored of a parameter that is taken whole.
    Stack,
}

/// A matrix inside a row-major area: its first element, size, and the distance of its rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rect {
    /// First element.
    pub offset: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Elements from one row to the next.
    pub stride: usize,
}

impl Rect {
    /// A matrix whose elements all lie together.
    #[must_use]
    pub fn packed(offset: usize, rows: usize, cols: usize) -> Self {
        Self { offset, rows, cols, stride: cols }
    }

    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.rows * self.cols
    }
}

impl ParamSpec {
    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether a low-rank algorithm works on the transposes of these blocks: the same for all, so that they share a
    /// state; the largest one decides.
    #[must_use]
    pub fn oriented(&self, blocks: impl IntoIterator<Item = Block>) -> bool {
        let wide = |b: Option<Block>| b.is_some_and(|b| b.rows < b.cols);
        self.transposed.unwrap_or_else(|| {
            wide(blocks.into_iter().reduce(|a, b| if b.numel() > a.numel() { b } else { a }))
        })
    }
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
}

impl Block {
    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.rows * self.cols
    }

    /// The elements of the block.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.numel()
    }
}

/// How a state tensor begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    /// All zero.
    Zeros,
    /// Independent N(0, 1), a function of (seed, parameter, element) only.
    Normal {
        /// The group's seed.
        seed: u64,
    },
}

/// Which elements of a state belong to a block of the parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Element i belongs to element i of the parameter.
    Like,
    /// Behind `leading` dimensions that number the matrices, rows go along a side of the matrix: those of the block.
    Side {
        /// The side.
        side: Side,
        /// How many dimensions number the matrices.
        leading: usize,
        /// Whether the block has one column only, at its place among the blocks of its parameter.
        column: bool,
    },
    /// Behind the dimensions that number the matrices, a matrix for each block, whose columns go along a side of it.
    Each {
        /// The side, if any.
        cols: Option<Side>,
    },
    /// The matrix over the last two dimensions at the block's place among the blocks of its parameter.
    Block,
    /// One element for each block.
    Number,
    /// Everything belongs to all blocks.
    All,
}

/// How a state is stored in 8 bits: codes, and a scale for each block of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coded {
    /// Type of the codes.
    pub dtype: DType,
    /// Elements of a block.
    pub block: usize,
}

impl Coded {
    /// The shape of the scales of a state of shape `shape`.
    #[must_use]
    pub fn scales(&self, shape: &[usize]) -> Vec<usize> {
        let mut shape = shape.to_vec();
        shape.iter_mut().next_back().into_iter().for_each(|last| *last = last.div_ceil(self.block));
        shape
    }
}

/// A state tensor that an algorithm keeps for one parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSpec {
    /// Canonical name; a class may show it under another one.
    pub role: &'static str,
    /// Global shape.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
    /// Initial value.
    pub init: Init,
    /// How each dimension goes along with the parameter's dimensions.
    pub cuts: Vec<Cut<usize>>,
    /// The elements of each block.
    pub share: Share,
    /// How it is stored when it is stored in 8 bits; none where it never is.
    pub coded: Option<Coded>,
    /// Whether it is in the memory of the host, wherever the parameter is.
    pub on_host: bool,
}

impl StateSpec {
    /// A state of the parameter's own shape.
    #[must_use]
    pub fn like(role: &'static str, p: &ParamSpec, dtype: DType) -> Self {
        Self {
            role,
            shape: p.shape.clone(),
            dtype,
            init: Init::Zeros,
            cuts: (0..p.shape.len()).map(Cut::With).collect(),
            share: Share::Like,
            coded: None,
            on_host: false,
        }
    }

    /// A counter: one float32 element shared by all blocks.
    #[must_use]
    pub fn counter(role: &'static str) -> Self {
        Self {
            role,
            shape: Vec::new(),
            dtype: DType::F32,
            init: Init::Zeros,
            cuts: Vec::new(),
            share: Share::All,
            coded: None,
            on_host: true,
        }
    }
}

/// The class of a bucket: what all its units have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitShape {
    /// Rows of each block (1 for flat units).
    pub rows: usize,
    /// Columns of each block (0 for flat units, whose lengths differ).
    pub cols: usize,
    /// Whether a low-rank algorithm works on the transpose.
    pub transposed: bool,
    /// Among how many processes rows and columns are cut.
    pub ways: [usize; 2],
    /// Whether no other process has a part or a copy of them.
    pub alone: bool,
    /// The dimensions of the parameter behind those that number its matrices: those of a flattened matrix are more
    /// than two.
    pub inner: Vec<usize>,
    /// Element type of the parameters.
    pub param: DType,
    /// Element types of the states, in the order of `Algorithm::state`.
    pub state: Vec<DType>,
}

/// What `explain()` says about one parameter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Description {
    /// How the parameter is read as matrices.
    pub view: String,
    /// `lr` is multiplied by this factor.
    pub lr_factor: f64,
    /// Rank of the update, where it is bounded by a hyper-parameter.
    pub rank: Option<usize>,
    /// Floating-point operations of one step.
    pub flops: f64,
    /// Those of them that need whole matrices.
    pub whole_flops: f64,
}
