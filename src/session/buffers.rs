//! Positions of the matrices of a bucket in its buffers.

use crate::algorithm::stage::MatrixShard;
use crate::plan::{Bucket, BufferShard, StagePoint, Step};
use crate::program::BufferSpec;

/// The matrices of every buffer for a step, if it is a stage.
pub(super) fn stage_shards(bucket: &Bucket, step: &Step) -> Vec<Vec<MatrixShard>> {
    let Step::Stage(point) = step else { return Vec::new() };
    let buffers = bucket.program.buffers.iter().zip(&point.held);
    buffers
        .map(|(spec, held)| if spec.shared { Vec::new() } else { shards(bucket, spec, held, point) })
        .collect()
}

/// The matrices of a buffer by position among the units of a stage, which all are held.
fn shards(bucket: &Bucket, spec: &BufferSpec, held: &BufferShard, point: &StagePoint) -> Vec<MatrixShard> {
    let units = &point.units;
    let mut offset = 0;
    let mut shards = Vec::with_capacity(units.len());
    for (at, unit) in bucket.units[held.units.clone()].iter().enumerate() {
        let spans = [0, 1].map(|d| bucket.span(unit, spec, d, held.depth));
        let shape = [0, 1].map(|d| spans[d].len());
        if units.contains(&(held.units.start + at)) {
            let declared_cols = bucket.span(unit, spec, 1, point.base.depth);
            shards.push(MatrixShard {
                offset,
                shape,
                origin: [spans[0].start, spans[1].start],
                declared_cols,
            });
        }
        offset += shape[0] * shape[1];
    }
    shards
}
