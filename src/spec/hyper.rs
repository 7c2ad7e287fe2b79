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

impl Hyper {
    /// All of them.
    ///
    /// # Panics
    /// Panics if the algorithm has another number of scalars.
    #[must_use]
    pub fn all<const N: usize>(&self) -> [f64; N] {
        assert_eq!(self.0.len(), N, "scalars of an algorithm");
        std::array::from_fn(|scalar| self.0[scalar])
    }
}
