//! Where a session works, and what it can do there.

use tch::Tensor;

use crate::batch::{Place, is_emulated};
use crate::error::{Error, Result};
use crate::kernels::cuda::{self, Entered};
use crate::plan::Plan;
use crate::spec::StateSpec;

/// The algorithms that have all of their kernels on devices.
const ON_DEVICES: [&str; 4] = ["adamw", "lion", "muon", "dion"];

/// Those of them that parameters on several ranks may have there.
const SHARED_ON_DEVICES: [&str; 3] = ["adamw", "lion", "muon"];

/// The one place where all parameters are.
///
/// # Errors
/// `Error::Value` for parameters in several places, and for a device where something of the plan cannot be done there.
pub fn of(plan: &Plan, params: &[Tensor]) -> Result<Place> {
    let mut place = None;
    for (param, member) in params.iter().zip(&plan.members) {
        let here = Place::of(param)?;
        if *place.get_or_insert(here) != here {
            return Err(Error::Value(format!(
                "{}: all parameters of an optimizer must be on one device, got {:?} after {:?}. Make an optimizer for \
                 each device",
                member.spec.name,
                here.device(),
                place.unwrap_or(here).device()
            )));
        }
    }
    let place = match place {
        Some(Place::Cpu) if is_emulated() => Place::Cuda(0),
        other => other.unwrap_or(Place::Cpu),
    };
    if place != Place::Cpu {
        require_supported(plan)?;
    }
    Ok(place)
}

fn require_supported(plan: &Plan) -> Result<()> {
    let refuse = |what: String| Err(Error::Value(format!("{what} cannot be used on CUDA devices yet")));
    for member in &plan.members {
        let name = plan.algorithms[member.algorithm].name();
        if !ON_DEVICES.contains(&name) {
            return refuse(format!("{}: {name}", member.spec.name));
        }
        if member.rounding.is_some() {
            return refuse(format!("{}: stochastic_rounding", member.spec.name));
        }
        if member.states.iter().any(|state| state.scales_of.is_some()) {
            return refuse(format!("{}: state_bits=8", member.spec.name));
        }
    }
    let shared = plan.buckets.iter().filter(|bucket| bucket.distributed());
    let mut names = shared.map(|bucket| plan.algorithms[bucket.algorithm].name());
    match names.find(|name| !SHARED_ON_DEVICES.contains(name)) {
        Some(name) => refuse(format!("{name} with sharded or replicated parameters")),
        None => Ok(()),
    }
}

/// Where a state is: counters stay where the core counts.
pub(super) fn of_state(place: Place, spec: &StateSpec) -> Place {
    if spec.on_host { Place::Cpu } else { place }
}

/// Has the kernels of this thread launched on a stream of the place, until the result is dropped.
pub(super) fn enter(place: Place, stream: usize) -> Result<Option<Entered>> {
    match place {
        Place::Cpu => Ok(None),
        Place::Cuda(number) => cuda::enter(usize::from(number), stream).map(Some),
    }
}
