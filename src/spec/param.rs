//! Parameters: their shapes, and their descriptions for users.

use sha2::{Digest, Sha256};

use super::Block;
use crate::error::{Error, Result};
use crate::tensor::DType;

/// The most elements that a parameter may have, and all of a plan together. Bytes of any buffer, of all of them, and
/// products of two sides of a matrix with a handful of them then fit 64 bits.
pub const MOST_ELEMENTS: usize = 1 << 47;

/// One parameter as the optimizer sees it, with its global shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamSpec {
    /// Position over all groups.
    pub index: usize,
    /// Stream of the parameter's random numbers: its position, or of a parameter with a name [`stream_of`] that.
    pub stream: u64,
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

/// Components of a name that wrappers of modules put into it: `torch.compile`, FSDP1, activation checkpointing.
const WRAPPERS: [&str; 3] = ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];

/// The stream of the random numbers of a parameter with this name: the first 64 bits of the name's SHA-256. What wrappers
/// of the model put into the name does not count, nor `module.` of a data-parallel one before it: the numbers are the same
/// on every layout.
#[must_use]
pub fn stream_of(name: &str) -> u64 {
    let parts = name.split('.').filter(|part| !WRAPPERS.contains(part));
    let bare: Vec<&str> = parts.skip_while(|part| *part == "module").collect();
    let hash = Sha256::digest(bare.join("."));
    hash.iter().take(8).fold(0, |bits, byte| (bits << 8) | u64::from(*byte))
}

impl ParamSpec {
    /// A parameter about which only the shape and the dtype are known.
    #[must_use]
    pub fn of_shape(shape: &[usize], dtype: DType) -> Self {
        Self { index: 0, stream: 0, name: String::new(), shape: shape.to_vec(), dtype, transposed: None }
    }

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
    /// Largest relative error of rounding an operand of the products of matrices, where their type is a setting.
    pub roundoff: Option<f64>,
    /// Floating-point operations of one step.
    pub flops: f64,
    /// Floating-point operations of one step that need whole matrices.
    pub whole_flops: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_of_a_name_is_the_head_of_its_digest() {
        // Python: hashlib.sha256(b"0.weight").hexdigest()[:16]
        assert_eq!(stream_of("0.weight"), 0x5f68_e5e2_daca_c2c7);
    }

    #[test]
    fn wrappers_of_a_module_do_not_change_the_stream() {
        let wrapped = [
            "module.0.weight",
            "_orig_mod.module.0.weight",
            "module._orig_mod.0.weight",
            "_fsdp_wrapped_module.0._checkpoint_wrapped_module.weight",
        ];
        for name in wrapped {
            assert_eq!(stream_of(name), stream_of("0.weight"), "{name}");
        }
        for other in ["0.bias", "1.weight", "0.module.weight", "a.module.0.weight", "module.module"] {
            assert_ne!(stream_of(other), stream_of("0.weight"), "{other}");
        }
    }
}
