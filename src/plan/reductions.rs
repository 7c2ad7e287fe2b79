//! Lowers the programs of buckets whose units are parameters taken whole: sums between two stages are independent of each
//! other and start together, so that those of all such buckets are sent in one message.

use std::collections::BTreeSet;

use super::bucket::Bucket;
use super::ir::{BufferShard, Redistribution, RedistributionKind, Segment, StagePoint, Step, pending};
use crate::error::{Error, Result};
use crate::layout::Reduction;
use crate::program::{BufferId, ProgramOp};

/// The segments of a bucket.
///
/// # Errors
/// `Error::Internal` for what only programs on single matrices can do.
pub(super) fn segments(bucket: &Bucket) -> Result<Vec<Segment>> {
    let held = BufferShard::stored(bucket);
    let mut writer = Writer { bucket, held, segments: Vec::new(), steps: Vec::new(), messages: 0 };
    if let Some(gradient) = bucket.gradient {
        writer.steps.push(Step::Gradients);
        for (round, (axis, how)) in pending(bucket).enumerate() {
            let redistribution = writer.redistribution(gradient, axis, how);
            writer.close((0, round), vec![redistribution]);
        }
    }
    let (mut phase, mut moves) = (0, Vec::new());
    for op in &bucket.program.ops {
        match *op {
            ProgramOp::Redistribute { buffer, .. } => moves.push(buffer),
            ProgramOp::Local { stage, name } => {
                if !moves.is_empty() {
                    phase += 1;
                    writer.sum(phase, &std::mem::take(&mut moves));
                }
                let point = StagePoint {
                    stage,
                    name,
                    whole: false,
                    guarded: false,
                    units: writer.held.units.clone(),
                    gathered: false,
                    base: writer.held.clone(),
                    held: vec![writer.held.clone(); bucket.program.buffers.len()],
                };
                writer.steps.push(Step::Stage(point));
            }
            ProgramOp::SamePlacement { .. }
            | ProgramOp::Release { .. }
            | ProgramOp::WhenDue(_)
            | ProgramOp::Gathered(_) => {
                return Err(Error::Internal(
                    "parameters that are taken whole are not sharded by owner".into(),
                ));
            }
        }
    }
    let Writer { mut segments, steps, .. } = writer;
    segments.push(Segment { steps, redistributions: Vec::new(), at: (usize::MAX, 0) });
    Ok(segments)
}

/// The axes along which a buffer is summed, one after the other.
type Chain = (BufferId, Vec<usize>);

/// The axes of each buffer. Several axes are one, unless other buffers take each of them anyway: then nothing is gained
/// by a third collective.
fn chains(bucket: &Bucket, buffers: &[BufferId]) -> Vec<Chain> {
    let sets: Vec<(BufferId, Vec<usize>)> =
        buffers.iter().map(|&b| (b, bucket.summed(&bucket.program.buffers[b]))).collect();
    let alone = |axis: &usize| sets.iter().any(|(_, set)| set.as_slice() == [*axis]);
    let chain = |set: &Vec<usize>| {
        let joined = bucket.joined.iter().position(|(axes, _)| axes == set);
        match joined {
            Some(at) if !set.iter().all(alone) => vec![bucket.axes.len() + at],
            _ => set.clone(),
        }
    };
    sets.iter().map(|(buffer, set)| (*buffer, chain(set))).collect()
}

struct Writer<'a> {
    bucket: &'a Bucket,
    held: BufferShard,
    segments: Vec<Segment>,
    steps: Vec<Step>,
    messages: usize,
}

impl Writer<'_> {
    fn redistribution(&mut self, buffer: BufferId, axis: usize, how: Reduction) -> Redistribution {
        let message = if how == Reduction::Sum {
            self.messages += 1;
            self.messages
        } else {
            0
        };
        let held = self.held.clone();
        let redistribution = Redistribution {
            buffer,
            axis,
            kind: RedistributionKind::AllReduce { how },
            before: held.clone(),
            after: held,
            message,
            silent: false,
            guarded: false,
        };
        self.steps.push(Step::Pack(redistribution.clone()));
        redistribution
    }

    fn close(&mut self, at: (usize, usize), redistributions: Vec<Redistribution>) {
        let spec = |redistribution: &Redistribution| &self.bucket.program.buffers[redistribution.buffer];
        let next = redistributions
            .iter()
            .filter(|redistribution| redistribution.staged(spec(redistribution)))
            .cloned()
            .map(Step::Unpack)
            .collect();
        let steps = std::mem::replace(&mut self.steps, next);
        self.segments.push(Segment { steps, redistributions, at });
    }

    /// Adds the contributions to these buffers, in as few rounds as their axes allow.
    fn sum(&mut self, phase: usize, buffers: &[BufferId]) {
        let chains = chains(self.bucket, buffers);
        let every: BTreeSet<usize> = chains.iter().flat_map(|(_, axes)| axes.iter().copied()).collect();
        let together = chains.iter().all(|(_, axes)| axes.len() <= 1);
        let rounds: Vec<BTreeSet<usize>> = if together {
            vec![every]
        } else {
            every.into_iter().map(|axis| BTreeSet::from([axis])).collect()
        };
        for (number, axes) in rounds.iter().enumerate() {
            let mut redistributions = Vec::new();
            for (buffer, chain) in &chains {
                let due = chain.iter().filter(|axis| axes.contains(axis));
                redistributions.extend(due.map(|&axis| self.redistribution(*buffer, axis, Reduction::Sum)));
            }
            // Without anything to send the buckets of a group meet for its sum.
            if !redistributions.is_empty() || buffers.iter().any(|&b| self.bucket.program.buffers[b].group) {
                self.close((phase, number), redistributions);
            }
        }
    }
}
