//! Warnings about gradients that an algorithm cannot use, once for each parameter.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, PoisonError};

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::kernels;

/// The parameters about whose gradients something was said already, and what is not known yet. Prints as nothing: plans
/// are compared as text.
pub(super) struct Warned {
    record: Mutex<Record>,
    /// Target of the log.
    target: &'static str,
    /// Text of a warning.
    text: &'static str,
}

#[derive(Default)]
struct Record {
    said: BTreeSet<usize>,
    /// Numbers that are being copied to the host; no thread waits for them.
    asked: Vec<Asked>,
}

/// A truth value of a parameter. Memory that it has not come to yet holds anything, also earlier answers, so it comes with
/// a number that no other has.
struct Asked {
    param: usize,
    number: i64,
    answer: Tensor,
}

/// The next number, far from what memory holds by chance.
static NEXT: AtomicI64 = AtomicI64::new(0x2A5C_71E9_0000_0000);

impl std::fmt::Debug for Warned {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        Ok(())
    }
}

impl Warned {
    /// With the target of the log and the text of a warning.
    pub(super) fn new(target: &'static str, text: &'static str) -> Self {
        Self { record: Mutex::default(), target, text }
    }

    /// Warns about a parameter.
    pub(super) fn say(&self, param: usize) {
        self.note(&mut self.record.lock().unwrap_or_else(PoisonError::into_inner).said, param);
    }

    fn note(&self, said: &mut BTreeSet<usize>, param: usize) {
        if said.insert(param) {
            log::warn!(target: self.target, "parameter {param}: {}", self.text);
        }
    }

    /// Warns about a parameter if the flag is false, once the host gets to know it: when `listen` is
    /// called at some later time. A captured step says nothing: no one knows when it runs.
    pub(super) fn ask(&self, param: usize, flag: &Tensor) -> Result<()> {
        if kernels::is_capturing()? {
            return Ok(());
        }
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let signed = flag.f_to_kind(Kind::Int64)?.f_mul_scalar(2)?.f_sub_scalar(1)?.f_mul_scalar(number)?;
        let answer = signed.f_internal_to_copy((Kind::Int64, Device::Cpu), true)?;
        record.asked.push(Asked { param, number, answer });
        Ok(())
    }

    /// Says what has come to be known, but not during a capture, which freeing the memory of an answer could spoil.
    pub(super) fn listen(&self) -> Result<()> {
        if kernels::is_capturing()? {
            return Ok(());
        }
        let record = &mut *self.record.lock().unwrap_or_else(PoisonError::into_inner);
        for Asked { param, number, answer } in std::mem::take(&mut record.asked) {
            match i64::try_from(&answer)? {
                known if known == number => {}
                known if known == -number => self.note(&mut record.said, param),
                _ => record.asked.push(Asked { param, number, answer }),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    fn said(warned: &Warned) -> Vec<usize> {
        warned.record.lock().unwrap().said.iter().copied().collect()
    }

    #[test]
    fn what_is_not_known_yet_is_said_when_it_is() {
        let warned = Warned::new("test", "said");
        for (param, flag) in [(3, true), (5, false), (7, false)] {
            warned.ask(param, &Tensor::from(flag)).unwrap();
        }
        // The answer to one is not there yet.
        let late = {
            let record = &mut warned.record.lock().unwrap().asked;
            let late = record[1].answer.copy();
            let _ = record[1].answer.fill_(77);
            late
        };
        warned.listen().unwrap();
        assert_eq!(said(&warned), [7]);
        warned.listen().unwrap();
        assert_eq!(said(&warned), [7]);
        warned.record.lock().unwrap().asked[0].answer.copy_(&late);
        warned.listen().unwrap();
        assert_eq!(said(&warned), [5, 7]);
        assert!(warned.record.lock().unwrap().asked.is_empty());
    }
}
