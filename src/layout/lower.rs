//! The table that turns a placement change along one axis into a collective.

use super::{Placement, Reduction};

/// Collective that a placement change costs along one axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// No data moves.
    Nothing,
    /// Each rank slices its part out of what it has.
    Slice,
    /// Contributions are reduced, every rank gets the result.
    AllReduce(Reduction),
    /// Contributions are reduced, every rank gets its part.
    ReduceScatter(Reduction),
    /// Every rank gets all parts.
    AllGather,
    /// Every rank sends a part to every other.
    AllToAll,
}

/// The collective that changes `from` into `to` along an axis of `ranks` ranks; `None` where no collective does it
/// (a partial value cannot be produced, and one kind of contribution is not another).
#[must_use]
pub fn lower(from: Placement, to: Placement, ranks: usize) -> Option<Collective> {
    use Placement::{OwnerSharded, Partial, Replicate, Shard, Strided};
    if ranks <= 1 || from == to {
        return Some(Collective::Nothing);
    }
    match (from, to) {
        (Partial(how), Replicate) => Some(Collective::AllReduce(how)),
        (Partial(how), Shard(_) | Strided(_) | OwnerSharded) => Some(Collective::ReduceScatter(how)),
        (Shard(_) | Strided(_) | OwnerSharded, Replicate) => Some(Collective::AllGather),
        (Shard(_) | Strided(_) | OwnerSharded, Shard(_) | Strided(_) | OwnerSharded) => {
            Some(Collective::AllToAll)
        }
        (Replicate, Shard(_) | Strided(_) | OwnerSharded) => Some(Collective::Slice),
        (_, Partial(_)) | (Replicate, Replicate) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Placement; 7] = [
        Placement::Replicate,
        Placement::Shard(0),
        Placement::Shard(1),
        Placement::Strided(0),
        Placement::OwnerSharded,
        Placement::Partial(Reduction::Sum),
        Placement::Partial(Reduction::Avg),
    ];

    #[test]
    fn lower_one_rank_any_change_is_nothing() {
        for from in ALL {
            for to in ALL {
                assert_eq!(lower(from, to, 1), Some(Collective::Nothing));
            }
        }
    }

    #[test]
    fn lower_several_ranks_equals_the_table() {
        use Placement::{Partial, Replicate, Shard};
        let sum = Partial(Reduction::Sum);
        assert_eq!(lower(sum, Replicate, 4), Some(Collective::AllReduce(Reduction::Sum)));
        assert_eq!(lower(sum, Shard(1), 4), Some(Collective::ReduceScatter(Reduction::Sum)));
        assert_eq!(lower(Shard(0), Replicate, 2), Some(Collective::AllGather));
        assert_eq!(lower(Shard(0), Shard(1), 2), Some(Collective::AllToAll));
        assert_eq!(lower(Replicate, Shard(1), 2), Some(Collective::Slice));
        assert_eq!(lower(Shard(1), Shard(1), 8), Some(Collective::Nothing));
        assert_eq!(lower(Shard(1), Placement::OwnerSharded, 8), Some(Collective::AllToAll));
        assert_eq!(lower(Placement::OwnerSharded, Replicate, 8), Some(Collective::AllGather));
        assert_eq!(lower(sum, Placement::OwnerSharded, 8), Some(Collective::ReduceScatter(Reduction::Sum)));
        assert_eq!(lower(Replicate, sum, 2), None);
        assert_eq!(lower(sum, Partial(Reduction::Avg), 2), None);
    }
}
