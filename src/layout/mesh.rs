//! A device mesh as plain integers.

/// Mesh axis: the global ranks along it, and the coordinate of this process.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Axis {
    /// Name given by the user, or `dim<i>`.
    pub name: String,
    /// Global ranks along the axis, in order; axes are equal when their ranks are.
    pub ranks: Vec<u64>,
    /// Position of this process in `ranks`.
    pub coordinate: usize,
}

impl Axis {
    /// All ranks of several axes of one regular mesh as one axis, in ascending order.
    #[must_use]
    pub fn joined(axes: &[&Self]) -> Self {
        let own = axes.first().and_then(|axis| axis.ranks.get(axis.coordinate)).copied().unwrap_or(0);
        let mut ranks = vec![own];
        for axis in axes {
            // Along each axis ranks differ from this process's own by the same amounts, at any coordinates along the
            // others.
            ranks = ranks.iter().flat_map(|&at| axis.ranks.iter().map(move |&r| at + r - own)).collect();
        }
        ranks.sort_unstable();
        let coordinate = ranks.iter().position(|&r| r == own).unwrap_or(0);
        let name = axes.iter().map(|axis| axis.name.as_str()).collect::<Vec<_>>().join("·");
        Self { name, ranks, coordinate }
    }
}

/// The axes that a tensor is laid out over, outermost first.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mesh {
    /// The axes.
    pub axes: Vec<Axis>,
    /// True if ranks are numbered otherwise than in equal steps along each axis, so that no rank can tell those of the
    /// others from its own lines.
    pub irregular: bool,
}
