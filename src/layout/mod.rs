//! Layouts of parameters over ranks: meshes, placements, regions, and the lowering of placement changes.

mod lower;
mod mesh;
mod placement;
mod region;

pub use lower::{Collective, lower};
pub use mesh::{Axis, Mesh};
pub use placement::{Placement, Reduction};
pub use region::{ShardingAxes, chunk, local_shape, spans};

/// The layout of one parameter: one placement per mesh axis.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Layout {
    /// The mesh; without axes for a plain tensor.
    pub mesh: Mesh,
    /// One placement per axis.
    pub placements: Vec<Placement>,
}

impl Layout {
    /// The axes of more than one rank, with their placements.
    pub fn distributed_axes(&self) -> impl Iterator<Item = (&Axis, Placement)> {
        self.mesh.axes.iter().zip(self.placements.iter().copied()).filter(|(axis, _)| axis.ranks.len() > 1)
    }

    /// Tests whether one of the axes of more than one rank has exactly these ranks.
    #[must_use]
    pub fn lives_on(&self, ranks: &[u64]) -> bool {
        self.distributed_axes().any(|(axis, _)| axis.ranks == ranks)
    }

    /// Marks a gradient that is a sum of the contributions of the ranks of axis `at`, along which the parameter is
    /// replicated.
    pub fn add_contributions(&mut self, at: usize) {
        self.placements[at] = Placement::Partial(Reduction::Sum);
    }

    /// The axes whose ranks hold contributions to a sum.
    pub fn contributions(&self) -> impl Iterator<Item = usize> {
        let sums = |placement: &Placement| *placement == Placement::Partial(Reduction::Sum);
        self.placements.iter().enumerate().filter(move |(_, p)| sums(p)).map(|(at, _)| at)
    }

    /// Tests whether the ranks of one of the axes of more than one rank, exactly these, hold copies of the parameter.
    #[must_use]
    pub fn copied_on(&self, ranks: &[u64]) -> bool {
        let copies = |placement| matches!(placement, Placement::Replicate | Placement::Partial(_));
        self.distributed_axes().any(|(axis, placement)| axis.ranks == ranks && copies(placement))
    }

    /// Tests whether other ranks hold copies of what this one stores.
    #[must_use]
    pub fn has_copies(&self) -> bool {
        let copies = |(_, placement)| matches!(placement, Placement::Replicate | Placement::Partial(_));
        self.distributed_axes().any(copies)
    }

    /// Adds an axis whose ranks hold the same parameter. `averaged` says that their gradients are equal too; if not,
    /// each has its own contribution. An axis of the same ranks that is there already is not added again.
    ///
    /// # Errors
    /// The axis that shares ranks with the new one and is not the same: its ranks hold no copies.
    pub fn replicate(&mut self, axis: Axis, averaged: bool) -> Result<(), Axis> {
        let new = if averaged { Placement::Replicate } else { Placement::Partial(Reduction::Avg) };
        let shared = |own: &&Axis| own.ranks.iter().filter(|rank| axis.ranks.contains(rank)).count() > 1;
        match self.mesh.axes.iter().position(|a| a.ranks == axis.ranks) {
            Some(at) if self.placements[at] == Placement::Replicate => self.placements[at] = new,
            // Work is sharded by owner over the axes that shard it anyway.
            Some(_) if averaged => {}
            Some(at) => return Err(self.mesh.axes[at].clone()),
            None => {
                if let Some(own) = self.mesh.axes.iter().find(shared) {
                    return Err(own.clone());
                }
                self.mesh.axes.push(axis);
                self.placements.push(new);
            }
        }
        Ok(())
    }
}
