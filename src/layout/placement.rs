//! Placement of a tensor along one mesh axis, with DTensor's meaning.

/// Reduction that a partial value still needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reduction {
    /// The ranks' values add up to the true one.
    Sum,
    /// The mean of the ranks' values is the true one.
    Avg,
}

/// Placement along one axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Placement {
    /// Every rank holds the same values.
    Replicate,
    /// Rank i holds the i-th chunk of this dimension.
    Shard(usize),
    /// Rank i holds the i-th chunk of what the other axes that shard this dimension leave: DTensor's `_StridedShard`.
    Strided(usize),
    /// Every rank holds a contribution. Of a parameter it is said of the gradient: it is not averaged, or added up, yet.
    Partial(Reduction),
    /// Every rank holds some of the matrices, each whole.
    OwnerSharded,
}
