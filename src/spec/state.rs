//! States: shapes, types, initial values, and which of their elements belong to a block.

use super::{DimSharding, ParamSpec, Side};
use crate::tensor::DType;

/// Initial value of a state tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    /// All zero.
    Zeros,
    /// Independent N(0, 1), a function of (seed, stream of the parameter, element) only.
    Normal {
        /// The group's seed.
        seed: u64,
    },
}

/// Elements of a state that belong to a block of the parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Element i belongs to element i of the parameter.
    Like,
    /// Rows of the block: behind `leading` dimensions that number the matrices, rows have the dimension of a side.
    Side {
        /// The side.
        side: Side,
        /// Number of dimensions that count the matrices.
        leading: usize,
        /// True if the block has one column only, at its index among the blocks of its parameter.
        column: bool,
    },
    /// Matrix for each block, behind the dimensions that number the matrices; its columns have the dimension of a side.
    Each {
        /// The side, if any.
        cols: Option<Side>,
    },
    /// Matrix over the last two dimensions at the block's index among the blocks of its parameter.
    Block,
    /// One element for each block.
    Number,
    /// All elements, shared by all blocks.
    All,
}

/// The numbers of a moment, which decide by which code book it is stored in 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// Numbers of either sign.
    Signed,
    /// Numbers that are not negative: a second moment.
    Unsigned,
}

impl Code {
    pub(super) fn dtype(self) -> DType {
        match self {
            Self::Signed => DType::Q8,
            Self::Unsigned => DType::UQ8,
        }
    }
}

/// Quantization of a state to 8 bits: quantized values, and a scale for each block of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantization {
    /// Type of the quantized values.
    pub dtype: DType,
    /// Elements of a block.
    pub block: usize,
}

impl Quantization {
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
    /// Sharding of each dimension, relative to the parameter's dimensions.
    pub sharding: Vec<DimSharding<usize>>,
    /// The elements of each block.
    pub share: Share,
    /// Set for a moment that is rounded at random where it is stored in 16 bits: the numbers that it averages.
    pub moment: Option<Code>,
    /// Quantization of the state when it is stored in 8 bits; none where it never is.
    pub quantized: Option<Quantization>,
    /// True if the state is in the memory of the host, on whichever device the parameter is.
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
            sharding: (0..p.shape.len()).map(DimSharding::LikeParam).collect(),
            share: Share::Like,
            moment: None,
            quantized: None,
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
            sharding: Vec::new(),
            share: Share::All,
            moment: None,
            quantized: None,
            on_host: true,
        }
    }
}
