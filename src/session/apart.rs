//! Checks that parameters and states that a step writes share no memory.

use super::tensors::{BoundParam, BoundTensor};
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::tensor::address_of;

/// Bytes of memory that a tensor's elements fill without a gap, and whose.
struct Extent {
    start: usize,
    end: usize,
    param: usize,
    /// The number of the state, none for the parameter itself.
    state: Option<usize>,
}

impl Extent {
    fn of(bound: &BoundTensor, param: usize, state: Option<usize>) -> Option<Self> {
        let tensor = &bound.tensor;
        let bytes = tensor.numel() * tensor.kind().elt_size_in_bytes();
        // What is not contiguous is worked on in a copy.
        let start = if bytes > 0 && tensor.is_contiguous() { address_of(tensor) } else { 0 };
        (start > 0).then_some(Self { start, end: start + bytes, param, state })
    }

    fn name(&self, plan: &Plan) -> String {
        let planned = &plan.params[self.param];
        match self.state {
            None => planned.spec.name.clone(),
            Some(state) => format!("state '{}' of {}", planned.states[state].name(), planned.spec.name),
        }
    }
}

/// Refuses parameters and states of which one is in the memory of another, as tied weights that are given twice: each would
/// be updated as if it were alone.
///
/// # Errors
/// `Error::Layout` that names two of them.
pub(super) fn check_apart(bound: &[BoundParam], plan: &Plan) -> Result<()> {
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
    Ok(())
}
