//! Checks that parameters and states that a step writes share no memory, with each other or with a gradient.

use super::tensors::{BoundParam, BoundTensor};
use crate::error::{Error, Result};
use crate::plan::Plan;

/// Bytes of memory that a tensor's elements fill without a gap, and whose.
#[derive(Debug)]
struct Extent {
    start: usize,
    end: usize,
    param: usize,
    /// The number of the state, none for the parameter itself.
    state: Option<usize>,
}

impl Extent {
    fn of(bound: &BoundTensor, param: usize, state: Option<usize>) -> Option<Self> {
        let (start, bytes) = bound.extent()?;
        (start > 0 && bytes > 0).then_some(Self { start, end: start + bytes, param, state })
    }

    fn name(&self, plan: &Plan) -> String {
        let planned = &plan.params[self.param];
        match self.state {
            None => planned.spec.name.clone(),
            Some(state) => format!("state '{}' of {}", planned.states[state].name(), planned.spec.name),
        }
    }
}

/// The memory that steps write, and what of it was looked at before: steps on the same memory compare addresses alone.
#[derive(Debug, Default)]
pub(super) struct Apart {
    /// Sorted, and apart from each other.
    written: Vec<Extent>,
    /// Addresses of all parameters and their states, in order.
    seen: Vec<usize>,
    /// Address and bytes of the last gradient of each parameter that was apart from all.
    gradients: Vec<(usize, usize)>,
}

impl Apart {
    /// Looks at all parameters and states.
    ///
    /// # Errors
    /// `Error::Layout` as `check_apart`.
    pub(super) fn of(bound: &[BoundParam], plan: &Plan) -> Result<Self> {
        let seen = vec![0; bound.iter().map(|one| one.own().count()).sum()];
        Ok(Self { written: check_apart(bound, plan)?, seen, gradients: vec![(0, 0); bound.len()] })
    }

    /// Looks at what has moved since the last step. A gradient that lies in the memory of a parameter or a state is
    /// copied: it is read as it is before the step.
    ///
    /// # Errors
    /// `Error::Layout` as `check_apart`, and what libtorch says to a copy.
    pub(super) fn look(&mut self, bound: &mut [BoundParam], plan: &Plan) -> Result<()> {
        let mut moved = false;
        let mut seen = self.seen.iter_mut();
        for one in bound.iter() {
            let taken = one.grad.is_some();
            for (tensor, seen) in one.own().zip(&mut seen) {
                let address = tensor.flat.address();
                if taken && *seen != address {
                    (*seen, moved) = (address, true);
                }
            }
        }
        if moved {
            self.written = check_apart(bound, plan)?;
            self.gradients.fill((0, 0));
        }
        for (one, known) in bound.iter_mut().zip(&mut self.gradients) {
            let Some(grad) = &mut one.grad else { continue };
            let place = (grad.flat.address(), grad.flat.bytes());
            if place == *known {
                continue;
            }
            if is_within(&self.written, place) {
                grad.copy()?;
            } else {
                *known = place;
            }
        }
        Ok(())
    }
}

/// Tests whether one of these extents has a byte of a place, given by its start and its length.
fn is_within(written: &[Extent], (start, bytes): (usize, usize)) -> bool {
    // The first that ends behind the start: they are in order and apart, so their ends are in order too.
    let first = written.partition_point(|extent| extent.end <= start);
    written.get(first).is_some_and(|extent| extent.start < start + bytes)
}

/// The memory of parameters and states, in order. Refuses those of which one is in the memory of another, as tied weights
/// that are given twice: each would be updated as if it were alone.
///
/// # Errors
/// `Error::Layout` that names two of them.
fn check_apart(bound: &[BoundParam], plan: &Plan) -> Result<Vec<Extent>> {
    let mut all = Vec::with_capacity(bound.len());
    for (param, one) in bound.iter().enumerate() {
        all.extend(Extent::of(&one.param, param, None));
        let states = one.states.iter().enumerate();
        all.extend(states.filter_map(|(state, tensor)| Extent::of(tensor, param, Some(state))));
    }
    all.sort_unstable_by_key(|extent| extent.start);
    let mut last: Option<&Extent> = None;
    for extent in &all {
        if let Some(last) = last.filter(|last| extent.start < last.end) {
            let (one, other) = if (last.param, last.state) < (extent.param, extent.state) {
                (last, extent)
            } else {
                (extent, last)
            };
            return Err(Error::Layout {
                param: one.name(plan),
                what: format!(
                    "it must not share memory with another parameter or state, got {} bytes at {:#x}, and {} with {} bytes \
                     at {:#x}",
                    one.end - one.start,
                    one.start,
                    other.name(plan),
                    other.end - other.start,
                    other.start
                ),
                way_out: "A step would update what they share twice: give a tied weight to the optimizer once, or make \
                          one a copy with .clone()"
                    .into(),
            });
        }
        last = Some(extent);
    }
    Ok(all)
}
