//! The frozen plan as Python sees it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::enter::Enter;
use super::gradient::{Gradient, gradient};
use super::handles::GradientLayout;
use super::{group, handles, tensor};
use crate::algorithm;
use crate::error::Error;
use crate::kernels::multiprocessors;
use crate::layout::{Collective, local_shape};
use crate::plan::{GroupSpec, LocalState, Owned, ParamInput, Place, Plan, placements};
use crate::session::{check_devices, check_gradient};
use crate::spec::{Description, Init, ParamSpec, stream_of};
use crate::tensor::{DType, Device};

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

/// Keys of `Optimizer.state` in the classes that follow torch's names, by algorithm and the core's name of the state.
#[pyfunction]
pub(super) fn state_names() -> BTreeMap<&'static str, BTreeMap<&'static str, &'static str>> {
    algorithm::state_names().map(|(name, states)| (name, states.into_iter().collect())).collect()
}

/// Dtype name and shape of each state that exists, by role.
type States = BTreeMap<String, (String, Vec<usize>)>;

/// Global shapes and spelled-out layouts of all parameters, instead of what their handles say.
type Simulated = Vec<(Vec<usize>, Vec<handles::SpelledAxis>)>;

/// Name, global shape, dtype, group and spelled-out layout of a parameter.
type Described = (String, Vec<usize>, String, usize, Vec<handles::SpelledAxis>);

/// Reads the parameters of all groups into specs.
fn inputs(
    groups: &[Bound<'_, PyDict>],
    states: &[States],
    meshes: &handles::Meshes,
    mut simulated: Option<Simulated>,
) -> PyResult<Vec<ParamInput>> {
    let mut params = Vec::new();
    let mut sizes = BTreeMap::new();
    for (number, group) in groups.iter().enumerate() {
        let names: Option<Vec<String>> = match group.get_item("param_names")? {
            Some(names) => names.extract()?,
            None => None,
        };
        let by_position = group::seeded_by_position(group)?;
        for (i, object) in group::params(group)?.iter().enumerate() {
            let index = params.len();
            let given = names.as_ref().and_then(|n| n.get(i).cloned());
            let stream = given.as_deref().filter(|_| !by_position).map_or(index as u64, stream_of);
            let name = given.unwrap_or_else(|| format!("parameter {i} of group {number}"));
            let local = tensor::unpack(&handles::local(&object)?, &name)?;
            let Some(dtype) = DType::from_kind(local.kind()) else {
                return Err(pyo3::exceptions::PyTypeError::new_err(format!(
                    "{name}: parameters must be float16, bfloat16, float32 or float64, got {:?}",
                    local.kind()
                )));
            };
            let given = simulated.as_mut().and_then(|s| s.get_mut(index)).map(std::mem::take);
            let given_here = given.is_none();
            let (shape, mut layout) = match given {
                Some((shape, axes)) => (shape, handles::spelled(axes)),
                None => (object.getattr("shape")?.extract()?, handles::layout(&object)?),
            };
            let refuse = |what: String, help: &str| {
                super::error::to_python(Error::Layout { param: name.clone(), what, help: help.into() })
            };
            if given_here && let Some(at) = layout.contributions().next() {
                let axis = &layout.mesh.axes[at];
                return Err(refuse(
                    format!("every rank of mesh axis '{}' holds a contribution of it", axis.name),
                    "Parameters must be sharded or replicated along every axis",
                ));
            }
            let sharded = meshes.complete(&mut layout).map_err(|(what, help)| refuse(what, help))?;
            let grad = object.getattr("grad")?;
            if given_here
                && handles::is_distributed(&grad)?
                && let GradientLayout::Like(added) = handles::gradient_layout(&grad, &object)?
            {
                for at in added {
                    layout.add_contributions(at);
                }
            }
            let (wanted, got) = (local_shape(&shape, &layout), local.size());
            if got.len() != wanted.len()
                || got.iter().zip(&wanted).any(|(a, b)| usize::try_from(*a) != Ok(*b))
            {
                let what = format!(
                    "{got:?} of {shape:?} are stored here where contiguous chunks would be {wanted:?}"
                );
                return Err(refuse(what, "Shard with fully_shard, parallelize_module or distribute_tensor"));
            }
            let existing = states.get(index);
            let spec = ParamSpec { index, stream, name, shape, dtype, transposed: None };
            let states = existing
                .into_iter()
                .flatten()
                .filter_map(|(role, (name, shape))| {
                    let bytes = (name == DType::Q8.name()).then_some(DType::Q8);
                    Some((role.clone(), (bytes.or(DType::parse(name).ok())?, shape.clone())))
                })
                .collect();
            let frozen = !object.getattr("requires_grad")?.extract::<bool>()? && grad.is_none();
            let device = Device::counted(&local).map_err(super::error::to_python)?;
            let multiprocessors = *sizes.entry(device).or_insert_with(|| multiprocessors(device));
            let place = Place { device, matrix_units: local.device().is_cuda(), multiprocessors };
            params.push(ParamInput { spec, layout, named: sharded, group: number, place, frozen, states });
        }
    }
    Ok(params)
}

/// Name of a way to run a bucket, with bytes by axis.
type Way = (String, Vec<(String, f64)>);

impl PyPlan {
    fn compile(py: Python<'_>, groups: &[Bound<'_, PyDict>], params: Vec<ParamInput>) -> PyResult<Self> {
        let groups = groups.iter().map(group::spec).collect::<PyResult<Vec<_>>>()?;
        let plan = py.enter(|| Plan::build(params, &groups))?;
        Ok(Self { plan: Arc::new(plan), groups })
    }
}

#[pymethods]
impl PyPlan {
    /// Compiles the plan of these groups. `states`: for each parameter dtype name and shape of the states that exist,
    /// by role; empty when there are none. `meshes`: the axes that the user passed. `layouts`: global shapes and
    /// layouts of the parameters, whose tensors then are what one simulated rank stores.
    #[new]
    #[pyo3(signature = (groups, states, meshes=None, layouts=None))]
    fn new(
        py: Python<'_>,
        groups: Vec<Bound<'_, PyDict>>,
        states: Vec<States>,
        meshes: Option<handles::Meshes>,
        layouts: Option<Simulated>,
    ) -> PyResult<Self> {
        let params = inputs(&groups, &states, &meshes.unwrap_or_default(), layouts)?;
        Self::compile(py, &groups, params)
    }

    /// Compiles the plan of one rank of a mesh that is not there. `groups`: dicts with an algorithm and its settings;
    /// `params`: name, global shape, dtype, group and spelled-out layout of each parameter.
    #[staticmethod]
    #[pyo3(signature = (groups, params, meshes=None))]
    fn of_shapes(
        py: Python<'_>,
        groups: Vec<Bound<'_, PyDict>>,
        params: Vec<Described>,
        meshes: Option<handles::Meshes>,
    ) -> PyResult<Self> {
        let meshes = meshes.unwrap_or_default();
        let input = |(index, (name, shape, dtype, group, axes)): (usize, Described)| {
            let mut layout = handles::spelled(axes);
            let named = meshes.complete(&mut layout).map_err(pyo3::exceptions::PyValueError::new_err)?;
            let dtype = DType::parse(&dtype).map_err(super::error::to_python)?;
            let stream = index as u64;
            let spec = ParamSpec { index, stream, name, shape, dtype, transposed: None };
            let place = groups.get(group).map_or(Ok(Place::HOST), group::place)?;
            Ok(ParamInput { spec, layout, named, group, place, frozen: false, states: BTreeMap::new() })
        };
        let params = params.into_iter().enumerate().map(input).collect::<PyResult<Vec<_>>>()?;
        Self::compile(py, &groups, params)
    }

    /// Floating-point operations of a step: on what this rank stores, on the whole matrices that it takes, the same of
    /// the rank that takes most, and the mean over the ranks.
    fn work(&self) -> (f64, f64, f64, f64) {
        let work = self.plan.work();
        (work.local, work.whole, work.whole_most, work.whole_mean)
    }

    /// Of each compute instruction: floating-point operations on shards and on whole matrices, and bytes that are read and
    /// written.
    fn costs(&self) -> Vec<(f64, f64, f64)> {
        self.plan.costs().into_iter().map(|cost| (cost.local, cost.whole, cost.bytes)).collect()
    }

    /// Refuses parameters that cannot be worked on where they are and, with `gradients`, gradients that no step could use,
    /// before anything is allocated.
    fn preflight(&self, py: Python<'_>, groups: Vec<Bound<'_, PyDict>>, gradients: bool) -> PyResult<()> {
        let lists = groups.iter().map(group::params).collect::<PyResult<Vec<_>>>()?;
        let objects: Vec<_> = lists.iter().flat_map(PyListMethods::iter).collect();
        let local = |object| tensor::unpack(&handles::local(object)?, "parameter");
        let locals = objects.iter().map(local).collect::<PyResult<Vec<_>>>()?;
        check_devices(&self.plan, &locals).map_err(super::error::to_python)?;
        if !gradients {
            return Ok(());
        }
        for ((object, param), planned) in objects.iter().zip(&locals).zip(&self.plan.params) {
            let grad = object.getattr("grad")?;
            if !grad.is_none() {
                let grad = gradient(object, &grad, planned.spec.dtype)
                    .map_err(|e| super::error::with_name(py, &e, &planned.spec.name))?;
                if let Gradient::Ready { local, .. } = grad {
                    check_gradient(&local, param, &planned.spec.name).map_err(super::error::to_python)?;
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

    /// Transfers between ranks, in the order of the indices in `schedule`.
    #[getter]
    fn transfers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for transfer in &self.plan.transfers {
            let entry = PyDict::new(py);
            let kind = match transfer.collective {
                Collective::AllToAll => "all_to_all",
                Collective::ReduceScatter(_) => "reduce_scatter",
                Collective::AllGather => "all_gather",
                Collective::AllReduce(_) => "all_reduce",
                Collective::Nothing | Collective::Slice => "nothing",
            };
            entry.set_item("kind", kind)?;
            entry.set_item("bucket", transfer.bucket)?;
            entry.set_item("buffer", &transfer.buffer)?;
            entry.set_item("axis", &transfer.axis.name)?;
            entry.set_item("ranks", &transfer.axis.ranks)?;
            entry.set_item("coordinate", transfer.axis.coordinate)?;
            entry.set_item("lines", &transfer.lines)?;
            entry.set_item("dtype", transfer.dtype.name())?;
            entry.set_item("send", (transfer.send.offset, transfer.send.bytes))?;
            entry.set_item("recv", (transfer.recv.offset, transfer.recv.bytes))?;
            entry.set_item("send_bytes", &transfer.send_bytes)?;
            entry.set_item("recv_bytes", &transfer.recv_bytes)?;
            entry.set_item("when_due", transfer.guarded)?;
            list.append(entry)?;
        }
        Ok(list)
    }

    /// The parameters whose momentum differs between replicas.
    #[getter]
    fn decoupled(&self) -> Vec<usize> {
        let mut params: Vec<usize> =
            self.plan.decoupled().flat_map(|b| b.units.iter().map(|u| u.param)).collect();
        params.sort_unstable();
        params.dedup();
        params
    }

    /// Lines that the ranks of an axis must agree on, one for each parameter that lives on it.
    fn agreed(&self, ranks: Vec<u64>) -> Vec<String> {
        self.plan.agreed(&ranks)
    }

    /// Of each bucket that could run in several ways: its number, the name of the chosen one, and of each its name and the
    /// bytes by axis that a process sends in a step, on average over the processes.
    fn routes(&self) -> Vec<(usize, String, Vec<Way>)> {
        let buckets = self.plan.buckets.iter().enumerate().filter(|(_, b)| !b.alternatives.is_empty());
        let routes = buckets.map(|(number, bucket)| {
            let ways = bucket.alternatives.iter().map(|way| (bucket.route(&way.gathered), bucket.sent(way)));
            (number, bucket.route(&bucket.gathered), ways.collect())
        });
        routes.collect()
    }

    /// Parts of the workspace, one for each device in the order in which a session takes them: the number of a parameter there,
    /// and bytes.
    #[getter]
    fn arena_parts(&self) -> Vec<(usize, usize)> {
        let first = |device| self.plan.params.iter().position(|planned| planned.device == device);
        let parts = self.plan.arena.parts.iter();
        parts.map(|(device, range)| (first(*device).unwrap_or(0), range.bytes)).collect()
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
        self.plan.params.iter().map(|m| self.plan.algorithms[m.algorithm].name()).collect()
    }

    /// The stream of the random numbers of each parameter.
    #[getter]
    fn streams(&self) -> Vec<u64> {
        self.plan.params.iter().map(|m| m.spec.stream).collect()
    }

    /// Returns a dict for each state, by parameter. It has role, dtype, global shape, (start, length) of the stored part by
    /// dimension, the seed of a normal start or None, and for each axis of its mesh the dimension that is sharded or None.
    /// A quantized state has its block length and whether it is signed, others None; next is whether it may be quantized.
    /// An owner-sharded state has the blocks that are here, as offset, rows, columns and row stride in the whole state,
    /// with the ranks of each axis; others None.
    fn state_specs<'py>(&self, py: Python<'py>) -> PyResult<Vec<Vec<Bound<'py, PyDict>>>> {
        let make = |s: &LocalState| {
            let seed = match s.spec.init {
                Init::Zeros => None,
                Init::Normal { seed } => Some(seed),
            };
            let entry = PyDict::new(py);
            entry.set_item("role", s.name())?;
            entry.set_item("dtype", s.spec.dtype.name())?;
            entry.set_item("shape", &s.spec.shape)?;
            entry.set_item("spans", &s.spans)?;
            entry.set_item("seed", seed)?;
            entry.set_item("on_host", s.spec.on_host)?;
            entry.set_item("shards", &s.shards)?;
            let quantized = s.spec.quantized.filter(|_| s.spec.dtype.is_quantized());
            entry.set_item("quantized", quantized.map(|c| (c.block, c.dtype == DType::Q8)))?;
            entry.set_item("codable", s.spec.quantized.is_some())?;
            entry.set_item("rounded", s.rounding.is_some())?;
            let places = |owned: &Owned| {
                let places = owned.blocks.iter().map(|(_, r)| (r.offset, r.rows, r.cols, r.stride));
                places.collect::<Vec<_>>()
            };
            let owned = s.owned.as_ref();
            let owned = owned.map(|own| (places(own), own.axes.clone(), own.is_sum, own.takes));
            entry.set_item("owned", owned)?;
            entry.set_item("stored", s.shape())?;
            Ok::<_, PyErr>(entry)
        };
        // Neighbours are often alike: they share a dict, as making thousands takes longer than a step.
        let mut recent: VecDeque<(&LocalState, Bound<'py, PyDict>)> = VecDeque::new();
        let mut row = |s| {
            if let Some((_, known)) = recent.iter().find(|(other, _)| *other == s) {
                return Ok(known.clone());
            }
            let entry = make(s)?;
            recent.push_front((s, entry.clone()));
            recent.truncate(8);
            Ok(entry)
        };
        self.plan.params.iter().map(|m| m.states.iter().map(&mut row).collect()).collect()
    }

    /// One row per parameter for `explain()`.
    fn rows<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let rows = PyList::empty(py);
        let (owners, wire, routes) = (self.plan.owners(), self.plan.wire_bytes(), self.plan.routes());
        for planned in &self.plan.params {
            let algorithm = &self.plan.algorithms[planned.algorithm];
            let about = if planned.frozen {
                Description { view: "frozen".into(), ..Description::default() }
            } else {
                let blocks = algorithm.blocks(&planned.spec).map_err(super::error::to_python)?;
                algorithm.describe(&planned.spec, &blocks, planned.num_shards(algorithm))
            };
            let row = PyDict::new(py);
            row.set_item("name", &planned.spec.name)?;
            row.set_item("shape", pyo3::types::PyTuple::new(py, &planned.spec.shape)?)?;
            row.set_item("dtype", planned.spec.dtype.name())?;
            row.set_item("placements", placements(&planned.layout))?;
            row.set_item("group", planned.group)?;
            row.set_item("algorithm", algorithm.name())?;
            row.set_item("view", about.view)?;
            row.set_item("transposed", planned.spec.transposed)?;
            row.set_item("lr_factor", about.lr_factor)?;
            row.set_item("rank", about.rank)?;
            row.set_item("roundoff", about.roundoff)?;
            row.set_item("owner", owners.get(&planned.spec.index).map_or("local", String::as_str))?;
            row.set_item("route", routes.get(&planned.spec.index))?;
            row.set_item("state_bytes", planned.states.iter().map(LocalState::bytes).sum::<usize>())?;
            row.set_item("flops", about.flops)?;
            row.set_item("wire_bytes", wire.get(&planned.spec.index).copied().unwrap_or(0))?;
            rows.append(row)?;
        }
        Ok(rows)
    }

    /// Sources of kernels that its steps ask for on a device.
    fn sources(&self) -> Vec<&'static str> {
        crate::session::sources(&self.plan)
    }

    /// A numeric column of `rows`, as a NumPy array.
    fn column<'py>(&self, py: Python<'py>, key: &str) -> PyResult<Bound<'py, PyArray1<f64>>> {
        let mut values = Vec::with_capacity(self.plan.params.len());
        for row in self.rows(py)?.iter() {
            let value = row.get_item(key)?;
            values.push(if value.is_none() { f64::NAN } else { value.extract()? });
        }
        Ok(values.into_pyarray(py))
    }

    /// Cells of the buckets and of the instructions, as `str()` has them.
    fn _cells(&self) -> (Vec<[String; 5]>, Vec<[String; 4]>) {
        (self.plan.bucket_cells(), self.plan.instruction_cells())
    }

    fn _repr_html_<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("oxidion._core.table")?.call_method1("plan_html", (slf,))
    }

    fn __rich__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("oxidion._core.table")?.call_method1("plan_rich", (slf,))
    }

    fn __str__(&self) -> String {
        self.plan.explain()
    }

    fn __repr__(&self) -> String {
        let plan = &self.plan;
        format!(
            "<Plan: {} parameters, {} buckets, {} bytes>",
            plan.params.len(),
            plan.buckets.len(),
            plan.arena.bytes
        )
    }
}
