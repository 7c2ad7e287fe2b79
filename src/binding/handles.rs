//! `DTensor`, `DeviceMesh` and `ProcessGroup` handles to plain integers. The only file that knows them.

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;

use crate::layout::{Axis, Layout, Mesh, Placement, Reduction};

/// Whether the object is a `DTensor`.
pub(super) fn is_distributed(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(!super::tensor::is_plain(object)? && object.hasattr(intern!(object.py(), "_local_tensor"))?)
}

/// The tensor that this process holds of a tensor or `DTensor`.
pub(super) fn local<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    if is_distributed(object)? {
        object.getattr(intern!(object.py(), "_local_tensor"))
    } else {
        Ok(object.clone())
    }
}

/// The layout of a tensor (no axes) or `DTensor`.
pub(super) fn layout(object: &Bound<'_, PyAny>) -> PyResult<Layout> {
    if !is_distributed(object)? {
        return Ok(Layout::default());
    }
    let mesh = mesh(&object.getattr("device_mesh")?)?;
    let placements =
        object.getattr("placements")?.try_iter()?.map(|p| placement(&p?)).collect::<PyResult<Vec<_>>>()?;
    Ok(Layout { mesh, placements })
}

/// The axes of a `DeviceMesh` through this process's coordinate.
fn mesh(handle: &Bound<'_, PyAny>) -> PyResult<Mesh> {
    let coordinate: Option<Vec<usize>> = handle.call_method0("get_coordinate")?.extract()?;
    let Some(coordinate) = coordinate else {
        return Err(PyTypeError::new_err("this process is not part of the parameter's device mesh"));
    };
    let names: Option<Vec<String>> = handle.getattr("mesh_dim_names")?.extract()?;
    let ranks = handle.getattr("mesh")?;
    let mut axes = Vec::with_capacity(coordinate.len());
    for (dim, &at) in coordinate.iter().enumerate() {
        // The line of ranks along this axis: all other coordinates fixed.
        let mut line = ranks.clone();
        for (other, &fixed) in coordinate.iter().enumerate().rev() {
            if other != dim {
                line = line.call_method1("select", (other, fixed))?;
            }
        }
        let name = names.as_ref().and_then(|n| n.get(dim).cloned()).unwrap_or_else(|| format!("dim{dim}"));
        axes.push(Axis { name, ranks: line.call_method0("tolist")?.extract()?, coordinate: at });
    }
    Ok(Mesh { axes })
}

fn placement(handle: &Bound<'_, PyAny>) -> PyResult<Placement> {
    if handle.call_method0("is_replicate")?.extract()? {
        Ok(Placement::Replicate)
    } else if handle.call_method0("is_partial")?.extract()? {
        let how: String = handle.getattr("reduce_op")?.extract()?;
        Ok(Placement::Partial(if how == "avg" { Reduction::Avg } else { Reduction::Sum }))
    } else {
        let dim: usize = handle.getattr("dim")?.extract()?;
        Ok(Placement::Shard(dim))
    }
}
