//! Devices: opened once, with the kernels that were loaded on them, and the one that a thread launches on.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::compile;
use super::driver::{self, Context, Function, Grid, Module, Stream};
use super::sources::Source;
use crate::batch;
use crate::error::{Error, Result};

/// How the driver names a device whose memory is that of the host.
const EMULATED: &str = "oxidion emulator";

/// A device that this process uses.
#[derive(Debug)]
pub(super) struct Device {
    ordinal: usize,
    context: Context,
    architecture: String,
    emulated: bool,
    modules: Mutex<BTreeMap<&'static str, Module>>,
    functions: Mutex<BTreeMap<String, Function>>,
}

static DEVICES: Mutex<BTreeMap<usize, &'static Device>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// What the thread launches on.
    static CURRENT: Cell<Option<(&'static Device, Stream)>> = const { Cell::new(None) };
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device {
    /// The device, opened when it is asked for first. It stays for as long as the process.
    fn get(ordinal: usize) -> Result<&'static Self> {
        let mut devices = lock(&DEVICES);
        if let Some(&device) = devices.get(&ordinal) {
            return Ok(device);
        }
        let found = driver::open(ordinal)?;
        let device = Self {
            ordinal,
            context: found.context,
            architecture: compile::architecture(found.capability)?,
            emulated: found.name == EMULATED,
            modules: Mutex::default(),
            functions: Mutex::default(),
        };
        let device: &'static Self = Box::leak(Box::new(device));
        devices.insert(ordinal, device);
        Ok(device)
    }

    /// A kernel of a source, loaded when it is asked for first.
    fn function(&self, source: &'static Source, name: &str, shared: u32, stream: Stream) -> Result<Function> {
        let mut functions = lock(&self.functions);
        if let Some(&function) = functions.get(name) {
            return Ok(function);
        }
        let mut modules = lock(&self.modules);
        let module = if let Some(&module) = modules.get(source.name) {
            module
        } else {
            // Loading waits for the device, which ends a capture.
            if driver::is_capturing(stream)? {
                return Err(Error::Cuda(format!(
                    "{name} is not loaded on device {} yet: take one step before the capture of a graph",
                    self.ordinal
                )));
            }
            let module = driver::load(&compile::image(source, &self.architecture)?)?;
            modules.insert(source.name, module);
            module
        };
        let function = driver::function(module, name, shared)?;
        functions.insert(name.to_owned(), function);
        Ok(function)
    }
}

/// A thread's stay on a device: until it is dropped, kernels are launched on one stream of it.
#[derive(Debug)]
pub struct Entered {
    before: Option<Context>,
    outer: Option<(&'static Device, Stream)>,
}

/// Has the kernels of this thread launched on a stream of a device.
///
/// # Errors
/// [`Error::Cuda`] where there is no driver or no such device.
pub fn enter(ordinal: usize, stream: usize) -> Result<Entered> {
    let device = Device::get(ordinal)?;
    let current = driver::current()?;
    let before = (current != device.context).then_some(current);
    if before.is_some() {
        driver::set_current(device.context)?;
    }
    Ok(Entered { before, outer: CURRENT.replace(Some((device, Stream(stream)))) })
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(self.outer);
        if let Some(before) = self.before
            && let Err(error) = driver::set_current(before)
        {
            log::error!(target: "oxidion.cuda", "{error}");
        }
    }
}

/// Launches a kernel where this thread is.
///
/// # Safety
/// As [`driver::launch`]; `shared` is the same for every launch of a kernel.
pub(super) unsafe fn launch<Parameters>(
    source: &'static Source,
    name: &str,
    grid: Grid,
    parameters: &Parameters,
) -> Result<()> {
    let here = CURRENT.get().ok_or_else(|| Error::Internal("a launch without a device".into()))?;
    let (device, stream) = here;
    let function = device.function(source, name, grid.shared, stream)?;
    // SAFETY: the caller upholds it.
    unsafe { driver::launch(function, grid, stream, parameters) }
}

/// Whether this thread launches on a device.
pub(in super::super) fn is_entered() -> bool {
    CURRENT.get().is_some()
}

/// Has memory of the host count as memory of device 0, where that is the emulator: for tests without a device.
///
/// # Errors
/// [`Error::Cuda`] where device 0 is another.
pub fn emulate() -> Result<()> {
    if !Device::get(0)?.emulated {
        return Err(Error::Cuda("only the emulator of the tests has the memory of the host".into()));
    }
    batch::emulate();
    Ok(())
}
