//! Refuses parameters and states that share memory, with each other or with a gradient: a step writes each as if it were
//! alone.

use super::tensors::{BoundParam, BoundTensor};
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::tensor::Elements;

/// Parts into which two tensors are cut at most to find out whether they share an element. Beyond that they are refused.
const MOST_CUTS: usize = 1 << 20;

/// Memory of a tensor, and whose it is.
#[derive(Debug)]
struct Extent {
    elements: Elements,
    param: usize,
    /// The number of the state, none for the parameter itself.
    state: Option<usize>,
}

impl Extent {
    fn of(bound: &BoundTensor, param: usize, state: Option<usize>) -> Option<Self> {
        Some(Self { elements: bound.elements()?, param, state })
    }

    fn name(&self, plan: &Plan) -> String {
        let planned = &plan.params[self.param];
        match self.state {
            None => planned.spec.name.clone(),
            Some(state) => format!("state '{}' of {}", planned.states[state].name(), planned.spec.name),
        }
    }

    /// Refuses that it shares memory with another tensor.
    fn refuse(&self, other: &Self, plan: &Plan) -> Error {
        let (one, other) =
            if (self.param, self.state) < (other.param, other.state) { (self, other) } else { (other, self) };
        let place = |extent: &Self| {
            let [start, end] = extent.elements.bounds();
            format!("{} bytes at {start:#x}", end - start)
        };
        Error::Layout {
            param: one.name(plan),
            what: format!(
                "it must not share memory with another parameter or state, got {}, and {} with {}",
                place(one),
                other.name(plan),
                place(other)
            ),
            help: "A step would update what they share twice: give a tied weight to the optimizer once, or make one a \
                      copy with .clone()"
                .into(),
        }
    }
}

/// The memory that steps write, and what of it was looked at before: steps on the same memory compare places alone.
#[derive(Debug, Default)]
pub(super) struct AliasCheck {
    /// Bounds of the written memory, sorted and non-overlapping.
    written: Vec<[usize; 2]>,
    /// Places of all parameters and their states, in order: see `BoundTensor::place`.
    seen: Vec<usize>,
    /// Address and bytes of the last gradient of each parameter that did not alias the written memory.
    gradients: Vec<(usize, usize)>,
}

impl AliasCheck {
    /// Looks at all parameters and states.
    ///
    /// # Errors
    /// As `refuse_aliasing`.
    pub(super) fn of(bound: &[BoundParam], plan: &Plan) -> Result<Self> {
        let seen = vec![0; bound.iter().map(|one| one.own().count()).sum()];
        Ok(Self { written: refuse_aliasing(bound, plan)?, seen, gradients: vec![(0, 0); bound.len()] })
    }

    /// Looks at what has moved since the last step. A gradient that lies in the memory of a parameter or a state is
    /// copied: it is read as it is before the step.
    ///
    /// # Errors
    /// As `refuse_aliasing`, and what libtorch says to a copy.
    pub(super) fn look(&mut self, bound: &mut [BoundParam], plan: &Plan) -> Result<()> {
        let mut seen = self.seen.iter();
        let mut has_moved = |one: &BoundParam| {
            let taken = one.grad.is_some();
            one.own().zip(&mut seen).filter(|(tensor, seen)| taken && **seen != tensor.place()).count() > 0
        };
        let moved = bound.iter().fold(false, |moved, one| has_moved(one) | moved);
        if moved {
            self.written = refuse_aliasing(bound, plan)?;
            self.gradients.fill((0, 0));
            // Not before: what is refused once is refused at every step.
            let tensors = bound.iter().flat_map(|one| one.own().map(|tensor| (tensor, one.grad.is_some())));
            for (seen, (tensor, taken)) in self.seen.iter_mut().zip(tensors) {
                if taken {
                    *seen = tensor.place();
                }
            }
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

/// Tests whether memory within these bounds has a byte of a place, given by its start and its length.
fn is_within(written: &[[usize; 2]], (start, bytes): (usize, usize)) -> bool {
    // The first that ends behind the start: they are sorted and do not overlap, so their ends are sorted too.
    let first = written.partition_point(|[_, end]| *end <= start);
    written.get(first).is_some_and(|[begin, _]| *begin < start + bytes)
}

/// The bounds of the memory of parameters and states, in order; those that overlap are one. Refuses tensors that share an
/// element, as a tied weight that is given twice, or once transposed.
///
/// # Errors
/// `Error::Layout` that names two of them.
fn refuse_aliasing(bound: &[BoundParam], plan: &Plan) -> Result<Vec<[usize; 2]>> {
    let mut all = Vec::with_capacity(bound.len());
    for (param, one) in bound.iter().enumerate() {
        all.extend(Extent::of(&one.param, param, None));
        let states = one.states.iter().enumerate();
        all.extend(states.filter_map(|(state, tensor)| Extent::of(tensor, param, Some(state))));
    }
    all.sort_unstable_by_key(|extent| extent.elements.bounds());
    let mut bounds: Vec<[usize; 2]> = Vec::with_capacity(all.len());
    // Those before the current one that end behind its start: one at most, but for columns of one tensor and the like.
    let mut open: Vec<&Extent> = Vec::new();
    for extent in &all {
        let [start, end] = extent.elements.bounds();
        open.retain(|other| other.elements.bounds()[1] > start);
        if let Some(other) =
            open.iter().find(|other| other.elements.share(&extent.elements, &mut { MOST_CUTS }))
        {
            return Err(extent.refuse(other, plan));
        }
        match bounds.last_mut() {
            Some(last) if last[1] > start => last[1] = last[1].max(end),
            _ => bounds.push([start, end]),
        }
        open.push(extent);
    }
    Ok(bounds)
}
