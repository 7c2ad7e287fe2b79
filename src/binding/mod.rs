//! The border to Python: unpacking, the interpreter lock, errors. No mathematics, no scheduling policy.

#![allow(clippy::needless_pass_by_value)] // pyo3 hands arguments over by value

mod cuda;
mod defaults;
mod enter;
mod error;
mod functional;
mod gradient;
mod group;
mod handles;
mod logs;
mod plan;
mod session;
mod tensor;

use pyo3::prelude::*;

/// The extension module.
#[pymodule(gil_used = true)]
fn _oxidion(module: &Bound<'_, PyModule>) -> PyResult<()> {
    logs::install(module.py())?;
    tensor::check_shim()?;
    enter::check_instruction_sets()?;
    enter::keep_libtorch_from_hidden_tiles(module.py())?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    error::register(module)?;
    module.add_class::<plan::PyPlan>()?;
    module.add_class::<session::PySession>()?;
    module.add_function(wrap_pyfunction!(plan::algorithms, module)?)?;
    module.add_function(wrap_pyfunction!(plan::state_names, module)?)?;
    module.add_function(wrap_pyfunction!(defaults::set_defaults, module)?)?;
    module.add_function(wrap_pyfunction!(handles::axes_of, module)?)?;
    module.add_function(wrap_pyfunction!(tensor::fill_normal, module)?)?;
    module.add_function(wrap_pyfunction!(tensor::fill_signs, module)?)?;
    module.add_function(wrap_pyfunction!(enter::forget_threads_after_fork, module)?)?;
    module.add_function(wrap_pyfunction!(enter::cpu_features, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::prepare_devices, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::count_as, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::source_states, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::load_sources, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::turn_source_off, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::device_facts, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::source_images, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::hide_sources, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::exchange_on_device, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::symmetric_classes, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::set_symmetric_wins, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::symmetric_product_on_device, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::source_of_kernel, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::graphs_refusal, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::device_kernels, module)?)?;
    module.add_function(wrap_pyfunction!(cuda::generated_headers, module)?)?;
    functional::register(module)
}
