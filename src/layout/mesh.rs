//! A device mesh as plain integers.

/// One axis: the global ranks along it, and where this process stands.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Axis {
    /// Name given by the user, or `dim<i>`.
    pub name: String,
    /// Global ranks along the axis, in order; axes are equal when their ranks are.
    pub ranks: Vec<u64>,
    /// Position of this process in `ranks`.
    pub coordinate: usize,
}

/// The axes that a tensor is laid out over, outermost first.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mesh {
    /// The axes.
    pub axes: Vec<Axis>,
}
