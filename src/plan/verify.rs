//! Proves of a finished schedule that no buffer is touched while it is in flight.

use std::collections::BTreeMap;

use super::ir::ArenaRange;
use super::schedule::Instr;
use crate::error::{Error, Result};

/// The bytes that each compute and each collective touches.
#[derive(Clone, Debug, Default)]
pub struct Footprints {
    /// Bytes of `Instr::Compute(k)`.
    pub computes: Vec<Vec<ArenaRange>>,
    /// Bytes of `Instr::Issue(k)` until its wait.
    pub collectives: Vec<Vec<ArenaRange>>,
}

/// Checks a schedule.
///
/// # Errors
/// `Error::Internal` that names the instruction: a collective waited for before it was issued, issued twice, never
/// waited for, or whose bytes another instruction touches in flight.
pub fn verify(schedule: &[Instr], prints: &Footprints) -> Result<()> {
    let mut flying: BTreeMap<usize, &[ArenaRange]> = BTreeMap::new();
    let broken = |at: usize, what: &str| Err(Error::Internal(format!("instruction {at} of the plan {what}")));
    for (at, instr) in schedule.iter().enumerate() {
        let touched: &[ArenaRange] = match *instr {
            Instr::Wait(k) => {
                if flying.remove(&k).is_none() {
                    return broken(at, "waits for a collective that is not in flight");
                }
                continue;
            }
            Instr::Compute(k) => prints.computes.get(k).map_or(&[], Vec::as_slice),
            Instr::Issue(k) => prints.collectives.get(k).map_or(&[], Vec::as_slice),
        };
        if flying.values().any(|held| held.iter().any(|a| touched.iter().any(|b| a.overlaps(b)))) {
            return broken(at, "touches a buffer in flight");
        }
        if let Instr::Issue(k) = *instr
            && flying.insert(k, touched).is_some()
        {
            return broken(at, "issues a collective twice");
        }
    }
    if flying.is_empty() { Ok(()) } else { broken(schedule.len(), "leaves a collective in flight") }
}

#[cfg(test)]
mod tests {
    use Instr::{Compute, Issue, Wait};

    use super::*;

    fn prints() -> Footprints {
        let at = |offset| vec![ArenaRange { offset, bytes: 64 }];
        Footprints { computes: vec![at(0), at(64), at(32)], collectives: vec![at(0), at(64)] }
    }

    #[test]
    fn verify_overlapped_buckets_in_own_slots_passes() {
        verify(&[Compute(0), Issue(0), Compute(1), Issue(1), Wait(0), Compute(0), Wait(1)], &prints())
            .unwrap();
    }

    #[test]
    fn verify_each_planted_hazard_is_found() {
        for schedule in [
            vec![Issue(0), Compute(0), Wait(0)],
            vec![Issue(0), Compute(2), Wait(0)],
            vec![Issue(0), Issue(0), Wait(0)],
            vec![Issue(0)],
            vec![Wait(0)],
            vec![Issue(0), Wait(0), Wait(0)],
        ] {
            assert!(verify(&schedule, &prints()).is_err(), "{schedule:?}");
        }
    }
}
