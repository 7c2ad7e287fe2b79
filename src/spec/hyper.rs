//! The live scalars of one group, read from it at every step.

use std::ops::Index;

/// Values in the order of `Algorithm::scalars`. Defaults belong to the Python classes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hyper(pub Vec<f64>);

impl Index<usize> for Hyper {
    type Output = f64;

    fn index(&self, scalar: usize) -> &f64 {
        &self.0[scalar]
    }
}
