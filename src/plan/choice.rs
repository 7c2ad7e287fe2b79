//! Chooses for each axis whether matrices remain sharded while a program runs or are gathered at owners.

use super::bucket::{Alternative, Bucket};
use super::ir::{BufferShard, Redistribution, RedistributionKind};
use super::redistribute::segments;
use super::workspace::{self, trial};
use super::{GroupSpec, Param};
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::program::BufferSpec;
use crate::spec::{DimSharding, Options};

/// The axes that a group asks to gather.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Choice {
    /// The axes that send least.
    Auto,
    /// These, by name, with the ones that shard the same side inside of them.
    Named(Vec<String>),
    /// All that shard matrices.
    All,
}

impl Choice {
    /// Reads the key `route` of a group.
    pub(super) fn of_group(options: &Options) -> Result<Self> {
        if !options.has("route") {
            return Ok(Self::Auto); // the group's algorithm has no choice
        }
        let words = options.words("route")?;
        Ok(match words.as_slice() {
            [word] if word == "auto" => Self::Auto,
            [word] if word == "gather" => Self::All,
            [word] if word == "keep" => Self::Named(Vec::new()),
            _ => Self::Named(words),
        })
    }

    /// Refuses names of axes that none of these layouts has, if any is distributed.
    pub(super) fn check<'a>(&self, layouts: impl Iterator<Item = &'a Layout>) -> Result<()> {
        let Self::Named(names) = self else { return Ok(()) };
        let mut known: Vec<&str> = layouts
            .flat_map(|layout| layout.distributed_axes().map(|(axis, _)| axis.name.as_str()))
            .collect();
        known.sort_unstable();
        known.dedup();
        match names.iter().find(|name| !known.contains(&name.as_str())) {
            Some(name) if !known.is_empty() => Err(Error::Value(format!(
                "route names the axis '{name}', but the parameters of the group have the axes {}",
                known.join(", ")
            ))),
            _ => Ok(()),
        }
    }

    fn allows(&self, bucket: &Bucket, gathered: &[usize]) -> bool {
        match self {
            Self::Auto => true,
            Self::All => gathered.len() == sharding(bucket).count(),
            Self::Named(names) => {
                // The fewest that have all of these: candidates come in the order of their number.
                let wanted = |a: &usize| names.contains(&bucket.axes[*a].axis.name);
                sharding(bucket).filter(wanted).all(|a| gathered.contains(&a))
            }
        }
    }
}

/// The choices of all groups.
///
/// # Errors
/// `Error::Value` for what `route` cannot be.
pub(super) fn of_groups(groups: &[GroupSpec], params: &[Param]) -> Result<Vec<Choice>> {
    let choices = groups.iter().map(|group| Choice::of_group(&group.options)).collect::<Result<Vec<_>>>()?;
    for (group, choice) in choices.iter().enumerate() {
        choice.check(params.iter().filter(|p| p.group == group).map(|p| &p.layout))?;
    }
    Ok(choices)
}

/// The axes that shard matrices, the inner ones of each side first.
fn sharding(bucket: &Bucket) -> impl Iterator<Item = usize> + '_ {
    bucket.sides.iter().flat_map(|(_, axes)| axes.iter().rev().copied())
}

/// The sets of axes that can be gathered, the smallest first: of each side from the inside.
#[must_use]
fn candidates(bucket: &Bucket) -> Vec<Vec<usize>> {
    let [rows, cols] = [0, 1].map(|d| bucket.sides[d].1.iter().rev().copied().collect::<Vec<_>>());
    let mut all = Vec::new();
    for inner_rows in 0..=rows.len() {
        for inner_cols in 0..=cols.len() {
            all.push([&rows[..inner_rows], &cols[..inner_cols]].concat());
        }
    }
    all.sort_by_key(Vec::len);
    all
}

/// Returns the way that sends least of those that the group allows. Ways that need more than `most` bytes of workspace for one
/// matrix come last. `make` gives the bucket that gathers some axes. Keeping goes first where nothing is gained, and the
/// numbers depend on sizes alone: all processes choose alike.
///
/// # Errors
/// Whatever `make` returns.
pub(super) fn choose(
    keep: Bucket,
    choice: &Choice,
    most: Option<usize>,
    make: impl Fn(Vec<usize>) -> Result<Bucket>,
) -> Result<Bucket> {
    let mut alternatives = Vec::new();
    let mut best: Option<((bool, f64), Bucket)> = None;
    for gathered in candidates(&keep) {
        let candidate = if gathered.is_empty() { keep.clone() } else { make(gathered.clone())? };
        let bytes = bytes_sent(&candidate)?;
        let exceeds = match most {
            Some(most) => workspace::bytes(&candidate, 1)? > most,
            None => false,
        };
        let cost = (exceeds, bytes.iter().sum());
        let allowed = choice.allows(&keep, &gathered);
        let better = match (&best, choice) {
            (None, _) => true,
            (Some((least, _)), Choice::Auto) => cost < *least,
            _ => false,
        };
        alternatives.push(Alternative { gathered, bytes });
        if allowed && better {
            best = Some((cost, candidate));
        }
    }
    let mut chosen = best.map_or(keep, |(_, bucket)| bucket);
    chosen.alternatives = alternatives;
    Ok(chosen)
}

/// Bytes that a process sends along each axis for a matrix, on average, by the collectives that the program becomes.
fn bytes_sent(bucket: &Bucket) -> Result<Vec<f64>> {
    let trial = trial(bucket, usize::MAX);
    let mut sent = vec![0.0; trial.axes.len()];
    for segment in segments(&trial)? {
        let moved = segment.redistributions.iter().filter(|r| !r.guarded);
        moved.for_each(|r| sent[r.axis] += sent_by(&trial, r));
    }
    Ok(sent)
}

/// Bytes that a process sends for one matrix in a redistribution, on average.
#[allow(clippy::cast_precision_loss)] // a number of ranks
fn sent_by(bucket: &Bucket, redistribution: &Redistribution) -> f64 {
    let spec = &bucket.program.buffers[redistribution.buffer];
    let ranks = bucket.axis(redistribution.axis).ranks.len() as f64;
    let times = match redistribution.kind {
        RedistributionKind::ToOwner { .. }
        | RedistributionKind::FromOwner { .. }
        | RedistributionKind::ReduceToOwner { .. } => (ranks - 1.0) / ranks,
        RedistributionKind::GatherOwned { .. } | RedistributionKind::AllGather { .. } => ranks - 1.0,
        RedistributionKind::AllReduce { .. } => 2.0 * (ranks - 1.0) / ranks,
        RedistributionKind::Slice => 0.0,
    };
    times * mean_area(bucket, spec, &redistribution.before) * redistribution.dtype(spec).bytes() as f64
}

/// Elements that a process holds of a matrix, on average over processes and matrices.
#[allow(clippy::cast_precision_loss)] // sizes of matrices
fn mean_area(bucket: &Bucket, spec: &BufferSpec, held: &BufferShard) -> f64 {
    let ranks = |axes: &[usize]| axes.iter().map(|&a| bucket.axis(a).ranks.len() as f64).product::<f64>();
    let length = |d: usize| {
        let whole = [spec.rows, spec.cols][d] as f64;
        match spec.sharding[d] {
            DimSharding::LikeParam(side) | DimSharding::Even(side) => {
                whole / ranks(&bucket.sides[side.index()].1[..held.depth[side.index()]])
            }
            _ => whole,
        }
    };
    length(0) * length(1) / ranks(&bucket.owner_axes[..held.taken])
}
