//! Devices on which a session works, and what it can do there.

use tch::Tensor;

use super::Session;
use super::tensors::places;
use crate::algorithm::NORMS;
use crate::error::{Error, Result};
use crate::kernels;
use crate::kernels::Entered;
use crate::plan::{LocalState, Param, Plan, average};
use crate::spec::StateSpec;
use crate::tensor::{Device, MOST_SPANS};

/// Refuses parameters that cannot be worked on where they are.
///
/// # Errors
/// `Error::Value` for a parameter that has left the device that it was planned for, and for a device where something of the
/// plan cannot be done.
pub fn check_devices(plan: &Plan, params: &[Tensor]) -> Result<()> {
    for (param, planned) in params.iter().zip(&plan.params) {
        let here = Device::counted(param)?;
        if here != planned.device {
            return Err(Error::Value(format!(
                "{}: it was planned for {} and is on {here}",
                planned.spec.name, planned.device
            )));
        }
    }
    require_supported(plan)
}

fn require_supported(plan: &Plan) -> Result<()> {
    let too_many = |planned: &&Param| {
        let states = planned.states.iter().filter(|state| state.rounding.is_some()).map(LocalState::places);
        let all = planned.rounding.map(|_| places(planned)).into_iter().chain(states);
        planned.device != Device::Cpu && all.map(|places| places.depth()).max() > Some(MOST_SPANS)
    };
    match plan.params.iter().find(too_many) {
        None => Ok(()),
        Some(planned) => Err(Error::Value(format!(
            "{}: stochastic_rounding, states of 8 or 16 bits and average_dtype='bfloat16' cannot be used on CUDA devices with \
             a parameter that is sharded in more than {MOST_SPANS} dimensions",
            planned.spec.name
        ))),
    }
}

/// Refuses to have a step captured that a replay would not repeat as another one.
///
/// In replays of `torch.cuda.graph` an `lr` that is a tensor on the device is live, with the decay that is
/// proportional to it. Element-wise classes, `Adafactor` and CAME count steps on the device.
/// `GaLoreAdamW`, `APOLLOAdamW` and SOAP keep the bias corrections of the capture, and `GaLoreAdamW`, SOAP
/// and `SOAPMuon` its bases. Other settings are those of the capture.
///
/// # Errors
/// `Error::Value` for a parameter or a state that is rounded at random: the key of its random numbers is that of the step. Also
/// for a step in which the host waits for a decomposition.
pub(super) fn require_capturable(plan: &Plan) -> Result<()> {
    let rounded = plan.params.iter().find(|planned| planned.is_rounded());
    let waits = |planned: &&Param| !plan.algorithms[planned.algorithm].replays(false);
    let waiting = plan.params.iter().find(waits);
    if (rounded.is_none() && waiting.is_none()) || !kernels::is_capturing()? {
        return Ok(());
    }
    if let Some(planned) = waiting {
        return Err(Error::Value(format!(
            "{}: a step with orth_method='svd' cannot be captured, as it waits for the device. Set another orth_method, or take \
             the step outside of the graph",
            planned.spec.name
        )));
    }
    let Some(planned) = rounded else { return Ok(()) };
    let (what, help) = match planned.states.iter().find(|state| state.rounding.is_some()) {
        _ if planned.rounding.is_some() => ("stochastic_rounding", "stochastic_rounding=False"),
        Some(state) if state.spec.dtype.is_quantized() => ("states of 8 bits", "state_bits=32"),
        Some(state) if state.spec.role == average::AVERAGE => {
            ("averages of 16 bits", "average_dtype='float32'")
        }
        _ => ("states of 16 bits", "state_dtype=torch.float32"),
    };
    Err(Error::Value(format!(
        "{}: a step with {what} cannot be captured by torch.cuda.graph, as every replay would round by the same random \
         numbers. Set {help}, take the step outside of the graph, or have oxidion.CudaGraphOptimizer capture it",
        planned.spec.name
    )))
}

/// Device of a state: counters are on the host, where the core counts.
pub(super) fn of_state(device: Device, spec: &StateSpec) -> Device {
    if spec.on_host { Device::Cpu } else { device }
}

impl Session {
    /// Has the kernels of this thread launched on a device of the plan, on torch's stream there, until the result is dropped.
    pub(super) fn enter(&self, device: Device) -> Result<Option<Entered>> {
        let place = self.plan.devices().position(|other| other == device);
        let stream = place.and_then(|at| self.streams.get(at)).copied().unwrap_or(0);
        enter(device, stream, self.encoded, &self.sources)
    }

    /// Enters each device of the plan: what one refuses, it refuses here.
    pub(super) fn open_devices(&self) -> Result<()> {
        for device in self.plan.devices() {
            let _there = self.enter(device)?;
            require_capturable(&self.plan)?;
        }
        Ok(())
    }
}

/// Has the kernels of this thread launched on a stream of the device, until the result is dropped: of these sources, which are
/// loaded together where they are missing. `encoded`: also those for what is more than numbers of its type.
///
/// # Errors
/// `Error::Cuda` where kernels are required and cannot be had.
pub fn enter(device: Device, stream: usize, encoded: bool, sources: &[&str]) -> Result<Option<Entered>> {
    match device {
        Device::Cpu => Ok(None),
        Device::Cuda(number) => kernels::enter(usize::from(number), stream, encoded, sources).map(Some),
    }
}

/// Sources of kernels that the steps of a plan ask for on a device, so that they are compiled, loaded and checked together before
/// the first of them.
#[must_use]
pub fn sources(plan: &Plan) -> Vec<&'static str> {
    let mut all = std::collections::BTreeSet::new();
    for algorithm in plan.algorithms.iter().map(|algorithm| algorithm.name()) {
        let own: &[&str] = match algorithm {
            "lamb" => &["updates.cu", "sums.cu", "totals.cu", "factors.cu"],
            "adafactor" | "came" => &["totals.cu", "factors.cu", "rows.cu", "means.cu"],
            "muon" | "normuon" | "dion2" | "nordion2" => {
                all.extend(["updates.cu", "symmetric_mma.cu", "sums.cu", "totals.cu"]);
                if algorithm.ends_with("dion2") { &["select.cu"] } else { &[] }
            }
            "dion" => &["updates.cu", "gram.cu", "cholesky.cu"],
            "galore_adamw" | "soap" => &["updates.cu", "symmetric_mma.cu"],
            "soap_muon" => &["updates.cu", "symmetric_mma.cu", "sums.cu", "totals.cu"],
            "apollo_adamw" | "apollo_mini" => &["updates.cu", "select.cu", "normals.cu"],
            _ => &["updates.cu"],
        };
        all.extend(own.iter().copied());
    }
    if plan.params.iter().flat_map(|planned| &planned.states).any(|state| state.spec.role == average::AVERAGE)
    {
        all.insert("updates.cu");
    }
    if plan.buckets.iter().flat_map(|bucket| &bucket.program.buffers).any(|buffer| buffer.name == NORMS) {
        all.extend(["sums.cu", "totals.cu"]);
    }
    if has_encodings(plan) {
        // Where no kernel takes quantized values, separate kernels dequantize and quantize them.
        all.extend(["updates.cu", "quantized.cu"]);
        if all.contains("sums.cu") {
            all.insert("quantized_sums.cu");
        }
    }
    if !plan.transfers.is_empty() {
        all.extend(["updates.cu", "copies.cu", "messages.cu"]);
    }
    all.into_iter().collect()
}

/// Tests whether a parameter or a state is more than numbers of its type.
pub(super) fn has_encodings(plan: &Plan) -> bool {
    let states = || plan.params.iter().flat_map(|planned| &planned.states);
    let is_encoded = |planned: &Param| planned.is_rounded() || planned.master().is_some();
    plan.params.iter().any(is_encoded) || states().any(|state| state.scales_of.is_some())
}
