//! Parameters read as matrices: flattened, stacked, per head, or in row blocks. Shapes only.

use super::Options;
use crate::error::{Error, Result};
use crate::spec::{Block, ParamSpec, Side};

/// Option keys that choose how a parameter is read as matrices.
pub const OPTIONS: [&str; 4] = ["flatten", "num_heads", "split_sizes", "split_dim"];

/// Rule by which a parameter is read as matrices.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Matrices {
    /// Read `[d0, d1, ...]` as one `[d0, d1·d2·…]` matrix instead of a stack over the leading dimensions.
    pub flatten: bool,
    /// Split a matrix into so many equal blocks.
    pub num_heads: usize,
    /// Split a matrix into blocks of these sizes.
    pub split_sizes: Vec<usize>,
    /// The dimension that is split into blocks: rows or columns.
    pub split_dim: usize,
}

/// The most matrices that a parameter may be read as: each is an entry of the plan.
const MOST_MATRICES: usize = 1 << 20;

/// Refuses to read a parameter as more matrices than a plan can hold.
fn check_count(p: &ParamSpec, count: usize) -> Result<()> {
    if count <= MOST_MATRICES {
        return Ok(());
    }
    Err(Error::Value(format!(
        "{}: a parameter must be read as at most {MOST_MATRICES} matrices, got {count} of shape {:?}: pass flatten=True, or put \
         it in a group with algorithm='adamw'",
        p.name, p.shape
    )))
}

impl Matrices {
    /// Reads the rule from the options of a group.
    ///
    /// # Errors
    /// `Error::Value` for values of the wrong kind or that exclude each other.
    pub fn from_options(options: &Options) -> Result<Self> {
        let num_heads = options.optional_count("num_heads")?.unwrap_or(1);
        let split_sizes = options.counts("split_sizes")?;
        let flatten = options.flag("flatten")?;
        let split_dim = options.count("split_dim", 0)?;
        if split_dim > 1 {
            return Err(Error::Value(format!("split_dim must be 0 (rows) or 1 (columns), got {split_dim}")));
        }
        if num_heads == 0 {
            return Err(Error::Value("num_heads must be an integer >= 1, got 0".into()));
        }
        if !split_sizes.is_empty() && (split_sizes.len() < 2 || split_sizes.contains(&0)) {
            return Err(Error::Value(format!(
                "split_sizes must be two or more positive integers, got {split_sizes:?}"
            )));
        }
        let chosen = usize::from(flatten) + usize::from(num_heads > 1) + usize::from(!split_sizes.is_empty());
        if chosen > 1 {
            return Err(Error::Value(
                "flatten, num_heads and split_sizes exclude each other: give one of them".into(),
            ));
        }
        Ok(Self { flatten, num_heads, split_sizes, split_dim })
    }

    /// The side that is split into blocks, if any is.
    #[must_use]
    pub fn splits(&self) -> Option<Side> {
        let split = self.num_heads > 1 || !self.split_sizes.is_empty();
        split.then_some(if self.split_dim == 0 { Side::Rows } else { Side::Cols })
    }

    /// Tests whether all blocks of a parameter are of one shape.
    #[must_use]
    pub fn alike(&self) -> bool {
        self.split_sizes.windows(2).all(|pair| pair[0] == pair[1])
    }

    /// Number of leading dimensions that count the matrices of a parameter.
    #[must_use]
    pub fn leading(&self, p: &ParamSpec) -> usize {
        if self.flatten { 0 } else { p.shape.len().saturating_sub(2) }
    }

    /// The matrices of a parameter.
    ///
    /// # Errors
    /// `Error::Value` that names the parameter when the rule does not fit its shape.
    pub fn blocks(&self, p: &ParamSpec) -> Result<Vec<Block>> {
        let shape = &p.shape;
        if shape.len() < 2 {
            return Err(Error::Value(format!(
                "{}: a matrix algorithm needs a parameter with at least 2 dimensions, got shape {shape:?}. Put it in a \
                 group with algorithm='adamw' or 'lion', or pass strict=False",
                p.name
            )));
        }
        if self.flatten {
            return Ok(vec![Block { offset: 0, rows: shape[0], cols: shape[1..].iter().product() }]);
        }
        let (rows, cols) = (shape[shape.len() - 2], shape[shape.len() - 1]);
        if let Some(side) = self.splits() {
            let key = if self.num_heads > 1 { "num_heads" } else { "split_sizes" };
            if shape.len() != 2 {
                return Err(Error::Value(format!(
                    "{}: {key} needs a 2-D parameter, got shape {shape:?}",
                    p.name
                )));
            }
            let size = shape[self.split_dim];
            let sizes = if self.num_heads > 1 {
                if !size.is_multiple_of(self.num_heads) {
                    return Err(Error::Value(format!(
                        "{}: num_heads must divide dimension {}, got num_heads={} and shape {shape:?}",
                        p.name, self.split_dim, self.num_heads
                    )));
                }
                check_count(p, self.num_heads)?;
                vec![size / self.num_heads; self.num_heads]
            } else {
                self.split_sizes.clone()
            };
            let sum = sizes.iter().try_fold(0_usize, |sum, &size| sum.checked_add(size));
            if sum != Some(size) {
                return Err(Error::Value(format!(
                    "{}: split_sizes must sum to dimension {}, got {sizes:?} and shape {shape:?}",
                    p.name, self.split_dim
                )));
            }
            let mut start = 0;
            return Ok(sizes
                .into_iter()
                .map(|size| {
                    let first = start;
                    start += size;
                    match side {
                        Side::Rows => Block { offset: first * cols, rows: size, cols },
                        Side::Cols => Block { offset: first, rows, cols: size },
                    }
                })
                .collect());
        }
        let count = shape[..shape.len() - 2].iter().product::<usize>();
        check_count(p, count)?;
        Ok((0..count).map(|i| Block { offset: i * rows * cols, rows, cols }).collect())
    }

    /// Phrase for `explain()`.
    #[must_use]
    pub fn phrase(&self, p: &ParamSpec) -> String {
        if self.flatten && p.shape.len() > 2 {
            "flattened".into()
        } else if self.num_heads > 1 {
            format!("{} {}heads", self.num_heads, if self.split_dim == 1 { "column " } else { "" })
        } else if !self.split_sizes.is_empty() {
            format!("{} blocks {:?}", if self.split_dim == 1 { "column" } else { "row" }, self.split_sizes)
        } else if p.shape.len() > 2 {
            format!("stack of {}", p.shape[..p.shape.len() - 2].iter().product::<usize>())
        } else {
            "matrix".into()
        }
    }
}
