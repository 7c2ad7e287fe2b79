//! Gradients of parameters, as far as this process holds them.

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use tch::{Kind, Tensor};

use super::handles::GradientLayout;
use super::{handles, tensor};
use crate::tensor::DType;

/// The gradient of a parameter, as far as this process holds it.
pub(super) enum Gradient {
    /// It has the parameter's layout, or is a sum along these axes, to which this process holds a contribution.
    Ready { local: Tensor, added: Vec<usize> },
    /// It is of this type and has to be redistributed.
    Misplaced(Kind),
}

/// The local gradient of a parameter, of the parameter's `dtype` or of the one that the user set as its `grad_dtype`.
pub(super) fn gradient(
    param: &Bound<'_, PyAny>,
    grad: &Bound<'_, PyAny>,
    dtype: DType,
) -> PyResult<Gradient> {
    let py = param.py();
    let plain = tensor::is_plain(grad)?;
    let layout = if !plain && handles::is_distributed(grad)? {
        handles::gradient_layout(grad, param)?
    } else {
        GradientLayout::Like(Vec::new())
    };
    if layout == GradientLayout::Elsewhere {
        return Err(super::error::LayoutError::new_err(
            "the gradient is on another device mesh than the parameter. Redistribute it before step()",
        ));
    }
    let local = if plain { grad.clone() } else { handles::local(grad)? };
    let local = tensor::unpack(&local, "gradient")?;
    if local.kind() != dtype.kind() {
        // Up to torch 2.9 a gradient has its parameter's dtype: there is no `grad_dtype`.
        let (own, allowed) =
            (grad.getattr(intern!(py, "dtype"))?, param.getattr_opt(intern!(py, "grad_dtype"))?);
        if allowed.is_none_or(|allowed| !allowed.is_none() && !allowed.is(&own)) {
            return Err(PyTypeError::new_err(format!(
                "the gradient must have the parameter's dtype {}, got {own}. Convert it, or allow it by setting the \
                 parameter's grad_dtype",
                dtype.name()
            )));
        }
    }
    Ok(match layout {
        GradientLayout::Like(added) => Gradient::Ready { local, added },
        _ => Gradient::Misplaced(local.kind()),
    })
}
