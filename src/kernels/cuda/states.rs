//! States of the sources on a device: which are loaded, and which are off and why.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::driver::Function;
use super::sources::{Source, When};
use crate::error::{Error, Result};

/// Origin of machine code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It came with the package.
    Shipped,
    /// It was in the user's folder.
    Kept,
    /// NVRTC made it in this process.
    Compiled,
    /// NVRTC made PTX in this process, and the driver the rest.
    Ptx,
}

impl Origin {
    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Shipped => "shipped",
            Self::Kept => "kept",
            Self::Compiled => "compiled",
            Self::Ptx => "PTX",
        }
    }
}

/// State of a source on a device.
#[derive(Clone, Debug, PartialEq)]
pub enum State {
    /// Nothing has asked for it.
    NotLoaded,
    /// Its kernels may be launched.
    Loaded {
        /// Origin of its machine code.
        origin: Origin,
        /// Time that this took.
        seconds: f64,
    },
    /// It is not used, for this reason.
    Off(String),
}

/// Sources that are off in this process, on whatever device.
static REFUSED: Mutex<BTreeMap<&'static str, String>> = Mutex::new(BTreeMap::new());

/// Has a source off on devices that are opened later.
pub(super) fn refuse(name: &'static str, reason: &str) {
    lock(&REFUSED).insert(name, reason.to_owned());
}

/// Sources and functions that are loaded on a device.
#[derive(Debug, Default)]
pub(super) struct Loaded {
    sources: BTreeMap<&'static str, (When, State)>,
    functions: BTreeMap<String, (Function, &'static str)>,
    /// SHA-256 of the machine code of each source that is loaded, in hexadecimal digits.
    images: BTreeMap<&'static str, String>,
    /// Sources that operations pass over, whatever their state, while others are checked.
    hidden: Vec<String>,
}

impl Loaded {
    /// Tests whether a source still has to be loaded.
    pub(super) fn is_missing(&self, name: &str) -> bool {
        self.state(name) == State::NotLoaded
    }

    pub(super) fn is_on(&self, name: &str) -> bool {
        matches!(self.sources.get(name), Some((_, State::Loaded { .. })))
            && !self.hidden.iter().any(|hidden| hidden == name)
    }

    /// Has no operation use these sources until this is called again.
    pub(super) fn hide(&mut self, names: Vec<String>) {
        self.hidden = names;
    }

    /// Tests whether a source that is loaded then is on.
    pub(super) fn has(&self, when: When) -> bool {
        self.sources.values().any(|(then, state)| *then == when && matches!(state, State::Loaded { .. }))
    }

    pub(super) fn state(&self, name: &str) -> State {
        if let Some((_, state)) = self.sources.get(name) {
            return state.clone();
        }
        lock(&REFUSED).get(name).map_or(State::NotLoaded, |reason| State::Off(reason.clone()))
    }

    /// Why a source is off, if it is.
    pub(super) fn reason(&self, name: &str) -> Option<String> {
        match self.state(name) {
            State::Off(reason) => Some(reason),
            _ => None,
        }
    }

    pub(super) fn turn_on(
        &mut self,
        source: &Source,
        functions: Vec<(Function, String)>,
        (state, image): (State, String),
    ) {
        self.sources.insert(source.name, (source.when, state));
        self.images.insert(source.name, image);
        self.functions.extend(functions.into_iter().map(|(function, name)| (name, (function, source.name))));
    }

    /// SHA-256 of the machine code of the sources that are on.
    pub(super) fn images(&self) -> Vec<(&'static str, String)> {
        let on = self.images.iter().filter(|(name, _)| self.is_on(name));
        on.map(|(name, image)| (*name, image.clone())).collect()
    }

    /// Turns a source off: none of its kernels is launched afterwards.
    pub(super) fn turn_off(&mut self, source: &Source, reason: &str) {
        self.sources.insert(source.name, (source.when, State::Off(reason.to_owned())));
        self.functions.retain(|_, (_, of)| *of != source.name);
    }

    /// A kernel by its name.
    pub(super) fn function(&self, name: &str) -> Result<Function> {
        let found = self.functions.get(name).map(|(function, _)| *function);
        found.ok_or_else(|| Error::Internal(format!("there is no kernel {name}, or its source is off")))
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
