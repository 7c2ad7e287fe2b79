//! Operations: of each what it is told, its operands, and how the CPU carries it out.

pub(in crate::kernels) mod adamw;
pub(in crate::kernels) mod apply;
pub(in crate::kernels) mod channels;
pub(in crate::kernels) mod clipping;
pub(in crate::kernels) mod columns;
pub(in crate::kernels) mod convert;
pub(in crate::kernels) mod direction;
pub(in crate::kernels) mod factored;
pub(in crate::kernels) mod factors;
pub(in crate::kernels) mod finite;
pub(in crate::kernels) mod lamb;
pub(in crate::kernels) mod lion;
pub(in crate::kernels) mod means;
pub(in crate::kernels) mod momentum;
pub(in crate::kernels) mod momentum_squares;
pub(in crate::kernels) mod neurons;
pub(in crate::kernels) mod normals;
pub(in crate::kernels) mod rotations;
pub(in crate::kernels) mod signs;
pub(in crate::kernels) mod slices;
pub(in crate::kernels) mod trust;
