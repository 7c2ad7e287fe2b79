//! The frozen plan as Python sees it.

use std::collections::BTreeMap;
use std::sync::Arc;

use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::enter::Enter;
use super::{group, handles, tensor};
use crate::algorithm;
use crate::dtype::DType;
use crate::plan::{GroupSpec, ParamInput, Plan};
use crate::session::check_gradient;
use crate::spec::{Description, Init, ParamSpec};

/// The schedule of one step: buckets, buffers, instructions.
#[pyclass(name = "Plan", module = "oxidion", frozen)]
pub(super) struct PyPlan {
    pub(super) plan: Arc<Plan>,
    pub(super) groups: Vec<GroupSpec>,
}

/// The names of all algorithms.
#[pyfunction]
pub(super) fn algorithms() -> Vec<&'static str> {
    algorithm::names()
}

/// Reads the parameters of all groups into specs.
fn inputs(groups: &[Bound<'_, PyDict>], dtypes: &[BTreeMap<String, String>]) -> PyResult<Vec<ParamInput>> {
    let mut params = Vec::new();
    for (number, group) in groups.iter().enumerate() {
        let names: Option<Vec<String>> = match group.get_item("param_names")? {
            Some(names) => names.extract()?,
            None => None,
        };
        for (i, object) in group::params(group)?.iter().enumerate() {
            let index = params.len();
            let name = names
                .as_ref()
                .and_then(|n| n.get(i).cloned())
                .unwrap_or_else(|| format!("parameter {i} of group {number}"));
            let local = tensor::unpack(&handles::local(&object)?, &name)?;
            tensor::require_cpu(&local, &name)?;
            let Some(dtype) = DType::from_kind(local.kind()) else {
                return Err(pyo3::exceptions::PyTypeError::new_err(format!(
                    "{name}: parameters must be float16, bfloat16, float32 or float64, got {:?}",
                    local.kind()
                )));
            };
            let shape: Vec<usize> = object.getattr("shape")?.extract()?;
            let spec = ParamSpec { index, name, shape, dtype };
            let state_dtypes = dtypes
                .get(index)
                .into_iter()
                .flatten()
                .filter_map(|(role, name)| Some((role.clone(), DType::parse(name).ok()?)))
                .collect();
            let frozen =
                !object.getattr("requires_grad")?.extract::<bool>()? && object.getattr("grad")?.is_none();
            params.push(ParamInput {
                spec,
                layout: handles::layout(&object)?,
                group: number,
                frozen,
                state_dtypes,
            });
        }
    }
    Ok(params)
}

#[pymethods]
impl PyPlan {
    /// Compiles the plan of these groups. `state_dtypes`: for each parameter the dtype names of the states that exist,
    /// by role; empty when there are none.
    #[new]
    fn new(
        py: Python<'_>,
        groups: Vec<Bound<'_, PyDict>>,
        state_dtypes: Vec<BTreeMap<String, String>>,
    ) -> PyResult<Self> {
        let params = inputs(&groups, &state_dtypes)?;
        let groups = groups.iter().map(group::spec).collect::<PyResult<Vec<_>>>()?;
        let plan = py.enter(|| Plan::build(params, &groups))?;
        Ok(Self { plan: Arc::new(plan), groups })
    }

    /// Refuses gradients that no step could use, before anything is allocated.
    fn preflight(&self, py: Python<'_>, groups: Vec<Bound<'_, PyDict>>) -> PyResult<()> {
        let mut members = self.plan.members.iter();
        for group in &groups {
            for object in group::params(group)?.iter() {
                let (Some(member), grad) = (members.next(), object.getattr("grad")?) else {
                    return Ok(());
                };
                if !grad.is_none() {
                    let param = tensor::unpack(&handles::local(&object)?, &member.spec.name)?;
                    let grad = super::session::gradient(&object, &grad, member.spec.dtype)
                        .map_err(|e| super::error::with_name(py, &e, &member.spec.name))?;
                    check_gradient(&grad, &param, &member.spec.name).map_err(super::error::to_python)?;
                }
            }
        }
        Ok(())
    }

    /// The instructions as pairs of a code (0 compute, 1 issue, 2 wait) and an index.
    #[getter]
    fn schedule(&self) -> Vec<(u8, usize)> {
        self.plan.schedule.iter().map(|i| i.code()).collect()
    }

    /// Bytes of workspace.
    #[getter]
    fn arena_bytes(&self) -> usize {
        self.plan.arena.bytes
    }

    /// SHA-256 of the printed plan.
    #[getter]
    fn fingerprint(&self) -> String {
        self.plan.fingerprint()
    }

    /// The name of the algorithm of each parameter.
    #[getter]
    fn algorithms(&self) -> Vec<&'static str> {
        self.plan.members.iter().map(|m| self.plan.algorithms[m.algorithm].name()).collect()
    }

    /// For each parameter its states: (role, shape, dtype name, seed of a normal start or None, shaped like it).
    #[allow(clippy::type_complexity)] // a row of plain values
    fn state_specs(&self) -> Vec<Vec<(&'static str, Vec<usize>, &'static str, Option<u64>, bool)>> {
        let row = |s: &crate::spec::StateSpec| {
            let seed = match s.init {
                Init::Zeros => None,
                Init::Normal { seed } => Some(seed),
            };
            (s.role, s.shape.clone(), s.dtype.name(), seed, s.like_param)
        };
        self.plan.members.iter().map(|m| m.states.iter().map(row).collect()).collect()
    }

    /// One row per parameter for `explain()`.
    fn rows<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let rows = PyList::empty(py);
        for member in &self.plan.members {
            let algorithm = &self.plan.algorithms[member.algorithm];
            let about = if member.frozen {
                Description { view: "frozen".into(), ..Description::default() }
            } else {
                algorithm.describe(&member.spec, &member.blocks)
            };
            let row = PyDict::new(py);
            row.set_item("name", &member.spec.name)?;
            row.set_item("shape", pyo3::types::PyTuple::new(py, &member.spec.shape)?)?;
            row.set_item("dtype", member.spec.dtype.name())?;
            row.set_item("placements", placements(member))?;
            row.set_item("group", member.group)?;
            row.set_item("algorithm", algorithm.name())?;
            row.set_item("view", about.view)?;
            row.set_item("lr_factor", about.lr_factor)?;
            row.set_item("rank", about.rank)?;
            row.set_item("owner", "local")?;
            row.set_item(
                "state_bytes",
                member.states.iter().map(crate::spec::StateSpec::bytes).sum::<usize>(),
            )?;
            row.set_item("flops", about.flops)?;
            row.set_item("wire_bytes", 0)?;
            rows.append(row)?;
        }
        Ok(rows)
    }

    /// A numeric column of `rows`, as a NumPy array.
    fn column<'py>(&self, py: Python<'py>, key: &str) -> PyResult<Bound<'py, PyArray1<f64>>> {
        let mut values = Vec::with_capacity(self.plan.members.len());
        for row in self.rows(py)?.iter() {
            let value = row.get_item(key)?;
            values.push(if value.is_none() { f64::NAN } else { value.extract()? });
        }
        Ok(values.into_pyarray(py))
    }

    fn __str__(&self) -> String {
        self.plan.explain()
    }

    fn __repr__(&self) -> String {
        let plan = &self.plan;
        format!(
            "<Plan: {} parameters, {} buckets, {} bytes>",
            plan.members.len(),
            plan.buckets.len(),
            plan.arena.bytes
        )
    }
}

fn placements(member: &crate::plan::Member) -> String {
    let axes = &member.layout.mesh.axes;
    if axes.is_empty() {
        return "one device".into();
    }
    let words: Vec<String> = axes
        .iter()
        .zip(&member.layout.placements)
        .map(|(axis, placement)| format!("{}:{placement:?}/{}", axis.name, axis.ranks.len()))
        .collect();
    words.join(", ")
}
