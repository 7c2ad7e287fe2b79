//! Parameters read as matrices: flattened, stacked, per head, or in blocks of rows or columns. Shapes only.

use super::Options;
use crate::error::{Error, Result};
use crate::spec::{Block, DimSharding, Init, ParamSpec, Share, Side, StateSpec};

/// Option keys that choose how a parameter is read as matrices.
pub const OPTIONS: [&str; 6] =
    ["flatten", "interleaved", "num_heads", "split_sizes", "split_dim", "fan_in_fan_out"];

/// Rule by which a parameter is read as matrices.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Matrices {
    /// Read `[d0, d1, ...]` as one `[d0, d1·d2·…]` matrix instead of a stack over the leading dimensions.
    pub flatten: bool,
    /// Number of matrices whose rows alternate: row `r` belongs to matrix `r % interleaved`. Those of `[.., out, k, in]` with
    /// k = `interleaved` are the k matrices `[out, in]`. 0 if the user does not say it.
    pub interleaved: usize,
    /// Number of equal blocks that a matrix is split into.
    pub num_heads: usize,
    /// Split a matrix into blocks of these sizes.
    pub split_sizes: Vec<usize>,
    /// The dimension that is split into blocks: rows or columns.
    pub split_dim: usize,
    /// True if matrices are stored `[in, out]`.
    pub fan_in_fan_out: bool,
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
    /// The rule that takes the last two dimensions as matrices.
    #[must_use]
    pub fn stacked() -> Self {
        Self { interleaved: 1, ..Self::default() }
    }

    /// Reads the rule from the options of a group.
    ///
    /// # Errors
    /// `Error::Value` for values of the wrong kind or that exclude each other.
    pub fn from_options(options: &Options) -> Result<Self> {
        let num_heads = options.optional_count("num_heads")?.unwrap_or(1);
        let split_sizes = options.counts("split_sizes")?;
        let flatten = options.flag("flatten")?;
        let split_dim = options.count("split_dim")?;
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
        let interleaved = options.optional_count("interleaved")?;
        if interleaved == Some(0) {
            return Err(Error::Value("interleaved must be an integer >= 1 or None, got 0".into()));
        }
        let interleaved = interleaved.unwrap_or(0);
        if interleaved > 1 && (flatten || split_dim == 1) {
            return Err(Error::Value(
                "interleaved is about rows: it goes with neither flatten nor split_dim=1".into(),
            ));
        }
        let fan_in_fan_out = options.flag("fan_in_fan_out")?;
        Ok(Self { flatten, interleaved, num_heads, split_sizes, split_dim, fan_in_fan_out })
    }

    /// Outputs and inputs of a matrix of `rows × cols`.
    #[must_use]
    pub fn fans(&self, rows: usize, cols: usize) -> [u64; 2] {
        if self.fan_in_fan_out { [cols as u64, rows as u64] } else { [rows as u64, cols as u64] }
    }

    /// Number of blocks of each matrix over the last two dimensions, of `count` blocks of a parameter.
    #[must_use]
    pub fn per_matrix(&self, p: &ParamSpec, count: usize) -> usize {
        count / p.shape[..self.leading(p)].iter().product::<usize>().max(1)
    }

    /// A state with a number for each block of a parameter, in the type of its arithmetic, which starts at 0.
    #[must_use]
    pub fn number(&self, role: &'static str, p: &ParamSpec, blocks: &[Block]) -> StateSpec {
        let lead = self.leading(p);
        let (mut shape, mut sharding) =
            (p.shape[..lead].to_vec(), (0..lead).map(DimSharding::LikeParam).collect::<Vec<_>>());
        let is_split = self.splits().is_some();
        if is_split {
            shape.extend([self.per_matrix(p, blocks.len()), 1, 1]);
            sharding.extend([DimSharding::Replicated; 3]);
        }
        StateSpec {
            role,
            shape,
            sharding,
            share: if is_split { Share::Block } else { Share::Number },
            dtype: p.dtype.arithmetic(),
            init: Init::Zeros,
            moment: None,
            quantized: None,
            on_host: false,
        }
    }

    /// The side that is split into blocks, if any is.
    #[must_use]
    pub fn splits(&self) -> Option<Side> {
        if self.is_cut() {
            return Some(if self.split_dim == 0 { Side::Rows } else { Side::Cols });
        }
        (self.interleaved > 1).then_some(Side::Rows)
    }

    /// Tests whether each matrix is cut into blocks that lie one behind the other.
    fn is_cut(&self) -> bool {
        self.num_heads > 1 || !self.split_sizes.is_empty()
    }

    /// Tests whether the dimension before the last counts matrices whose rows alternate.
    #[must_use]
    pub fn counts_interleaved(&self, p: &ParamSpec) -> bool {
        let dims = p.shape.len();
        self.interleaved > 1 && dims > 2 && p.shape[dims - 2] == self.interleaved
    }

    /// Tests whether all blocks of a parameter are of one shape.
    #[must_use]
    pub fn alike(&self) -> bool {
        self.split_sizes.windows(2).all(|pair| pair[0] == pair[1])
    }

    /// Number of leading dimensions that count the matrices of a parameter.
    #[must_use]
    pub fn leading(&self, p: &ParamSpec) -> usize {
        let own = if self.counts_interleaved(p) { 3 } else { 2 };
        if self.flatten { 0 } else { p.shape.len().saturating_sub(own) }
    }

    /// The first dimension that holds columns.
    #[must_use]
    pub fn columns(&self, p: &ParamSpec) -> usize {
        self.leading(p) + if self.counts_interleaved(p) { 2 } else { 1 }
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
            let cols = shape[1..].iter().product();
            return Ok(vec![Block { offset: 0, rows: shape[0], cols, between: 0 }]);
        }
        let (lead, columns) = (self.leading(p), self.columns(p));
        if lead > 1 && self.interleaved == 0 {
            return Err(Error::Value(format!(
                "{}: a parameter with {} dimensions may be one matrix, several whose rows alternate, or a stack of matrices, got \
                 shape {shape:?}: pass flatten=True, interleaved=k or interleaved=1 for these, in this order",
                p.name,
                shape.len()
            )));
        }
        let (all_rows, cols) = (shape[lead..columns].iter().product::<usize>(), shape[columns]);
        let (count, step) = (shape[..lead].iter().product::<usize>(), self.interleaved.max(1));
        if !all_rows.is_multiple_of(step) {
            return Err(Error::Value(format!(
                "{}: interleaved must divide the rows of each matrix, got interleaved={step} and shape {shape:?}",
                p.name
            )));
        }
        let (rows, between) = (all_rows / step, step - 1);
        let side = self.splits().unwrap_or(Side::Rows);
        let sizes = if self.is_cut() { self.sizes(p, [rows, cols][side.index()])? } else { vec![rows] };
        check_count(p, count.saturating_mul(sizes.len()).saturating_mul(step))?;
        let each = |i: usize| {
            let mut start = i / step * all_rows * cols + i % step * cols;
            sizes.iter().map(move |&size| {
                let offset = start;
                let (rows, cols, after) =
                    if side == Side::Rows { (size, cols, size * step * cols) } else { (rows, size, size) };
                start += after;
                Block { offset, rows, cols, between }
            })
        };
        Ok((0..count * step).flat_map(each).collect())
    }

    /// Sizes of the blocks that a side of `size` elements is split into.
    fn sizes(&self, p: &ParamSpec, size: usize) -> Result<Vec<usize>> {
        let shape = &p.shape;
        let dim = if self.split_dim == 0 { self.leading(p) } else { self.columns(p) };
        if self.num_heads > 1 {
            if !size.is_multiple_of(self.num_heads) {
                return Err(Error::Value(format!(
                    "{}: num_heads must divide dimension {dim}, got num_heads={} and shape {shape:?}",
                    p.name, self.num_heads
                )));
            }
            check_count(p, self.num_heads)?;
            return Ok(vec![size / self.num_heads; self.num_heads]);
        }
        let sum = self.split_sizes.iter().try_fold(0_usize, |sum, &size| sum.checked_add(size));
        if sum != Some(size) {
            return Err(Error::Value(format!(
                "{}: split_sizes must sum to dimension {dim}, got {:?} and shape {shape:?}",
                p.name, self.split_sizes
            )));
        }
        Ok(self.split_sizes.clone())
    }

    /// Phrase for `explain()`.
    #[must_use]
    pub fn phrase(&self, p: &ParamSpec) -> String {
        let columns = if self.split_dim == 1 { "column" } else { "row" };
        let lead = self.leading(p);
        let count = p.shape[..lead].iter().product::<usize>();
        let mut stack = if lead > 0 { format!("stack of {count}") } else { String::new() };
        if self.interleaved > 1 {
            let several = format!("{} interleaved", self.interleaved);
            stack = if lead > 0 { format!("{stack}, {several}") } else { several };
        }
        let blocks = if self.num_heads > 1 {
            format!("{} {}heads", self.num_heads, if self.split_dim == 1 { "column " } else { "" })
        } else if !self.split_sizes.is_empty() {
            format!("{columns} blocks {:?}", self.split_sizes)
        } else {
            String::new()
        };
        let view = match (self.flatten && p.shape.len() > 2, stack.is_empty(), blocks.is_empty()) {
            (true, ..) => "flattened".into(),
            (_, true, true) => "matrix".into(),
            (_, false, false) => format!("{stack}, {blocks}"),
            _ => stack + &blocks,
        };
        if self.fan_in_fan_out { view + ", [in, out]" } else { view }
    }
}
