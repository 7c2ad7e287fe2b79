//! Cost of a step: owners, floating-point operations and bytes.

use std::collections::BTreeMap;

use super::ir::Step;
use super::local::LocalState;
use super::owners::Tally;
use super::schedule::Compute;
use super::{Bucket, Plan, Unit};

/// Floating-point operations of one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Work {
    /// Operations of this process on the shards that it stores.
    pub local: f64,
    /// Operations of this process on the whole matrices that it takes.
    pub whole: f64,
    /// Operations on whole matrices of the process that takes most.
    pub whole_most: f64,
    /// Mean over the processes of the operations on whole matrices.
    pub whole_mean: f64,
}

/// Cost of one compute instruction on this process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ComputeCost {
    /// Floating-point operations on the shards that it stores.
    pub local: f64,
    /// Floating-point operations on the whole matrices that it takes.
    pub whole: f64,
    /// Bytes of parameters, gradients, states and messages that it reads and writes.
    pub bytes: f64,
}

impl Plan {
    /// The cost of each compute instruction. The work of a bucket on whole matrices is in equal parts that of the stages
    /// that take whole matrices, everything else that of the others.
    #[must_use]
    pub fn costs(&self) -> Vec<ComputeCost> {
        let totals: Vec<ComputeCost> = self.buckets.iter().map(|bucket| self.bucket_cost(bucket)).collect();
        let counts = |compute: &Compute| {
            let stages = compute.steps.iter().filter_map(|step| match step {
                Step::Stage(point) => Some(point.whole || point.gathered),
                _ => None,
            });
            stages.fold(
                [0_usize, 0],
                |[local, whole], is_whole| {
                    if is_whole { [local, whole + 1] } else { [local + 1, whole] }
                },
            )
        };
        let each: Vec<[usize; 2]> = self.computes.iter().map(counts).collect();
        let mut sums = vec![[0_usize, 0]; self.buckets.len()];
        for (compute, [local, whole]) in self.computes.iter().zip(&each) {
            let sum = &mut sums[compute.bucket];
            *sum = [sum[0] + local, sum[1] + whole];
        }
        let cost = |(compute, [local, whole]): (&Compute, &[usize; 2])| {
            let (total, sum) = (&totals[compute.bucket], sums[compute.bucket]);
            let local = share(*local, sum[0]);
            // Without stages of its own the work on whole matrices is that of all.
            let whole = if sum[1] == 0 { local } else { share(*whole, sum[1]) };
            ComputeCost {
                local: total.local * local,
                whole: total.whole * whole,
                bytes: total.bytes * local + self.message_bytes(compute),
            }
        };
        self.computes.iter().zip(&each).map(cost).collect()
    }

    /// Bytes of the messages that a compute instruction packs or unpacks.
    #[allow(clippy::cast_precision_loss)] // bytes of a message
    fn message_bytes(&self, compute: &Compute) -> f64 {
        let count = compute.steps.iter().filter(|s| matches!(s, Step::Pack(_) | Step::Unpack(_))).count();
        let own = self.transfers.iter().filter(|t| t.bucket == compute.bucket);
        let (mut bytes, mut all) = (0.0, 0_usize);
        for transfer in own {
            bytes += (transfer.send.bytes + transfer.recv.bytes) as f64;
            all += 2;
        }
        2.0 * bytes * share(count, all)
    }

    /// The cost of all of a bucket.
    #[allow(clippy::cast_precision_loss)] // bytes of parameters
    fn bucket_cost(&self, bucket: &Bucket) -> ComputeCost {
        let me: Vec<usize> = bucket.takers().iter().map(|&a| bucket.axes[a].axis.coordinate).collect();
        let mut cost = ComputeCost::default();
        for unit in &bucket.units {
            let spec = &self.params[unit.param].spec;
            let (local, whole) = self.unit_flops(bucket, unit);
            cost.local += local;
            if bucket.owner_axes.is_empty() || unit.owner.starts_with(&me) {
                cost.whole += whole;
            }
            let states = self.params[unit.param].states.iter().map(LocalState::bytes).sum::<usize>();
            let stored = self.params[unit.param].local.iter().product::<usize>();
            let states = states as f64 * share(unit.shard.local.numel(), stored);
            // Parameters and states are read and written, gradients read.
            cost.bytes += 3.0 * (unit.shard.local.numel() * spec.dtype.bytes()) as f64 + 2.0 * states;
        }
        cost
    }

    /// Operations on what this process stores of a unit, and of each process that takes it.
    fn unit_flops(&self, bucket: &Bucket, unit: &Unit) -> (f64, f64) {
        let spec = &self.params[unit.param].spec;
        let algorithm = &self.algorithms[bucket.algorithm];
        let about = algorithm.describe(spec, &[unit.shard.block], bucket.shape.num_shards);
        let all = if bucket.whole_parameter { spec.numel() } else { unit.shard.block.numel() };
        let (local, whole) = bucket.flops(&about);
        (local * share(unit.shard.local.numel(), all), whole)
    }

    /// The work of a step.
    #[must_use]
    pub fn work(&self) -> Work {
        let mut work = Work::default();
        let mut taken: BTreeMap<_, (Vec<f64>, usize)> = BTreeMap::new();
        for bucket in &self.buckets {
            let tally = Tally::of(bucket);
            let me: Vec<usize> = bucket.owner_axes.iter().map(|&a| bucket.axes[a].axis.coordinate).collect();
            for unit in &bucket.units {
                let (local, whole) = self.unit_flops(bucket, unit);
                work.local += local;
                if bucket.owner_axes.is_empty() {
                    for total in [&mut work.whole, &mut work.whole_most, &mut work.whole_mean] {
                        *total += whole;
                    }
                    continue;
                }
                let none = || (vec![0.0; tally.count()], tally.number(&me));
                let (loads, _) = taken.entry(tally.key.clone()).or_insert_with(none);
                tally.add(loads, &unit.owner, whole);
            }
        }
        for (loads, me) in taken.values() {
            work.whole += loads[*me];
            work.whole_most += loads.iter().fold(0.0_f64, |a, &b| a.max(b));
            #[allow(clippy::cast_precision_loss)] // a number of processes
            let count = loads.len() as f64;
            work.whole_mean += loads.iter().sum::<f64>() / count;
        }
        work
    }

    /// Owners by parameter, where whole matrices are sharded by owner: "axis=position,..." of each.
    #[must_use]
    pub fn owners(&self) -> BTreeMap<usize, String> {
        let mut owners: BTreeMap<usize, Vec<String>> = BTreeMap::new();
        for bucket in self.buckets.iter().filter(|b| !b.owner_axes.is_empty()) {
            for unit in &bucket.units {
                let owner = owner(bucket, &unit.owner);
                let list = owners.entry(unit.param).or_default();
                if !list.contains(&owner) {
                    list.push(owner);
                }
            }
        }
        owners.into_iter().map(|(param, list)| (param, list.join(" "))).collect()
    }

    /// The way in which the matrices of a parameter are worked on, where there are several.
    #[must_use]
    pub fn routes(&self) -> BTreeMap<usize, String> {
        let buckets = self.buckets.iter().filter(|b| !b.alternatives.is_empty());
        buckets.flat_map(|b| b.units.iter().map(|unit| (unit.param, b.route(&b.gathered)))).collect()
    }

    /// Bytes by parameter that this process gives to collectives in a step without guarded transfers: its bucket's, in
    /// equal shares.
    #[must_use]
    pub fn wire_bytes(&self) -> BTreeMap<usize, usize> {
        let mut wire = BTreeMap::new();
        let mut by_bucket = vec![0; self.buckets.len()];
        let shares = self.transfers.iter().filter(|t| !t.guarded).flat_map(|t| &t.shares);
        shares.for_each(|(bucket, bytes)| by_bucket[*bucket] += bytes);
        for (bucket, total) in self.buckets.iter().zip(by_bucket) {
            let count = bucket.units.len();
            for (i, unit) in bucket.units.iter().enumerate() {
                *wire.entry(unit.param).or_insert(0) += total * (i + 1) / count - total * i / count;
            }
        }
        wire
    }
}

fn owner(bucket: &Bucket, places: &[usize]) -> String {
    let name = |(&axis, at): (&usize, &usize)| format!("{}={at}", bucket.axes[axis].axis.name);
    bucket.owner_axes.iter().zip(places).map(name).collect::<Vec<_>>().join(",")
}

#[allow(clippy::cast_precision_loss)] // a fraction
fn share(part: usize, whole: usize) -> f64 {
    part as f64 / whole.max(1) as f64
}
