//! Devices: opened once, with the kernels that were loaded on them, and the one that a thread launches on.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

use sha2::{Digest, Sha256};
use tch::Tensor;

use super::driver::{self, Context, Grid, Stream};
use super::sources::{Source, Sources, When};
use super::states::{self, Loaded, State, lock};
use super::{compile, tape};
use crate::error::{Error, Result};
use crate::tensor::{self, DType, Device, FlatPtr, FlatView, FlatViewMut};

/// Name that the driver gives a device whose memory is that of the host.
const EMULATED: &str = "oxidion emulator";

/// The first version of CUDA whose driver takes as many bytes of parameters as kernels have.
const FIRST_VERSION: i32 = 12_010;

/// A device that this process uses.
#[derive(Debug)]
pub(in crate::kernels) struct LoadedDevice {
    ordinal: usize,
    context: Context,
    /// The architecture that machine code is for, or why there is none.
    architecture: std::result::Result<String, String>,
    facts: Facts,
    emulated: bool,
    loaded: Mutex<Loaded>,
}

/// Facts about a device on which it depends whether its kernels are right.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Name that the driver gives it.
    pub name: String,
    /// Compute capability, if the driver knows it.
    pub capability: Option<(i32, i32)>,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// The newest version of CUDA that the driver has, as 12040 for 12.4.
    pub driver: i32,
}

/// True where a step may only use sources that were requested before it.
static ONLY_ASKED: AtomicBool = AtomicBool::new(false);

/// Says whether an operation may load sources in a step, or only those are used that were loaded before it.
pub fn use_only_asked(only: bool) {
    ONLY_ASKED.store(only, Ordering::Relaxed);
}

/// All sources, once a thread has entered a device.
static SOURCES: OnceLock<&'static Sources> = OnceLock::new();

static DEVICES: Mutex<BTreeMap<usize, &'static LoadedDevice>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// Device and stream that the thread launches on.
    static CURRENT: Cell<Option<(&'static LoadedDevice, Stream)>> = const { Cell::new(None) };
    /// The learning rate that its launches read when they run.
    static RATE: Cell<Rate> = const { Cell::new(Rate::NONE) };
}

/// A learning rate in memory of the device, as `jobs.cuh` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) struct Rate {
    at: usize,
    scalars: u32,
    kind: u8,
}

const _: () = assert!(size_of::<Rate>() == 16);

impl Rate {
    /// Nowhere: the host has multiplied what is proportional to it.
    pub(in crate::kernels) const NONE: Self = Self { at: 0, scalars: 0, kind: 0 };

    /// The one that this thread's launches read, for the scalars that have a bit.
    pub(in crate::kernels) fn of(scalars: u32) -> Self {
        let rate = RATE.get();
        if rate.at == 0 { rate } else { Self { scalars, ..rate } }
    }
}

impl LoadedDevice {
    /// The device, opened when it is asked for first. It stays for as long as the process.
    fn get(ordinal: usize) -> Result<&'static Self> {
        let mut devices = lock(&DEVICES);
        if let Some(&device) = devices.get(&ordinal) {
            return Ok(device);
        }
        let (found, driver) = (driver::open(ordinal)?, driver::version()?);
        let device = Self {
            ordinal,
            context: found.context,
            architecture: match driver {
                ..FIRST_VERSION => Err(format!(
                    "driver older than {}: it is of {}",
                    driver::versioned(FIRST_VERSION),
                    driver::versioned(driver)
                )),
                _ => compile::architecture(found.capability),
            },
            emulated: found.name == EMULATED,
            facts: Facts {
                name: found.name,
                capability: found.capability,
                multiprocessors: found.multiprocessors,
                driver,
            },
            loaded: Mutex::default(),
        };
        let device: &'static Self = Box::leak(Box::new(device));
        devices.insert(ordinal, device);
        Ok(device)
    }

    /// Tests whether a source is one for this device, whatever became of it.
    fn takes(&self, when: When) -> bool {
        !matches!(when, When::On(architecture) if self.architecture.as_deref() != Ok(architecture))
    }

    /// Loads those of the named sources that are missing into the current context, which is the device's. What cannot be
    /// loaded is off.
    fn load(&self, sources: &'static Sources, wanted: &[&str], stream: Stream) -> Result<()> {
        let mut loaded = lock(&self.loaded);
        let named = sources.all.iter().filter(|source| wanted.contains(&source.name));
        let missing: Vec<_> =
            named.filter(|s| self.takes(s.when) && loaded.is_missing(s.name)).copied().collect();
        if missing.is_empty() {
            return Ok(());
        }
        let architecture = match &self.architecture {
            Ok(architecture) => architecture,
            Err(reason) => {
                log::warn!(target: "oxidion.cuda", "device {}: {reason}", self.ordinal);
                for source in missing {
                    loaded.turn_off(source, reason);
                }
                return Ok(());
            }
        };
        // Loading waits for the device, which ends a capture.
        if driver::is_capturing(stream)? {
            return Err(Error::Cuda(format!(
                "not all kernels are loaded on device {} yet: take one step before the capture of a graph",
                self.ordinal
            )));
        }
        let load = |image: &[u8]| {
            driver::set_current(self.context)?; // of a thread that compiles
            Ok((driver::load(image)?, compile::digits(&Sha256::digest(image))))
        };
        let made = compile::loaded(sources, &missing, architecture, &load);
        for (source, made) in missing.into_iter().zip(made) {
            let found = made.and_then(|((module, image), origin, seconds)| {
                let kernels = source.kernels();
                let found = kernels.map(|name| Ok((driver::function(module, &name, source.shared)?, name)));
                Ok((found.collect::<Result<Vec<_>>>()?, (State::Loaded { origin, seconds }, image)))
            });
            match found {
                Ok((functions, state)) => loaded.turn_on(source, functions, state),
                Err(error) => {
                    let (name, device) = (source.name, self.ordinal);
                    log::warn!(target: "oxidion.cuda", "{name} is off on device {device}: {error}");
                    loaded.turn_off(source, &error.to_string());
                }
            }
        }
        Ok(())
    }

    /// Turns off those of the named sources that were not requested before a step, which begins without them.
    fn leave_out(&self, sources: &'static Sources, wanted: &[&str]) {
        let mut loaded = lock(&self.loaded);
        for source in sources.all.iter().filter(|source| wanted.contains(&source.name)) {
            if self.architecture.is_ok() && self.takes(source.when) && loaded.is_missing(source.name) {
                let reason = "a step that was planned without it needs it, and it has not been checked";
                let (name, device) = (source.name, self.ordinal);
                log::warn!(target: "oxidion.cuda", "{name} is off on device {device}: {reason}");
                loaded.turn_off(source, reason);
            }
        }
    }

    /// Why the first of the named sources that is off is so.
    fn refusal(&self, wanted: &[&str]) -> Option<Error> {
        let loaded = lock(&self.loaded);
        wanted.iter().find_map(|name| {
            let reason = loaded.reason(name)?;
            let said = reason.strip_prefix("CUDA: ").map(str::to_owned);
            Some(Error::Cuda(said.unwrap_or_else(|| format!("{name} is off: {reason}"))))
        })
    }
}

/// Guard of a thread that has entered a device. Until it is dropped, kernels are launched on one of the device's streams.
#[derive(Debug)]
pub struct Entered {
    /// It belongs to the thread.
    _thread: PhantomData<*const ()>,
    before: Option<Context>,
    outer: Option<(&'static LoadedDevice, Stream)>,
}

/// Has the kernels of this thread, which `sources` have, launched on a stream of a device, where those of the sources that
/// are `wanted` and missing are loaded first. One of them that is off is an error unless `allow_off`.
///
/// # Errors
/// [`Error::Cuda`] where there is no driver or no such device, where a source would have to be loaded in a capture, and where
/// a source is off.
pub(in crate::kernels) fn enter(
    sources: &'static Sources,
    (ordinal, stream): (usize, usize),
    wanted: &[&str],
    allow_off: bool,
) -> Result<Entered> {
    let (device, stream) = (LoadedDevice::get(ordinal)?, Stream(stream));
    SOURCES.get_or_init(|| sources);
    let current = driver::current()?;
    let before = (current != device.context).then_some(current);
    if before.is_some() {
        driver::set_current(device.context)?;
    }
    let outer = CURRENT.replace(Some((device, stream)));
    let entered = Entered { _thread: PhantomData, before, outer };
    device.load(sources, wanted, stream)?;
    match device.refusal(wanted).filter(|_| !allow_off) {
        Some(refusal) => Err(refusal),
        None => Ok(entered),
    }
}

/// Tests whether this thread launches kernels of all these sources, which are loaded if they are missing: on a device, and
/// none of them off.
///
/// # Errors
/// [`Error::Cuda`] where a source would have to be loaded in a capture.
pub(in crate::kernels) fn uses(wanted: &[&str]) -> Result<bool> {
    let (Some(sources), Some((device, stream))) = (SOURCES.get(), CURRENT.get()) else { return Ok(false) };
    let are_on = || {
        let loaded = lock(&device.loaded);
        wanted.iter().all(|name| loaded.is_on(name))
    };
    if are_on() {
        return Ok(true);
    }
    if ONLY_ASKED.load(Ordering::Relaxed) {
        device.leave_out(sources, wanted);
        return Ok(false);
    }
    device.load(sources, wanted, stream)?;
    Ok(are_on())
}

/// Turns a source off for the process, on every device.
pub(in crate::kernels) fn turn_off(source: &'static Source, reason: &str) {
    log::warn!(target: "oxidion.cuda", "{} is off: {reason}", source.name);
    let devices = lock(&DEVICES);
    states::refuse(source.name, reason);
    devices.values().for_each(|device| lock(&device.loaded).turn_off(source, reason));
}

/// Turns a source off on one device; who does says so.
///
/// # Errors
/// [`Error::Cuda`] where there is no driver or no such device.
pub(in crate::kernels) fn turn_off_on(ordinal: usize, source: &'static Source, reason: &str) -> Result<()> {
    let device = LoadedDevice::get(ordinal)?;
    log::info!(target: "oxidion.cuda", "{} is off on device {ordinal}: {reason}", source.name);
    lock(&device.loaded).turn_off(source, reason);
    Ok(())
}

/// Has no operation on a device use these sources until this is called again: to see what others do alone.
///
/// # Errors
/// [`Error::Cuda`] where there is no driver or no such device.
pub fn hide(ordinal: usize, names: Vec<String>) -> Result<()> {
    lock(&LoadedDevice::get(ordinal)?.loaded).hide(names);
    Ok(())
}

/// Facts about a device.
///
/// # Errors
/// [`Error::Cuda`] where there is no driver or no such device.
pub fn facts(ordinal: usize) -> Result<Facts> {
    Ok(LoadedDevice::get(ordinal)?.facts.clone())
}

/// SHA-256 of the machine code of each source that is on, in hexadecimal digits.
///
/// # Errors
/// [`Error::Cuda`] where there is no driver or no such device.
pub fn images(ordinal: usize) -> Result<Vec<(&'static str, String)>> {
    Ok(lock(&LoadedDevice::get(ordinal)?.loaded).images())
}

/// States of all sources on a device, in their order.
///
/// # Errors
/// [`Error::Cuda`] where there is no driver or no such device.
pub(in crate::kernels) fn states(
    sources: &'static Sources,
    ordinal: usize,
) -> Result<Vec<(&'static str, State)>> {
    let device = LoadedDevice::get(ordinal)?;
    let loaded = lock(&device.loaded);
    let state = |source: &&'static Source| match (&device.architecture, source.when) {
        (Err(reason), _) => State::Off(reason.clone()),
        (_, When::On(architecture)) if !device.takes(source.when) => {
            State::Off(format!("it is for {architecture} only"))
        }
        _ => loaded.state(source.name),
    };
    Ok(sources.all.iter().map(|source| (source.name, state(source))).collect())
}

fn here() -> Result<(&'static LoadedDevice, Stream)> {
    CURRENT.get().ok_or_else(|| Error::Internal("a launch without a device".into()))
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

/// Guard of launches at a learning rate that the device reads, until it is dropped.
#[derive(Debug)]
pub struct RateGuard {
    /// It belongs to the thread.
    _thread: PhantomData<*const ()>,
    outer: Rate,
}

/// Has launches of this thread multiply what is for each unit of the learning rate by the number that is in `rate` when
/// they run. None: by nothing.
#[must_use]
pub fn follow(rate: Option<&FlatPtr>) -> RateGuard {
    let rate = match rate {
        Some(flat) => Rate { at: flat.address(), scalars: 0, kind: number_of(flat.dtype()) },
        None => Rate::NONE,
    };
    RateGuard { _thread: PhantomData, outer: RATE.replace(rate) }
}

impl Drop for RateGuard {
    fn drop(&mut self) {
        RATE.set(self.outer);
    }
}

/// Launches a kernel where this thread is.
///
/// # Safety
/// As [`tape::launch`].
pub(in crate::kernels) unsafe fn launch<Parameters>(
    name: &str,
    grid: Grid,
    parameters: &Parameters,
) -> Result<()> {
    let (device, stream) = here()?;
    let function = lock(&device.loaded).function(name)?;
    // SAFETY: the caller upholds it.
    unsafe { tape::launch(function, grid, stream, parameters) }
}

/// Room for elements of one step: what owns it, and where it is. Torch's allocator gives it to others only after what is
/// on the stream.
pub(in crate::kernels) fn scratch(
    elements: usize,
    dtype: DType,
    device: Device,
) -> Result<(Tensor, FlatView<'static>)> {
    scratch_mut(elements, dtype, device).map(|(room, all)| (room, all.into_view()))
}

/// Allocates scratch memory as [`scratch`] does, with a writable view.
pub(in crate::kernels) fn scratch_mut(
    elements: usize,
    dtype: DType,
    device: Device,
) -> Result<(Tensor, FlatViewMut<'static>)> {
    let (room, all) = FlatViewMut::room(elements, dtype, device)?;
    // What is allocated for a graph stays until it has run; memory of the host has to be kept for it.
    if let Some((device, stream)) = CURRENT.get()
        && device.emulated
        && driver::is_capturing(stream)?
    {
        std::mem::forget(room.shallow_clone());
    }
    tape::hold(&room);
    Ok((room, all))
}

/// The multiprocessors of the device that this thread launches on, where the sources that are loaded then are on.
pub(in crate::kernels) fn multiprocessors(when: When) -> Option<u32> {
    let (device, _) = CURRENT.get()?;
    lock(&device.loaded).has(when).then_some(device.facts.multiprocessors)
}

/// The multiprocessors of the device that this thread launches on, and its compute capability if the driver knows it.
pub(in crate::kernels) fn size() -> Option<(u32, Option<(i32, i32)>)> {
    CURRENT.get().map(|(device, _)| (device.facts.multiprocessors, device.facts.capability))
}

/// The number of the device that this thread launches on.
pub(in crate::kernels) fn ordinal() -> Option<usize> {
    CURRENT.get().map(|(device, _)| device.ordinal)
}

/// Tests whether this thread launches on a device.
pub(in crate::kernels) fn is_entered() -> bool {
    CURRENT.get().is_some()
}

/// Tests whether launches of this thread are put into a graph instead of being run.
pub(in crate::kernels) fn is_capturing() -> Result<bool> {
    CURRENT.get().map_or(Ok(false), |(_, stream)| driver::is_capturing(stream))
}

/// Has memory of the host count as memory of device 0, where that is the emulator: for tests without a device.
///
/// # Errors
/// [`Error::Cuda`] where device 0 is another.
pub fn emulate() -> Result<()> {
    if !LoadedDevice::get(0)?.emulated {
        return Err(Error::Cuda("only the emulator of the tests has the memory of the host".into()));
    }
    tensor::emulate();
    Ok(())
}

/// A type as `jobs.cuh` numbers it.
pub(in crate::kernels) fn number_of(dtype: DType) -> u8 {
    match dtype {
        DType::F16 => 0,
        DType::BF16 => 1,
        DType::F32 => 2,
        DType::F64 => 3,
        DType::Q8 => 4,
        DType::UQ8 => 5,
        // No kernel takes int16 operands alone: `ROUNDED` and `MASTER` of `quantized.rs` are 6 and 7.
        DType::I16 => 8,
    }
}
