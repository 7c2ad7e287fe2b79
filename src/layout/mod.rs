//! Where the elements of a parameter live: meshes, placements, regions, and the lowering of placement changes.

mod lower;
mod mesh;
mod placement;
mod region;

pub use lower::{Collective, lower};
pub use mesh::{Axis, Mesh};
pub use placement::{Placement, Reduction};
pub use region::{chunk, local_shape};

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
}
