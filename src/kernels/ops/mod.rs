//! Operations: of each its scalars and operands, how the CPU carries it out, and its kernels on devices.

#![cfg_attr(not(feature = "cuda"), allow(unused_variables, dead_code))] // used by device builds only

use super::op::{Declared, Kernel};

pub(in crate::kernels) mod apply;
pub(in crate::kernels) mod average;
pub(in crate::kernels) mod channels;
pub(in crate::kernels) mod clipping;
pub(in crate::kernels) mod columns;
pub(in crate::kernels) mod convert;
pub(in crate::kernels) mod declare;
pub(in crate::kernels) mod decode;
pub(in crate::kernels) mod direction;
pub(in crate::kernels) mod divided;
pub(in crate::kernels) mod factored;
pub(in crate::kernels) mod factors;
pub(in crate::kernels) mod finite;
pub(in crate::kernels) mod lamb;
pub(in crate::kernels) mod lerp;
pub(in crate::kernels) mod live;
pub(in crate::kernels) mod means;
pub(in crate::kernels) mod momentum;
pub(in crate::kernels) mod momentum_squares;
pub(in crate::kernels) mod neurons;
pub(in crate::kernels) mod normals;
pub(in crate::kernels) mod scaled;
pub(in crate::kernels) mod signs;
pub(in crate::kernels) mod slices;
pub(in crate::kernels) mod sum_of_squares;
pub(in crate::kernels) mod symmetric;
pub(in crate::kernels) mod trust;
pub(in crate::kernels) mod whiten;

/// Elementwise optimizers by the name of their files: of each the update is in one here, the algorithm in one of
/// `algorithm`.
macro_rules! elementwise_optimizers {
    ($then:ident) => {
        $then! {
            adamw
            ademamix
            lion
        }
    };
}
pub(crate) use elementwise_optimizers;

macro_rules! updates {
    ($($name:ident)*) => {
        $( pub(in crate::kernels) mod $name; )*

        /// Exports of the optimizers' modules.
        pub(in crate::kernels) mod optimizers {
            $( pub use super::$name::*; )*
        }

        /// Operations that are updates.
        const UPDATES: &[Declared] = &[$( $name::DECLARED ),*];
    };
}
elementwise_optimizers!(updates);

/// Operations that several optimizers share, or that are part of a step.
const PASSES: &[Declared] = &[
    apply::DECLARED,
    average::DECLARED,
    convert::DECLARED,
    direction::DECLARED,
    divided::DECLARED,
    factored::DECLARED,
    lamb::DECLARED,
    means::DECLARED,
    momentum::DECLARED,
    momentum_squares::DECLARED,
    sum_of_squares::DECLARED,
    scaled::DECLARED,
    whiten::DECLARED,
];

/// Every declared kernel.
pub(in crate::kernels) fn table() -> impl Iterator<Item = &'static Kernel> {
    UPDATES.iter().chain(PASSES).flat_map(|kernels| kernels.iter().copied())
}
