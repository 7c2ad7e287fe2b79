//! The thread pool of the CPU kernels: as many threads as torch uses, built when first needed.

use std::sync::{Arc, Mutex, PoisonError};

use rayon::ThreadPool;
use rayon::prelude::*;

static POOL: Mutex<Option<(usize, Arc<ThreadPool>)>> = Mutex::new(None);
static THREADS: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(1);

/// Sets the number of threads for the kernels that follow; the pool is rebuilt only when it changes.
pub fn set(threads: usize) {
    THREADS.store(threads.max(1), std::sync::atomic::Ordering::Relaxed);
}

/// The number of threads in force.
#[must_use]
pub fn get() -> usize {
    THREADS.load(std::sync::atomic::Ordering::Relaxed)
}

/// Forgets the pool. A forked child calls this: the threads stayed with its parent.
pub fn forget_after_fork() {
    // Joining threads that do not exist in the child would wait for ever, and so would a lock that was held.
    if let Ok(mut slot) = POOL.try_lock() {
        std::mem::forget(slot.take());
    }
}

/// Runs `work` inside the pool, or on the calling thread when one thread is in force or no pool can be had.
pub fn run<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    let threads = get();
    if threads == 1 {
        return work();
    }
    let pool = {
        let mut slot = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        if slot.as_ref().is_none_or(|(n, _)| *n != threads) {
            let built = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(|i| format!("oxidion-{i}"))
                .build();
            *slot = built.ok().map(|pool| (threads, Arc::new(pool)));
        }
        slot.as_ref().map(|(_, pool)| Arc::clone(pool))
    };
    match pool {
        Some(pool) => pool.install(work),
        None => work(),
    }
}

/// Runs `task(slot, item)` for all items: each of `slots` workers takes one item after another. Inside the pool where
/// there is more than one slot; on the calling thread where there is one.
pub fn share(slots: usize, items: usize, task: impl Fn(usize, usize) + Sync + Send) {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let work = |slot: usize| {
        loop {
            let item = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            if item >= items {
                return;
            }
            task(slot, item);
        }
    };
    if slots <= 1 {
        return work(0);
    }
    run(|| (0..slots).into_par_iter().with_max_len(1).for_each(work));
}
