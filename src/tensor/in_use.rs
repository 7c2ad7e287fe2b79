//! Memory that a computation uses while it calls a function of the user, who can replace or resize all of it.

use std::cell::RefCell;

use super::Held;
use crate::error::{Error, Result};

thread_local! {
    static IN_USE: RefCell<Vec<(Held, String)>> = const { RefCell::new(Vec::new()) };
}

/// Scope in which a computation of this thread uses the storages of tensors.
#[derive(Debug)]
pub struct InUse {
    /// Storages of the computation around this one: a function of the user may step another optimizer.
    before: Vec<(Held, String)>,
}

impl InUse {
    /// Begins the scope, with the storages and the names of their parameters.
    #[must_use]
    pub fn begin(storages: Vec<(Held, String)>) -> Self {
        Self { before: IN_USE.replace(storages) }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        // What was in use is dropped after the exchange, as an object that goes may run Python.
        let _ended = IN_USE.replace(std::mem::take(&mut self.before));
    }
}

/// Looks again at the storages that are in use, after a function of the user.
///
/// # Errors
/// `Error::Mode` for one with another storage or a resized one.
pub fn look_at_what_is_in_use() -> Result<()> {
    IN_USE.with_borrow(|all| match all.iter().find(|(held, _)| !held.are_there(0..held.len())) {
        None => Ok(()),
        Some((_, name)) => Err(replaced(name)),
    })
}

/// The complaint about memory that has gone in the middle of a step.
#[must_use]
pub fn replaced(name: &str) -> Error {
    Error::Mode(format!(
        "{name}: the parameter, its gradient or one of its states was given other memory, or was resized, while a step \
         used it. Leave them alone within step(): in callbacks, hooks, handlers and other threads"
    ))
}
