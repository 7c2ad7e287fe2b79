//! The plan in words.

use std::fmt::Write;

use sha2::{Digest, Sha256};

use super::{Instr, Plan};

impl Plan {
    /// The schedule, readable: buckets, then instructions, then memory.
    #[must_use]
    pub fn explain(&self) -> String {
        let mut text = String::new();
        for (i, bucket) in self.buckets.iter().enumerate() {
            let algorithm = &self.algorithms[bucket.algorithm];
            let shape = if algorithm.flat() {
                let elements: usize = bucket.units.iter().map(|u| u.block.numel()).sum();
                format!("{} tensors, {elements} elements", bucket.units.len())
            } else {
                format!("{} × [{}, {}]", bucket.units.len(), bucket.shape.rows, bucket.shape.cols)
            };
            let _ = writeln!(
                text,
                "bucket {i}  {}  {shape} {} · group {} · no communication",
                algorithm.name(),
                bucket.shape.param.name(),
                bucket.group
            );
        }
        for (at, instr) in self.schedule.iter().enumerate() {
            if let Instr::Compute(k) = instr {
                let compute = &self.computes[*k];
                let stages: Vec<&str> = compute.stages.iter().map(|(_, name)| *name).collect();
                let _ = write!(text, "{at:>3}  compute  b{}.{}", compute.bucket, stages.join("+"));
                let buffers: Vec<String> = self.buckets[compute.bucket]
                    .program
                    .buffers
                    .iter()
                    .zip(&self.arena.places[compute.bucket])
                    .map(|(b, place)| format!("{} {} {}", b.name, b.dtype.name(), bytes(place.bytes)))
                    .collect();
                let _ =
                    writeln!(text, "{}{}", if buffers.is_empty() { "" } else { "  in " }, buffers.join(", "));
            }
        }
        let _ = writeln!(text, "arena {}, hazards 0", bytes(self.arena.bytes));
        text
    }

    /// SHA-256 of the printed plan, in hexadecimal: equal on ranks whose plans are.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        Sha256::digest(self.explain().as_bytes()).iter().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
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
