//! NVRTC: libraries of it, those that the driver's version allows, and what they make of a source.

use std::error::Error as _;
use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use libloading::os::unix::Library;

use super::driver::{self, versioned};
use super::sources::{Source, Sources, When};
use super::states::Origin;
use crate::error::{Error, Result};

/// Every machine code is made with these.
pub(super) const OPTIONS: [&str; 2] = ["--std=c++17", "-default-device"];

/// The first version whose kernels may have as many bytes of parameters as ours.
const FIRST_VERSION: i32 = 12_010;
/// The architecture whose PTX every device runs that has kernels.
const OLDEST: &str = "sm_80";
/// Names that the loader is asked for.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
/// Maximum number of characters that are kept of a compiler's text.
const MOST_SAID: usize = 2000;

/// Paths of libraries, the one that is tried first at the front.
static PATHS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Has NVRTC looked for at these paths, in their order, and then by the loader.
pub fn look_for_nvrtc_at(paths: Vec<PathBuf>) {
    *PATHS.lock().unwrap_or_else(PoisonError::into_inner) = paths;
}

/// A function of NVRTC with two arguments.
///
/// # Safety
/// As NVRTC's manual says.
type Call<A, B> = unsafe extern "C" fn(A, B) -> c_int;

/// One that hands out the size of what a program has, or that itself. Programs are numbers here.
type Get<T> = Call<usize, *mut T>;

/// A library, opened for as long as the process.
///
/// # Safety
/// Of each function: as NVRTC's manual says.
#[derive(Debug)]
struct Nvrtc {
    path: PathBuf,
    version: i32,
    compile: unsafe extern "C" fn(usize, c_int, *const Text) -> c_int,
    destroy: unsafe extern "C" fn(*mut usize) -> c_int,
    create: unsafe extern "C" fn(
        *mut usize,
        *const c_char,
        *const c_char,
        c_int,
        *const Text,
        *const Text,
    ) -> c_int,
    machine_code: (Get<usize>, Get<c_char>),
    ptx: (Get<usize>, Get<c_char>),
    log: (Get<usize>, Get<c_char>),
}

type Text = *const c_char;

/// Libraries in the order in which they are tried, and why others are not.
#[derive(Debug, Default)]
struct Found {
    libraries: Vec<Nvrtc>,
    refused: Vec<String>,
}

/// Machine code or PTX of a source, loaded.
#[derive(Debug)]
pub(super) struct Compiled<Module> {
    pub(super) module: Module,
    pub(super) image: Vec<u8>,
    pub(super) origin: Origin,
}

/// Compiles a source and has it loaded: by each library in turn to machine code, until the driver takes it, then to PTX.
///
/// # Errors
/// [`Error::Cuda`] with the driver's version, the libraries and what became of each.
pub(super) fn compiled<Module>(
    sources: &Sources,
    source: &Source,
    architecture: &str,
    load: &dyn Fn(&[u8]) -> Result<Module>,
) -> Result<Compiled<Module>> {
    let version = driver::version()?;
    let found = found(version);
    let mut tried = found.refused.clone();
    let machine_code = found.libraries.iter().map(|library| (library, architecture, Origin::Compiled));
    // A driver compiles PTX of its own version and of older ones.
    let known = || found.libraries.iter().filter(|library| library.version <= version);
    let own = known().map(|library| (library, architecture, Origin::Ptx));
    let anywhere = !matches!(source.when, When::On(_)) && architecture != OLDEST;
    let oldest = known().filter(|_| anywhere).map(|library| (library, OLDEST, Origin::Ptx));
    for (library, architecture, origin) in machine_code.chain(own).chain(oldest) {
        let loaded = library
            .compiled(sources, source, architecture, origin)
            .and_then(|image| Ok(Compiled { module: load(&image)?, image, origin }));
        match loaded {
            Ok(compiled) => return Ok(compiled),
            Err(error) => {
                tried.push(format!("{} to {} for {architecture}: {error}", library.name(), origin.name()));
            }
        }
    }
    if tried.is_empty() {
        tried.push(format!(
            "none was found ({} in torch's package nvidia-cuda-nvrtc)",
            NAMES[..2].join(" or ")
        ));
    }
    Err(Error::Cuda(format!(
        "{} has to be compiled for {architecture} by an NVRTC that the driver (CUDA {}) takes. {}",
        source.name,
        versioned(version),
        tried.join("; ")
    )))
}

/// The libraries of this process, looked for once.
fn found(driver: i32) -> &'static Found {
    static FOUND: OnceLock<Found> = OnceLock::new();
    FOUND.get_or_init(|| {
        let paths = PATHS.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let found = Found::among(paths, driver);
        for reason in &found.refused {
            log::info!(target: "oxidion.cuda", "NVRTC: {reason}");
        }
        found
    })
}

impl Found {
    /// Libraries at paths and of the loader whose version the driver takes. Newer ones of its major version come last: their
    /// machine code runs on it, their PTX does not.
    fn among(paths: Vec<PathBuf>, driver: i32) -> Self {
        let mut found = Self::default();
        let mut newer = Vec::new();
        let by_path = paths.len();
        for (at, path) in paths.into_iter().chain(NAMES.map(PathBuf::from)).enumerate() {
            let library = match Nvrtc::open(&path) {
                Ok(library) => library,
                Err(reason) => {
                    if at < by_path {
                        found.refused.push(reason);
                    }
                    continue; // the loader knows no such name
                }
            };
            let name = library.name();
            if library.version < FIRST_VERSION {
                found.refused.push(format!("{name}: older than {}", versioned(FIRST_VERSION)));
            } else if library.version <= driver {
                found.libraries.push(library);
            } else if library.version / 1000 == driver / 1000 {
                newer.push(library);
            } else {
                found.refused.push(format!("{name}: newer than the driver ({})", versioned(driver)));
            }
        }
        found.libraries.append(&mut newer);
        found
    }
}

/// Opens the library that NVRTC loads by name, if it is in the same folder: NVRTC finds it once it is open.
fn open_builtins(path: &Path) {
    let entries = path.parent().and_then(|folder| std::fs::read_dir(folder).ok());
    for entry in entries.into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so.") {
            // SAFETY: loading it does nothing that is seen.
            if let Ok(library) = unsafe { Library::new(entry.path()) } {
                std::mem::forget(library);
            }
        }
    }
}

impl Nvrtc {
    /// The library at a path, or why it is none.
    fn open(path: &Path) -> std::result::Result<Self, String> {
        if path.is_absolute() {
            open_builtins(path);
        }
        // SAFETY: loading NVRTC does nothing that is seen; the types of its functions are those of its header.
        let opened = unsafe {
            let load = || -> std::result::Result<Self, libloading::Error> {
                let library = Library::new(path)?;
                let version: Call<*mut c_int, *mut c_int> = *library.get("nvrtcVersion")?;
                let (mut major, mut minor) = (0, 0);
                let _ = version(&raw mut major, &raw mut minor);
                let made = Self {
                    version: major * 1000 + minor * 10,
                    create: *library.get("nvrtcCreateProgram")?,
                    compile: *library.get("nvrtcCompileProgram")?,
                    destroy: *library.get("nvrtcDestroyProgram")?,
                    machine_code: (*library.get("nvrtcGetCUBINSize")?, *library.get("nvrtcGetCUBIN")?),
                    ptx: (*library.get("nvrtcGetPTXSize")?, *library.get("nvrtcGetPTX")?),
                    log: (*library.get("nvrtcGetProgramLogSize")?, *library.get("nvrtcGetProgramLog")?),
                    path: path.to_owned(),
                };
                std::mem::forget(library); // keeps its functions loaded
                Ok(made)
            };
            load()
        };
        opened.map_err(|error| {
            let said = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            format!("{}: {said}", path.display())
        })
    }

    /// Path and version.
    fn name(&self) -> String {
        format!("{} ({})", self.path.display(), versioned(self.version))
    }

    /// Machine code or PTX of a source.
    fn compiled(
        &self,
        sources: &Sources,
        source: &Source,
        architecture: &str,
        form: Origin,
    ) -> Result<Vec<u8>> {
        let text =
            |text: &str| CString::new(text).map_err(|_| Error::Internal("a source with a zero".into()));
        let headers = sources.headers.iter().map(|(_, header)| text(header)).collect::<Result<Vec<_>>>()?;
        let names = sources.headers.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>>>()?;
        let is_ptx = form == Origin::Ptx;
        let target = if is_ptx { architecture.replace("sm_", "compute_") } else { architecture.to_owned() };
        let target = format!("--gpu-architecture={target}");
        let options = OPTIONS.into_iter().chain([&*target]).map(text).collect::<Result<Vec<_>>>()?;
        let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (headers_at, names_at, options_at) = (pointers(&headers), pointers(&names), pointers(&options));
        let count = |n: usize| c_int::try_from(n).unwrap_or(0);
        let (source_text, name) = (text(source.text)?, text(source.name)?);
        let (text_at, called, mut program) = (source_text.as_ptr(), name.as_ptr(), 0);
        let number = count(sources.headers.len());
        // SAFETY: all strings end in a zero and live to the end of the function; NVRTC writes to what it is given.
        unsafe {
            let (headers, names) = (headers_at.as_ptr(), names_at.as_ptr());
            check("program", (self.create)(&raw mut program, text_at, called, number, headers, names))?;
            let code = (self.compile)(program, count(options.len()), options_at.as_ptr());
            let get = if is_ptx { self.ptx } else { self.machine_code };
            let image = check(source.name, code).and_then(|()| Self::got(program, get)).map_err(|error| {
                let log = Self::got(program, self.log).unwrap_or_default();
                let log = String::from_utf8_lossy(&log);
                let said: String = log.trim_end_matches('\0').chars().take(MOST_SAID).collect();
                Error::Cuda(format!("{error}\n{said}"))
            });
            let _ = (self.destroy)(&raw mut program);
            image
        }
    }

    /// Bytes that a program has.
    ///
    /// # Safety
    /// The program is alive.
    unsafe fn got(program: usize, (size, get): (Get<usize>, Get<c_char>)) -> Result<Vec<u8>> {
        let (mut length, mut bytes) = (0, Vec::new());
        // SAFETY: NVRTC writes one number, then as many bytes as that says.
        let results = unsafe {
            let code = size(program, &raw mut length);
            bytes.resize(length, 0_u8);
            [code, get(program, bytes.as_mut_ptr().cast())]
        };
        results.into_iter().try_for_each(|code| check("result", code))?;
        Ok(bytes)
    }
}

/// The error that a result of NVRTC stands for.
fn check(what: &str, code: c_int) -> Result<()> {
    let said = match code {
        0 => return Ok(()),
        1 => "out of memory",
        2 => "no program was made",
        3 => "invalid input",
        4 => "invalid program",
        5 => "invalid option",
        6 => "it does not compile",
        7 => "a builtin operation failed, as where libnvrtc-builtins is not found",
        _ => "an error",
    };
    Err(Error::Cuda(format!("{what}: {said} (NVRTC {code})")))
}
