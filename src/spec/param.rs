//! Parameters: their shapes, and what is said about them.

use super::Block;
use crate::tensor::DType;

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
