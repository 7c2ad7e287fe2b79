//! The plan in words.

use std::fmt::Write;

use sha2::{Digest, Sha256};

use super::bucket::Alternative;
use super::ir::Step;
use super::{ArenaRange, Bucket, Compute, Instr, Param, Plan, Transfer};
use crate::layout::{Collective, Layout, Reduction};
use crate::spec::Side;
use crate::tensor::Device;

impl Plan {
    /// The schedule, readable: buckets, then instructions, then memory.
    #[must_use]
    pub fn explain(&self) -> String {
        let mut text = String::new();
        for [bucket, algorithm, parameters, group, communication] in self.bucket_cells() {
            let _ = writeln!(
                text,
                "bucket {bucket}  {algorithm}  {parameters} · group {group} · {communication}"
            );
        }
        for [at, instruction, work, memory] in self.instruction_cells() {
            let gap = match (instruction.as_str(), memory.is_empty()) {
                (_, true) => "",
                ("compute", _) => "  in ",
                _ => "  ",
            };
            let _ = writeln!(text, "{at:>3}  {instruction:<7}  {work}{gap}{memory}");
        }
        let part = |(device, range): &(Device, ArenaRange)| match self.arena.parts.len() {
            1 => bytes(range.bytes),
            _ => format!("{} on {device}", bytes(range.bytes)),
        };
        let parts: Vec<String> = self.arena.parts.iter().map(part).collect();
        let _ = writeln!(text, "arena {}, hazards 0", parts.join(", "));
        text
    }

    /// Number, algorithm, parameters, group and communication of each bucket.
    #[must_use]
    pub fn bucket_cells(&self) -> Vec<[String; 5]> {
        let cells = |(i, bucket): (usize, &Bucket)| {
            let algorithm = &self.algorithms[bucket.algorithm];
            let shape = if algorithm.flat() {
                let elements: usize = bucket.units.iter().map(|u| u.shard.local.numel()).sum();
                format!("{} tensors, {elements} elements", bucket.units.len())
            } else {
                format!("{} × [{}, {}]", bucket.units.len(), bucket.shape.rows, bucket.shape.cols)
            };
            [
                i.to_string(),
                algorithm.name().into(),
                format!("{shape} {}{}", bucket.shape.param.name(), self.place(bucket)),
                bucket.group.to_string(),
                about(bucket),
            ]
        };
        self.buckets.iter().enumerate().map(cells).collect()
    }

    /// The device of a bucket, where there are several.
    fn place(&self, bucket: &Bucket) -> String {
        if self.arena.parts.len() > 1 { format!(" on {}", bucket.shape.device) } else { String::new() }
    }

    /// Number, kind, work and memory of each instruction.
    #[must_use]
    pub fn instruction_cells(&self) -> Vec<[String; 4]> {
        let cells = |(at, instr): (usize, &Instr)| {
            let (kind, [work, memory]) = match instr {
                Instr::Compute(k) => ("compute", self.compute(&self.computes[*k])),
                Instr::Issue(k) => {
                    let [name, sent] = transfer(&self.transfers[*k]);
                    ("issue", [format!("c{k} {name}"), sent])
                }
                Instr::Wait(k) => ("wait", [format!("c{k}"), String::new()]),
            };
            [at.to_string(), kind.into(), work, memory]
        };
        self.schedule.iter().enumerate().map(cells).collect()
    }

    /// Stages of an instruction, and the buffers that it works in.
    fn compute(&self, compute: &Compute) -> [String; 2] {
        let bucket = &self.buckets[compute.bucket];
        let buffer =
            |redistribution: &super::Redistribution| bucket.program.buffers[redistribution.buffer].name;
        let words: Vec<String> = compute
            .steps
            .iter()
            .map(|step| match step {
                Step::Gradients => "gradients".into(),
                Step::Load => "load".into(),
                Step::Store => "store".into(),
                Step::Pack(redistribution) => format!("pack({})", buffer(redistribution)),
                Step::Unpack(redistribution) => format!("unpack({})", buffer(redistribution)),
                Step::Stage(point) => {
                    let taken = (point.whole || point.gathered) && bucket.distributed();
                    let count = taken.then(|| point.units.len().to_string());
                    let guard = point.guarded.then(|| "when due".to_owned());
                    let notes: Vec<String> = count.into_iter().chain(guard).collect();
                    if notes.is_empty() {
                        point.name.into()
                    } else {
                        format!("{}[{}]", point.name, notes.join(", "))
                    }
                }
            })
            .collect();
        let text = format!("b{}.{}", compute.bucket, words.join("+"));
        if bucket.distributed() {
            return [text, String::new()];
        }
        let places = &self.arena.places[compute.bucket];
        let buffers: Vec<String> = bucket
            .program
            .buffers
            .iter()
            .zip(places)
            .map(|(b, place)| format!("{} {} {}", b.name, b.dtype.name(), bytes(place.bytes)))
            .collect();
        [text, buffers.join(", ")]
    }

    /// Facts that the ranks of an axis must agree on, one line for each parameter that lives on it; those of all
    /// parameters when `ranks` is empty. Positions of the ranks are left out.
    #[must_use]
    pub fn agreed(&self, ranks: &[u64]) -> Vec<String> {
        let on_axis = |planned: &&Param| ranks.is_empty() || planned.layout.lives_on(ranks);
        let line = |planned: &Param| {
            let states: Vec<_> = planned.states.iter().map(|s| (s.spec.role, s.spec.dtype)).collect();
            format!(
                "{}: parameter {} of group {}, shape {:?}, {}, {}, {:?}, states {states:?}, transposed {:?}{}",
                planned.spec.name,
                planned.spec.index,
                planned.group,
                planned.spec.shape,
                planned.spec.dtype.name(),
                placements(&planned.layout),
                self.algorithms[planned.algorithm],
                planned.spec.transposed,
                if planned.frozen { ", frozen" } else { "" },
            )
        };
        let mut lines: Vec<String> = self.params.iter().filter(on_axis).map(line).collect();
        lines.extend(self.order(ranks));
        lines
    }

    /// The collectives of an axis in the order in which they start; all-to-alls without their sizes, which differ from
    /// rank to rank. None when `ranks` is empty: other axes may have other ones elsewhere.
    fn order(&self, ranks: &[u64]) -> impl Iterator<Item = String> {
        let issued = self.schedule.iter().filter_map(|instr| match instr {
            Instr::Issue(k) => Some(&self.transfers[*k]),
            _ => None,
        });
        let on = move |t: &&Transfer| !ranks.is_empty() && ranks.iter().all(|r| t.axis.ranks.contains(r));
        issued.filter(on).enumerate().map(|(n, t)| {
            let bytes = match t.collective {
                Collective::AllToAll | Collective::ReduceScatter(_) => String::new(),
                _ => format!(", {}", bytes(t.send.bytes)),
            };
            format!("collective {n} of axis {}: {:?} of {}{bytes}", t.axis.name, t.collective, t.buffer)
        })
    }

    /// SHA-256 of what all ranks must agree on, in hexadecimal.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        let lines = self.agreed(&[]).join("\n");
        Sha256::digest(lines.as_bytes()).iter().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

/// The placements of a layout, with the axes' names and sizes.
#[must_use]
pub fn placements(layout: &Layout) -> String {
    if layout.placements.is_empty() {
        return "one device".into();
    }
    let words: Vec<String> = layout
        .mesh
        .axes
        .iter()
        .zip(&layout.placements)
        .map(|(axis, placement)| format!("{}:{placement:?}/{}", axis.name, axis.ranks.len()))
        .collect();
    words.join(", ")
}

/// Phrase for how a bucket's work is shared.
fn about(bucket: &Bucket) -> String {
    if !bucket.distributed() {
        return "no communication".into();
    }
    let mut words: Vec<String> = bucket
        .axes
        .iter()
        .map(|axis| {
            let what = match (axis.shards, axis.pending) {
                (Some(Side::Rows), _) => "rows",
                (Some(Side::Cols), _) => "columns",
                (None, _) if axis.stack => "leading dimensions",
                (None, Some(Reduction::Avg)) => "replicas, gradients not averaged",
                (None, Some(Reduction::Sum)) => "replicas, gradients not added up",
                (None, None) => "replicas",
            };
            format!("{} {what}/{}", axis.axis.name, axis.axis.ranks.len())
        })
        .collect();
    if !bucket.owner_axes.is_empty() {
        let names: Vec<&str> = bucket.owner_axes.iter().map(|&a| bucket.axes[a].axis.name.as_str()).collect();
        words.push(format!("whole matrices over ({})", names.join(", ")));
    }
    if !bucket.alternatives.is_empty() {
        words.push(routes(bucket));
    }
    words.join(" · ")
}

/// The axes that a bucket gathers, with the bytes that a process sends on average, and those of the other ways.
fn routes(bucket: &Bucket) -> String {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // bytes
    let sent = |way: &Alternative| bytes(bucket.sent(way).iter().map(|(_, n)| n).sum::<f64>() as usize);
    let (chosen, others): (Vec<_>, Vec<_>) =
        bucket.alternatives.iter().partition(|way| way.gathered == bucket.gathered);
    let others = others.iter().map(|way| format!("{} {}", bucket.route(&way.gathered), sent(way)));
    let chosen = chosen.first().map_or_else(String::new, |way| sent(way));
    format!("{} {chosen} (not {})", bucket.route(&bucket.gathered), others.collect::<Vec<_>>().join(", "))
}

/// Name of a collective, and what it sends over which axis.
fn transfer(transfer: &Transfer) -> [String; 2] {
    let name = match transfer.collective {
        Collective::AllToAll => "all_to_all",
        Collective::ReduceScatter(_) => "reduce_scatter",
        Collective::AllGather => "all_gather",
        Collective::AllReduce(Reduction::Sum) => "all_reduce",
        Collective::AllReduce(Reduction::Avg) => "all_reduce (mean)",
        Collective::Nothing | Collective::Slice => "nothing",
    };
    let sent = format!(
        "{}  b{}.{}  {} per rank{}",
        transfer.axis.name,
        transfer.bucket,
        transfer.buffer,
        bytes(transfer.send.bytes),
        if transfer.guarded { ", when due" } else { "" }
    );
    [name.into(), sent]
}

/// A number of bytes with a unit.
#[allow(clippy::cast_precision_loss)] // three digits are printed
fn bytes(n: usize) -> String {
    match n {
        0..1_000 => format!("{n} B"),
        1_000..1_000_000 => format!("{:.1} kB", n as f64 / 1e3),
        _ => format!("{:.1} MB", n as f64 / 1e6),
    }
}
