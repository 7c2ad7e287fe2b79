//! The threads of the CPU kernels: as many as torch uses, and its own ones where it has OpenMP. A pool of rayon elsewhere,
//! and in forked processes.

mod openmp;
mod team;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

pub use openmp::is_forked;
use rayon::ThreadPool;
use team::Team;

static POOL: Mutex<Option<(usize, Arc<ThreadPool>)>> = Mutex::new(None);
static THREADS: AtomicUsize = AtomicUsize::new(1);

/// Sets the number of threads for the kernels that follow.
pub fn set(threads: usize) {
    THREADS.store(threads.max(1), Ordering::Relaxed);
}

/// The number of threads in force.
#[must_use]
pub fn get() -> usize {
    THREADS.load(Ordering::Relaxed)
}

/// Forgets all threads. A forked child calls this: they stayed with its parent.
pub fn forget_after_fork() {
    openmp::forget_after_fork();
    // Joining threads that do not exist in the child would wait for ever, and so would a lock that was held.
    if let Ok(mut slot) = POOL.try_lock() {
        std::mem::forget(slot.take());
    }
}

/// Runs `work` on the calling thread, with the others available for every `each` in it: one region instead of many.
pub fn run<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    let threads = get();
    if threads == 1 || Team::is_there() {
        return work();
    }
    gather(threads, &openmp::run, work)
}

/// Gets threads for a team by `hire`, or else from the pool, and leads them.
fn gather<R: Send>(
    threads: usize,
    hire: &dyn Fn(usize, &(dyn Fn() + Sync)) -> bool,
    work: impl FnOnce() -> R + Send,
) -> R {
    let team = Team::new();
    let (leader, work, result) = (std::thread::current().id(), Mutex::new(Some(work)), Mutex::new(None));
    let lead = || {
        let work = work.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(work) = work {
            *result.lock().unwrap_or_else(PoisonError::into_inner) = Some(team.lead(work));
        }
    };
    let member = || if std::thread::current().id() == leader { lead() } else { team.help() };
    if !hire(threads, &member) {
        match pool(threads) {
            Some(pool) => pool.in_place_scope(|scope| {
                (1..threads).for_each(|_| scope.spawn(|_| team.help()));
                lead();
            }),
            None => lead(),
        }
    }
    match result.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(Ok(result)) => result,
        Some(Err(panic)) => std::panic::resume_unwind(panic),
        None => unreachable!("OpenMP and the pool run a region on the calling thread too"),
    }
}

/// The pool, built when first needed and when the number of threads changes.
fn pool(threads: usize) -> Option<Arc<ThreadPool>> {
    let mut slot = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    if slot.as_ref().is_none_or(|(n, _)| *n != threads) {
        let name = |i| format!("oxidion-{i}");
        let built = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(name).build();
        *slot = built.ok().map(|pool| (threads, Arc::new(pool)));
    }
    slot.as_ref().map(|(_, pool)| Arc::clone(pool))
}

/// Runs `task(item)` for all items `0..count`, each on whichever thread is free.
pub fn each(count: usize, task: impl Fn(usize) + Sync) {
    if count < 2 || get() == 1 {
        return (0..count).for_each(task);
    }
    let shared = || Team::with_current(|team| team.each(count, &task));
    // Another thread may have set their number to one meanwhile: then there is no team in a region either.
    if shared().or_else(|| run(shared)).is_none() {
        (0..count).for_each(task);
    }
}

/// Runs tasks as `each` does; returns their results in the order of the items.
pub fn map<T: Send>(count: usize, task: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let results: Vec<Mutex<Option<T>>> = (0..count).map(|_| Mutex::default()).collect();
    each(count, |i| *results[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(task(i)));
    let results =
        results.into_iter().map(|result| result.into_inner().unwrap_or_else(PoisonError::into_inner));
    results.flatten().collect()
}

/// Runs tasks as `each` does on chunks of `length` elements, the last one shorter: `task(number, chunk)`.
pub fn chunks<T: Send>(all: &mut [T], length: usize, task: impl Fn(usize, &mut [T]) + Sync) {
    let parts: Vec<_> = all.chunks_mut(length.max(1)).map(Mutex::new).collect();
    each(parts.len(), |i| task(i, &mut parts[i].lock().unwrap_or_else(PoisonError::into_inner)));
}

/// Runs `task(slot, item)` for all items: each of `slots` workers takes one item after another.
pub fn share(slots: usize, items: usize, task: impl Fn(usize, usize) + Sync) {
    let next = AtomicUsize::new(0);
    each(slots, |slot| {
        loop {
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= items {
                return;
            }
            task(slot, item);
        }
    });
}

#[cfg(test)]
mod tests;
