//! The one way into the core: interpreter released, gradients and modes of torch off, panics turned into errors.

use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::prelude::*;

use super::error::to_python;
use crate::error::{Error, Result};
use crate::linalg::OneThread;
use crate::tensor::Dispatch;
use crate::threads;

/// Entering the core from Python.
pub(super) trait Enter {
    /// Runs `work` on this thread without the interpreter, without recording gradients, and with operations of libtorch that
    /// do not enter Python.
    fn enter<R: Send>(self, work: impl FnOnce() -> Result<R> + Send) -> PyResult<R>;

    /// As `enter`, with the interpreter: other threads run no Python meanwhile.
    fn enter_attached<R>(self, work: impl FnOnce() -> Result<R>) -> PyResult<R>;
}

impl Enter for Python<'_> {
    fn enter<R: Send>(self, work: impl FnOnce() -> Result<R> + Send) -> PyResult<R> {
        self.detach(|| guarded(work)).map_err(to_python)
    }

    fn enter_attached<R>(self, work: impl FnOnce() -> Result<R>) -> PyResult<R> {
        guarded(work).map_err(to_python)
    }
}

fn guarded<R>(work: impl FnOnce() -> Result<R>) -> Result<R> {
    // In a forked child it would wait for ever for threads that stayed with the parent.
    let _alone = threads::is_forked().then(OneThread::begin);
    let _below = Dispatch::to_python(false);
    catch_unwind(AssertUnwindSafe(|| tch::no_grad(work))).unwrap_or_else(|panic| {
        let said = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("no message");
        Err(Error::Internal(format!("the core panicked: {said}")))
    })
}

/// Refuses a name of no instruction set in the environment.
pub(super) fn check_instruction_sets() -> PyResult<()> {
    crate::kernels::isa_limit().map(drop).map_err(pyo3::exceptions::PyValueError::new_err)
}

/// Drops the thread pool in a forked child, which has none of its threads, and what they had to log.
#[pyfunction]
pub(super) fn forget_threads_after_fork() {
    threads::forget_after_fork();
    super::logs::forget();
}

/// Keeps libtorch's products from AMX where the CPU names it and hides its tiles: they would end the process. A setting
/// of the user goes first.
pub(super) fn keep_libtorch_from_hidden_tiles(py: Python<'_>) -> PyResult<()> {
    const LIMIT: [&str; 2] = ["ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"];
    if crate::tensor::cpu_hides_tiles() {
        let environment = py.import("os")?.getattr("environ")?;
        if environment.contains("DNNL_MAX_CPU_ISA")? {
            return Ok(()); // its older name
        }
        let set: String = environment.call_method1("setdefault", (LIMIT[0], LIMIT[1]))?.extract()?;
        log::info!(
            target: "oxidion.cpu",
            "this machine names AMX and hides its tiles, where bfloat16 products of torch crash: {}={set}",
            LIMIT[0]
        );
    }
    Ok(())
}

/// The instruction sets that the CPU kernels use on this machine, up to what `OXIDION_MAX_CPU_ISA` names.
#[pyfunction]
pub(super) fn cpu_features() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    let known = {
        use crate::kernels::{Isa, Kernel, best_isa};
        use crate::tensor::DType;
        let best = best_isa();
        [
            ("avx2", best >= Isa::Avx2),
            ("avx512f", best >= Isa::Avx512),
            ("avx512bf16", best >= Isa::Avx512Bf16),
            ("amx_bf16", Kernel::of(DType::BF16) == Some(Kernel::Bf16Amx)),
        ]
    };
    #[cfg(not(target_arch = "x86_64"))]
    let known: [(&str, bool); 0] = [];
    known.into_iter().filter_map(|(name, there)| there.then_some(name)).collect()
}
