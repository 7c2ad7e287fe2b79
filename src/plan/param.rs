//! A parameter as the plan knows it.

use super::local::{BlockShard, LocalState};
use super::master::MASTER;
use crate::algorithm::{AnyAlgorithm, RADIUS};
use crate::layout::{Layout, ShardingAxes};
use crate::spec::{ParamSpec, Side};
use crate::tensor::Device;

/// A parameter with all that the plan knows of it.
#[derive(Clone, Debug)]
pub struct Param {
    /// Global facts.
    pub spec: ParamSpec,
    /// Layout of the elements over ranks.
    pub layout: Layout,
    /// The shape that is stored here.
    pub local: Vec<usize>,
    /// Index of its group.
    pub group: usize,
    /// Device that it is worked on.
    pub device: Device,
    /// Index of its algorithm in the plan's list.
    pub algorithm: usize,
    /// True if the parameter requires no gradient.
    pub frozen: bool,
    /// Matrices of the parameter, as far as they are stored here.
    pub shards: Vec<BlockShard>,
    /// The side that splits the parameter into blocks such that every process stores whole blocks.
    pub whole: Option<Side>,
    /// States of the parameter: those of its algorithm, then the scales of those that are stored in 8 bits.
    pub states: Vec<LocalState>,
    /// The seed of the random numbers by which it is rounded, if it is.
    pub rounding: Option<u64>,
}

impl Param {
    /// Tests whether the parameter or a state of it is rounded at random.
    #[must_use]
    pub fn is_rounded(&self) -> bool {
        self.rounding.is_some() || self.states.iter().any(|state| state.rounding.is_some())
    }

    /// Position of the low halves of its float32 weights among its states, if it has them.
    #[must_use]
    pub fn master(&self) -> Option<usize> {
        self.states.iter().position(|state| state.spec.role == MASTER)
    }

    /// Position of the norms that its matrices keep among its states; one behind all where none are kept.
    #[must_use]
    pub fn radius(&self) -> usize {
        let radius = self.states.iter().position(|state| state.spec.role == RADIUS);
        radius.unwrap_or(self.states.len())
    }

    /// Rows of the block with most, and columns of that with most.
    #[must_use]
    pub fn largest(&self) -> [usize; 2] {
        let blocks = self.shards.iter().map(|shard| [shard.block.rows, shard.block.cols]);
        blocks.fold([0, 0], |[m, n], [rows, cols]| [m.max(rows), n.max(cols)])
    }

    /// Numbers of processes over which rows and columns of its matrices are sharded.
    #[must_use]
    pub fn num_shards(&self, algorithm: &AnyAlgorithm) -> [usize; 2] {
        [Side::Rows, Side::Cols].map(|side| {
            if algorithm.flat() || self.whole == Some(side) {
                return 1;
            }
            let sides = [algorithm.leading(&self.spec), algorithm.columns(&self.spec)];
            ShardingAxes::of(&self.layout, sides[side.index()]).0.num_shards()
        })
    }
}
