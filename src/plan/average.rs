//! States of an average of the weights, which any algorithm's parameters may have (`session/average.rs` computes it).

use crate::error::{Error, Result};
use crate::spec::{Options, ParamSpec, StateSpec};
use crate::tensor::DType;

/// Role of the average, or of what Schedule-Free steps; zeros until the first step at a learning rate above 0.
pub const AVERAGE: &str = "average";
/// Role of the counter of averaged steps, 0 where the average has not begun.
pub const STEP: &str = "average_step";
/// Roles of what Schedule-Free keeps besides: the sum of the weights of all steps, the largest learning rate, and the
/// share of the average that the parameter holds, which is 1 after `eval()`.
pub const SCHEDULE_FREE: [&str; 3] = ["average_weight_sum", "average_lr_max", "average_share"];

/// Tests whether a state is one of an average: they stand behind those of the algorithm.
#[must_use]
pub fn is_of_average(role: &str) -> bool {
    role.starts_with(AVERAGE)
}

/// The states of the average that a group's settings ask for.
///
/// # Errors
/// `Error::Value` for settings that are none.
pub(super) fn states(p: &ParamSpec, options: &Options) -> Result<Vec<StateSpec>> {
    let more: &[&str] = match options.optional_word("average")? {
        None => return Ok(Vec::new()),
        Some("ema") => &[],
        Some("schedule_free") => &SCHEDULE_FREE,
        Some(other) => {
            return Err(Error::Value(format!("average must be 'ema' or 'schedule_free', got '{other}'")));
        }
    };
    let dtype = match options.dtype("average_dtype")? {
        Some(given) if !matches!(given, DType::BF16 | DType::F32) => {
            return Err(Error::Value(format!(
                "average_dtype must be bfloat16 or float32, got '{}'",
                given.name()
            )));
        }
        given => given.unwrap_or(p.dtype.arithmetic()),
    };
    let counters = [STEP].into_iter().chain(more.iter().copied());
    let counters = counters.map(|role| StateSpec { dtype: DType::F64, ..StateSpec::counter(role) });
    Ok([StateSpec::like(AVERAGE, p, dtype)].into_iter().chain(counters).collect())
}
