//! As much of rayon as `src/threads` names, on threads that live as long as a scope: Miri then knows all pointers, and
//! nothing is left at the end.

use std::thread;

/// Builder of a [`ThreadPool`].
#[derive(Debug, Default)]
pub struct ThreadPoolBuilder;

/// Pool that keeps no threads.
#[derive(Debug)]
pub struct ThreadPool;

/// Scope of threads.
#[derive(Debug)]
pub struct Scope<'s, 'e: 's>(&'s thread::Scope<'s, 'e>);

impl ThreadPoolBuilder {
    /// Builder without settings.
    #[must_use]
    pub fn new() -> Self {
        Self
    }
    /// Sets nothing: a scope starts one thread for each call of [`Scope::spawn`].
    #[must_use]
    pub fn num_threads(self, _: usize) -> Self {
        self
    }
    /// Sets nothing.
    #[must_use]
    pub fn thread_name(self, _: impl FnMut(usize) -> String) -> Self {
        self
    }
    /// Builds the pool.
    ///
    /// # Errors
    /// Never.
    pub fn build(self) -> std::io::Result<ThreadPool> {
        Ok(ThreadPool)
    }
}

impl ThreadPool {
    /// Runs `work` on this thread, and waits for the threads that it starts.
    pub fn in_place_scope<'e, R>(&self, work: impl for<'s> FnOnce(&Scope<'s, 'e>) -> R) -> R {
        thread::scope(|scope| work(&Scope(scope)))
    }
}

impl<'s> Scope<'s, '_> {
    /// Starts a thread.
    pub fn spawn(&self, work: impl FnOnce(()) + Send + 's) {
        self.0.spawn(|| work(()));
    }
}
