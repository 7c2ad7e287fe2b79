//! The state Q of Dion: shape and sharding of its matrices.

use super::Dion;
use crate::spec::{Block, DimSharding, Init, ParamSpec, Share, Side, StateSpec};

impl Dion {
    /// Q: for each matrix the short side of the oriented matrix by the rank.
    ///
    /// Blocks of a parameter that is sharded along that side share the rows of one matrix, as wide as the largest rank;
    /// those that are sharded along the other one have each their own, behind the dimensions that number the matrices.
    pub(super) fn q(&self, p: &ParamSpec, blocks: &[Block]) -> StateSpec {
        let (lead, columns) = (self.view.leading(p), self.view.columns(p));
        let transposed = p.oriented(blocks.iter().copied());
        let width = blocks.iter().map(|b| self.rank(b.rows, b.cols)).max().unwrap_or(0);
        let (short, short_dims, long_dim) = if transposed {
            (Side::Rows, lead..columns, columns)
        } else {
            (Side::Cols, columns..p.shape.len(), lead)
        };
        let is_split = self.view.splits().is_some_and(|side| side != short);
        let mut shape: Vec<usize> = p.shape[..lead].to_vec();
        let mut sharding: Vec<_> = (0..lead).map(DimSharding::LikeParam).collect();
        if is_split {
            shape.push(self.view.per_matrix(p, blocks.len()));
            sharding.push(DimSharding::Replicated);
        }
        shape.extend(short_dims.clone().map(|dim| p.shape[dim]));
        sharding.extend(short_dims.map(DimSharding::LikeParam));
        shape.push(width);
        // Its columns belong to nothing of the parameter. Where blocks have different ranks, all processes have all.
        sharding.push(if self.view.alike() { DimSharding::Even(long_dim) } else { DimSharding::Replicated });
        StateSpec {
            role: "Q",
            shape,
            dtype: self.q_dtype.or(self.storage.dtype()).unwrap_or(p.dtype.arithmetic()),
            init: Init::Normal { seed: self.seed },
            sharding,
            moment: None,
            quantized: None,
            on_host: false,
            share: if is_split {
                Share::Block
            } else {
                Share::Side { side: short, leading: lead, column: false }
            },
        }
    }
}
