//! The low halves of float32 weights, which any algorithm's bfloat16 parameters may have (`kernels/cpu/master.rs` has the
//! format).

use crate::error::{Error, Result};
use crate::spec::{Options, ParamSpec, StateSpec};
use crate::tensor::DType;

/// Role of the low halves.
pub(super) const MASTER: &str = "master_remainder";

/// The low halves of a parameter's weights, if its group asks for them.
///
/// # Errors
/// `Error::Value` for a parameter of another type than bfloat16.
pub(super) fn state(p: &ParamSpec, options: &Options) -> Result<Option<StateSpec>> {
    if !options.flag("master_weights")? {
        return Ok(None);
    }
    if p.dtype != DType::BF16 {
        return Err(Error::Value(format!(
            "{}: master_weights needs a bfloat16 parameter, got {}: put it in a group without master_weights",
            p.name,
            p.dtype.name()
        )));
    }
    Ok(Some(StateSpec::like(MASTER, p, DType::I16)))
}
