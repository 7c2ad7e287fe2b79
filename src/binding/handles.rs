//! `DTensor`, `DeviceMesh` and `ProcessGroup` handles to plain integers. The only file that knows them.

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;

use crate::layout::{Axis, Layout, Mesh, Placement, Reduction};

/// Tests whether the object is a `DTensor`.
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
    let irregular = axes.len() > 1 && !regular(&ranks, &axes)?;
    Ok(Mesh { axes, irregular })
}

/// Tests whether every rank of a mesh is the sum of its steps along the axes from this process.
fn regular(ranks: &Bound<'_, PyAny>, axes: &[Axis]) -> PyResult<bool> {
    let all: Vec<u64> = ranks.call_method0("flatten")?.call_method0("tolist")?.extract()?;
    let mut joined = vec![0_u64];
    for axis in axes {
        joined = joined.iter().flat_map(|&at| axis.ranks.iter().map(move |&r| at + r)).collect();
    }
    let own = axes.first().map_or(0, |axis| axis.ranks[axis.coordinate]) * (axes.len() as u64 - 1);
    Ok(all.iter().zip(&joined).all(|(rank, sum)| rank + own == *sum))
}

/// An axis as plain values: name (none for a process group), global ranks, this process's position among them.
type PlainAxis = (Option<String>, Vec<u64>, usize);

/// The axes of a `DeviceMesh`, or the one of a `ProcessGroup`, through this process.
#[pyfunction]
pub(super) fn axes_of(handle: &Bound<'_, PyAny>) -> PyResult<Vec<PlainAxis>> {
    let py = handle.py();
    let dist = py.import("torch.distributed")?;
    if handle.is_instance(&dist.getattr("ProcessGroup")?)? {
        let ranks = dist.call_method1("get_process_group_ranks", (handle,))?.extract()?;
        return Ok(vec![(None, ranks, handle.call_method0("rank")?.extract()?)]);
    }
    if handle.is_instance(&py.import("torch.distributed.device_mesh")?.getattr("DeviceMesh")?)? {
        let axes = mesh(handle)?.axes.into_iter();
        return Ok(axes.map(|axis| (Some(axis.name), axis.ranks, axis.coordinate)).collect());
    }
    let got = handle.get_type().name()?;
    Err(PyTypeError::new_err(format!("must be a DeviceMesh or ProcessGroup, got {got}")))
}

fn placement(handle: &Bound<'_, PyAny>) -> PyResult<Placement> {
    if handle.call_method0("is_replicate")?.extract()? {
        return Ok(Placement::Replicate);
    }
    if handle.call_method0("is_partial")?.extract()? {
        // Whatever the reduction: a parameter cannot be a contribution.
        return Ok(Placement::Partial(Reduction::Sum));
    }
    let dim: usize = handle.getattr("dim")?.extract()?;
    let strided = handle.get_type().name()?.to_string_lossy() == "_StridedShard";
    Ok(if strided { Placement::Strided(dim) } else { Placement::Shard(dim) })
}

/// Layout of a gradient compared with its parameter's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum GradientLayout {
    /// The parameter's, except that along these axes of its mesh the parameter is replicated and each rank holds a
    /// contribution to the gradient.
    Like(Vec<usize>),
    /// Other placements on the parameter's mesh.
    Other,
    /// On no mesh, or on another.
    Elsewhere,
}

/// Compares the layout of a gradient that is a `DTensor` with its parameter's. The handles are compared before what they
/// mean.
pub(super) fn gradient_layout(grad: &Bound<'_, PyAny>, param: &Bound<'_, PyAny>) -> PyResult<GradientLayout> {
    let py = grad.py();
    let (mesh, placements) = (intern!(py, "device_mesh"), intern!(py, "placements"));
    if !is_distributed(param)? {
        return Ok(GradientLayout::Elsewhere);
    }
    let (grad_mesh, param_mesh) = (grad.getattr(mesh)?, param.getattr(mesh)?);
    let (grads, params) = (grad.getattr(placements)?, param.getattr(placements)?);
    let same = grad_mesh.is(&param_mesh);
    if same && grads.eq(&params)? {
        return Ok(GradientLayout::Like(Vec::new()));
    }
    if !same && layout(grad)?.mesh != layout(param)?.mesh {
        return Ok(GradientLayout::Elsewhere);
    }
    let sizes: Vec<usize> = param_mesh.getattr("shape")?.extract()?;
    let mut added = Vec::new();
    for (axis, both) in grads.try_iter()?.zip(params.try_iter()?).enumerate() {
        let (grad, param) = (both.0?, both.1?);
        if sizes.get(axis) == Some(&1) {
            continue; // one rank has everything, whatever its placement is called
        }
        if is_sum(&grad)? && param.call_method0("is_replicate")?.extract()? {
            added.push(axis);
        } else if !grad.eq(&param)? {
            return Ok(GradientLayout::Other);
        }
    }
    Ok(GradientLayout::Like(added))
}

/// Tests whether a placement is that of contributions to a sum of all elements.
fn is_sum(placement: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(placement.get_type().name()?.to_string_lossy() == "Partial"
        && placement.getattr("reduce_op")?.eq("sum")?)
}

/// An axis whose ranks hold copies of the parameters, as Python gives it: name, global ranks, this process's position
/// among them, and whether the gradients are equal on all of them.
pub(super) type ReplicaHandle = (String, Vec<u64>, usize, bool);

/// The axes that the user passed in addition to those of the parameters.
#[derive(Default, FromPyObject)]
pub(super) struct Meshes {
    #[pyo3(attribute)]
    replicas: Vec<ReplicaHandle>,
    #[pyo3(attribute)]
    outer: Option<Vec<u64>>,
    #[pyo3(attribute)]
    inner: Option<Vec<u64>>,
}

impl Meshes {
    /// Adds the replicas to a parameter's layout. If the user named the axes, returns for every sharded dimension whether
    /// the outer axis shards it.
    ///
    /// # Errors
    /// The error text and a hint, for an axis that shards the parameter but is not one of those named, or should hold
    /// replicas of it.
    pub(super) fn complete(&self, layout: &mut Layout) -> Result<Vec<(usize, bool)>, (String, &'static str)> {
        let mut named = Vec::new();
        if self.outer.is_some() || self.inner.is_some() {
            for (axis, placement) in layout.distributed_axes() {
                let (Placement::Shard(dim) | Placement::Strided(dim)) = placement else { continue };
                let is = |mesh: &Option<Vec<u64>>| mesh.as_ref() == Some(&axis.ranks);
                if !is(&self.outer) && !is(&self.inner) {
                    let what = format!(
                        "mesh axis '{}' over ranks {:?} shards it, and is neither outer_shard_mesh nor inner_shard_mesh",
                        axis.name, axis.ranks
                    );
                    return Err((what, "Pass the mesh that shards it, or leave meshes out"));
                }
                named.push((dim, is(&self.outer)));
            }
        }
        for (name, ranks, coordinate, averaged) in &self.replicas {
            if ranks.len() > 1 {
                let axis = Axis { name: name.clone(), ranks: ranks.clone(), coordinate: *coordinate };
                layout.replicate(axis, *averaged).map_err(|own| {
                    let what = format!(
                        "the ranks {ranks:?} of '{name}' cannot all hold copies of it: they share some with its mesh axis \
                         '{}' over {:?}",
                        own.name, own.ranks
                    );
                    (what, "Leave that mesh out: the DTensors tell where they lie")
                })?;
            }
        }
        Ok(named)
    }
}

/// A layout spelled out: for each axis its name, ranks, this process's position and a placement ("R", or "S" or "T" for
/// strided, with a dimension).
pub(super) type SpelledAxis = (String, Vec<u64>, usize, String, usize);

/// The layout that is spelled out.
pub(super) fn spelled(axes: Vec<SpelledAxis>) -> Layout {
    let mut layout = Layout::default();
    for (name, ranks, coordinate, placement, dim) in axes {
        layout.mesh.axes.push(Axis { name, ranks, coordinate });
        layout.placements.push(match placement.as_str() {
            "S" => Placement::Shard(dim),
            "T" => Placement::Strided(dim),
            _ => Placement::Replicate,
        });
    }
    layout
}
