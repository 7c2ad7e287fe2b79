//! Parameters: their shapes, and their descriptions for users.

use super::Block;
use crate::error::{Error, Result};
use crate::tensor::DType;

/// The most elements that a parameter may have, and all of a plan together. Bytes of any buffer, of all of them, and
/// products of two sides of a matrix with a handful of them then fit 64 bits.
pub const MOST_ELEMENTS: usize = 1 << 47;

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
    /// True if a low-rank algorithm works on the transpose of the matrices; not set: where they have fewer rows than
    /// columns.
    pub transposed: Option<bool>,
}

impl ParamSpec {
    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Number of elements if no dimension were empty: no product of some of the sizes is larger.
    ///
    /// # Errors
    /// `Error::Value` above [`MOST_ELEMENTS`].
    pub fn checked_extent(&self) -> Result<usize> {
        let extent = self.shape.iter().try_fold(1_usize, |product, &size| product.checked_mul(size.max(1)));
        extent.filter(|&extent| extent <= MOST_ELEMENTS).ok_or_else(|| {
            Error::Value(format!(
                "{}: the sizes of a parameter must have a product of at most 2^47, an empty one counted as 1, got shape \
                 {:?}: split it into several parameters",
                self.name, self.shape
            ))
        })
    }

    /// Tests whether a low-rank algorithm works on the transposes of these blocks: one answer for all, so that they
    /// share a state; the largest one decides.
    #[must_use]
    pub fn oriented(&self, blocks: impl IntoIterator<Item = Block>) -> bool {
        let wide = |b: Option<Block>| b.is_some_and(|b| b.rows < b.cols);
        self.transposed.unwrap_or_else(|| {
            wide(blocks.into_iter().reduce(|a, b| if b.numel() > a.numel() { b } else { a }))
        })
    }
}

/// Facts that `explain()` prints about one parameter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Description {
    /// Phrase for how the parameter is read as matrices.
    pub view: String,
    /// Factor by which `lr` is multiplied.
    pub lr_factor: f64,
    /// Rank of the update, where it is bounded by a hyper-parameter.
    pub rank: Option<usize>,
    /// Floating-point operations of one step.
    pub flops: f64,
    /// Floating-point operations of one step that need whole matrices.
    pub whole_flops: f64,
}
