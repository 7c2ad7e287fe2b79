//! Records for Python's `logging`. Those of a computation wait until it is done: handlers are Python, which can free the
//! memory that it uses.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use log::{Level, LevelFilter, Log, Metadata, Record};
use pyo3::prelude::*;

/// Number of computations that are running.
static RUNNING: AtomicUsize = AtomicUsize::new(0);
/// Records that wait for their end: level, target, text.
static WAITING: Mutex<Vec<(Level, String, String)>> = Mutex::new(Vec::new());

/// pyo3's logger, behind the queue.
struct Queued(pyo3_log::Logger);

impl Log for Queued {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.0.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        if RUNNING.load(Ordering::Acquire) == 0 {
            self.0.log(record);
        } else {
            let waiting = (record.level(), record.target().to_owned(), record.args().to_string());
            WAITING.lock().unwrap_or_else(PoisonError::into_inner).push(waiting);
            drain(); // the last computation may have ended meanwhile
        }
    }

    fn flush(&self) {}
}

/// Installs the logger. A second import in the same process finds it installed, which is what is wanted.
pub(super) fn install(py: Python<'_>) -> PyResult<()> {
    // Levels are asked for at every record, so that a level set later counts.
    let logger = Queued(pyo3_log::Logger::new(py, pyo3_log::Caching::Loggers)?);
    if log::set_boxed_logger(Box::new(logger)).is_ok() {
        log::set_max_level(LevelFilter::Debug);
    }
    Ok(())
}

/// Runs a computation, and logs its records after it.
pub(super) fn after<R>(computation: impl FnOnce() -> R) -> R {
    RUNNING.fetch_add(1, Ordering::AcqRel);
    let result = computation();
    RUNNING.fetch_sub(1, Ordering::AcqRel);
    drain();
    result
}

/// Logs the records that wait, if no computation is running.
fn drain() {
    // One at a time: a handler may step an optimizer, which comes here too.
    while let Some((level, target, text)) = next() {
        log::logger()
            .log(&Record::builder().level(level).target(&target).args(format_args!("{text}")).build());
    }
}

/// Forgets, in a forked child, the computations of threads that stayed with the parent.
pub(super) fn forget() {
    RUNNING.store(0, Ordering::Release);
    WAITING.clear_poison();
    // A thread of the parent may have had the lock for ever.
    if let Ok(mut waiting) = WAITING.try_lock() {
        waiting.clear();
    }
}

/// The first record that waits, if no computation is running.
fn next() -> Option<(Level, String, String)> {
    let mut waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
    (RUNNING.load(Ordering::Acquire) == 0 && !waiting.is_empty()).then(|| waiting.remove(0))
}
