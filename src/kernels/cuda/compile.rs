//! Machine code of the sources: shipped with the package, kept from an earlier run, or compiled by NVRTC.

use std::ffi::{CStr, CString};
use std::fmt::Write as _;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::UNIX_EPOCH;

use cudarc::nvrtc::sys::{self, nvrtcResult};
use sha2::{Digest, Sha256};

use super::sources::{Source, Sources};
use super::states::Origin;
use crate::error::{Error, Result};

/// Every machine code is made with these.
const OPTIONS: [&str; 2] = ["--std=c++17", "-default-device"];

/// Machine code that was compiled when the package was built: key and bytes.
const SHIPPED: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/cubins.rs"));

/// Bits of a mode that let others write.
const OTHERS_WRITE: u32 = 0o022;

/// The user's folder for machine code; none, and nothing is kept.
static FOLDER: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Keeps machine code in this folder, which is made when needed.
pub fn keep_in(folder: Option<PathBuf>) {
    *FOLDER.lock().unwrap_or_else(PoisonError::into_inner) = folder;
}

/// The architecture that is compiled for: a device runs machine code of its major number, with its minor one or a lower.
/// For what is older than the kernels, why there are none.
pub(super) fn architecture(capability: Option<(i32, i32)>) -> std::result::Result<String, String> {
    let Some((major, minor)) = capability.filter(|(major, _)| *major > 0) else {
        return Err("no kernels for a device that does not say its compute capability".into());
    };
    match (major, minor) {
        (..8, _) => Err(format!("no kernels for sm_{major}{minor}: they need sm_80 or newer")),
        (8, 7) => Ok("sm_87".into()), // not a desktop's
        (8, _) => Ok("sm_80".into()),
        (9, _) => Ok("sm_90a".into()),
        (10, _) => Ok("sm_100".into()),
        (12, _) => Ok("sm_120".into()),
        _ => Ok(format!("sm_{major}{minor}")),
    }
}

/// Key of the machine code of a source for an architecture: a name for all that it depends on.
pub(super) fn key(sources: &Sources, source: &Source, architecture: &str) -> String {
    let mut hash = Sha256::new();
    let headers = sources.headers.iter().flat_map(|(name, text)| [*name, text]);
    for part in OPTIONS.into_iter().chain([source.text]).chain(headers) {
        hash.update(part.len().to_le_bytes());
        hash.update(part);
    }
    let digest = hash.finalize();
    let mut key = format!("{}-{architecture}-", source.name.trim_end_matches(".cu"));
    for byte in digest.iter().take(12) {
        let _ = write!(key, "{byte:02x}");
    }
    key
}

/// Locations where machine code may be found, and what makes it.
struct Places<'a> {
    sources: &'a Sources,
    /// In the package: key and bytes.
    shipped: &'a [(&'a str, &'a [u8])],
    /// The user's folder.
    folder: Option<PathBuf>,
    compile: fn(&Sources, &Source, &str) -> Result<Vec<u8>>,
}

/// Has the machine code of a source loaded: that of the package, else what is kept in the user's folder, else what is
/// compiled now, which is kept. What a driver does not take, as that of another major version, gives way to the next.
///
/// # Errors
/// Errors of `load` and [`compile`] for what is compiled.
pub(super) fn loaded<Module>(
    sources: &Sources,
    source: &Source,
    architecture: &str,
    load: impl FnMut(&[u8]) -> Result<Module>,
) -> Result<(Module, Origin)> {
    let folder = FOLDER.lock().unwrap_or_else(PoisonError::into_inner).clone();
    Places { sources, shipped: SHIPPED, folder, compile }.loaded(source, architecture, load)
}

impl Places<'_> {
    fn loaded<Module>(
        &self,
        source: &Source,
        architecture: &str,
        mut load: impl FnMut(&[u8]) -> Result<Module>,
    ) -> Result<(Module, Origin)> {
        let key = key(self.sources, source, architecture);
        let file = self.folder.as_ref().map(|folder| folder.join(format!("{key}.cubin")));
        let shipped = || Some(self.shipped.iter().find(|(name, _)| *name == key)?.1.to_vec());
        let kept = || read(file.as_ref()?, &key);
        let found: [(_, &dyn Fn() -> Option<Vec<u8>>); 2] =
            [(Origin::Shipped, &shipped), (Origin::Kept, &kept)];
        for (origin, image) in found {
            match image().map(|image| load(&image)) {
                Some(Ok(module)) => return Ok((module, origin)),
                Some(Err(error)) => {
                    log::info!(target: "oxidion.cuda", "{} as {}: {error}", source.name, origin.name());
                }
                None => {}
            }
        }
        log::info!(target: "oxidion.cuda", "compiling {} for {architecture}", source.name);
        let image = (self.compile)(self.sources, source, architecture)?;
        if let Some(file) = file
            && let Err(error) = store(&file, &key, &image)
        {
            log::warn!(target: "oxidion.cuda", "{} cannot be kept: {error}", file.display());
        }
        Ok((load(&image)?, Origin::Compiled))
    }
}

/// Digest of an image under its key, which a kept file has at its end.
fn digest(key: &str, image: &[u8]) -> [u8; 32] {
    Sha256::new().chain_update(key).chain_update(image).finalize().into()
}

/// The image of a kept file, if it is what was written for this key and nobody else may have written to it: the driver
/// trusts what it loads.
fn read(file: &Path, key: &str) -> Option<Vec<u8>> {
    let (mut open, folder) = (File::open(file).ok()?, fs::metadata(file.parent()?).ok()?);
    let found = open.metadata().ok()?;
    let mut image = Vec::new();
    open.read_to_end(&mut image).ok()?;
    let said = image.split_off(image.len().checked_sub(size_of_val(&digest("", &[])))?);
    let trusted = found.is_file() && found.uid() == folder.uid() && found.mode() & OTHERS_WRITE == 0;
    if trusted && said == digest(key, &image) {
        return Some(image);
    }
    let why = if trusted { "it is damaged" } else { "other users may write to it" };
    log::warn!(target: "oxidion.cuda", "{} is not loaded, and made anew: {why}", file.display());
    None
}

/// Numbers the files that this process writes.
static NUMBER: AtomicU64 = AtomicU64::new(0);

/// Writes a file that other processes see whole or not at all, beside it a name that nobody has taken.
fn store(file: &Path, key: &str, image: &[u8]) -> std::io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let time = UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos());
    let unfinished = file.with_extension(format!("{}-{number}-{time}.part", std::process::id()));
    // The mode is what remains of it under the umask: others may never write.
    let mut new = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&unfinished)?;
    new.write_all(image)
        .and_then(|()| new.write_all(&digest(key, image)))
        .and_then(|()| fs::rename(&unfinished, file))
        .inspect_err(|_| drop(fs::remove_file(&unfinished)))
}

/// Compiles a source by NVRTC.
fn compile(sources: &Sources, source: &Source, architecture: &str) -> Result<Vec<u8>> {
    // SAFETY: loading NVRTC does nothing that is seen.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::Cuda(format!(
            "{} has to be compiled for {architecture}, and NVRTC (libnvrtc.so.13 or .12, in torch's package \
             nvidia-cuda-nvrtc) was not found",
            source.name
        )));
    }
    let text = |text: &str| CString::new(text).map_err(|_| Error::Internal("a source with a zero".into()));
    let headers = sources.headers.iter().map(|(_, header)| text(header)).collect::<Result<Vec<_>>>()?;
    let names = sources.headers.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>>>()?;
    let target = format!("--gpu-architecture={architecture}");
    let options = OPTIONS.into_iter().chain([&*target]).map(text).collect::<Result<Vec<_>>>()?;
    let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
    let (headers_at, names_at, options_at) = (pointers(&headers), pointers(&names), pointers(&options));
    let count = |n: usize| i32::try_from(n).unwrap_or(0);
    let (source_text, name) = (text(source.text)?, text(source.name)?);
    let mut program = std::ptr::null_mut();
    // SAFETY: all strings end in a zero and live to the end of the function; NVRTC writes to what it is given.
    unsafe {
        check(
            "program",
            sys::nvrtcCreateProgram(
                &raw mut program,
                source_text.as_ptr(),
                name.as_ptr(),
                count(sources.headers.len()),
                headers_at.as_ptr(),
                names_at.as_ptr(),
            ),
        )?;
        let compiled = sys::nvrtcCompileProgram(program, count(options.len()), options_at.as_ptr());
        let image = check(source.name, compiled)
            .and_then(|()| {
                text_of(program, sys::nvrtcGetCUBINSize, |program, bytes| sys::nvrtcGetCUBIN(program, bytes))
            })
            .map_err(|error| {
                let log = text_of(program, sys::nvrtcGetProgramLogSize, |program, bytes| {
                    sys::nvrtcGetProgramLog(program, bytes)
                });
                let said = log.map(|log| String::from_utf8_lossy(&log).into_owned()).unwrap_or_default();
                Error::Cuda(format!("{error}\n{said}"))
            });
        let _ = sys::nvrtcDestroyProgram(&raw mut program);
        image
    }
}

/// Bytes that a program has.
///
/// # Safety
/// The program is alive, and `get` writes as many bytes as `size` says.
unsafe fn text_of(
    program: sys::nvrtcProgram,
    size: unsafe fn(sys::nvrtcProgram, *mut usize) -> nvrtcResult,
    get: impl Fn(sys::nvrtcProgram, *mut std::ffi::c_char) -> nvrtcResult,
) -> Result<Vec<u8>> {
    let mut length = 0;
    // SAFETY: the caller upholds it.
    check("size", unsafe { size(program, &raw mut length) })?;
    let mut bytes = vec![0_u8; length];
    check("result", get(program, bytes.as_mut_ptr().cast()))?;
    Ok(bytes)
}

fn check(what: &str, code: nvrtcResult) -> Result<()> {
    if code == nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    // SAFETY: NVRTC names its results by strings that stay.
    let name = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(code)) }.to_string_lossy().into_owned();
    Err(Error::Cuda(format!("{what}: {name}")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::kernels::sources::sources;

    fn source(name: &str) -> &'static Source {
        sources().all.iter().find(|source| source.name == name).unwrap()
    }

    #[test]
    fn architecture_of_a_device_is_one_that_it_runs() {
        for (capability, expected) in
            [((8, 0), "sm_80"), ((8, 6), "sm_80"), ((8, 7), "sm_87"), ((8, 9), "sm_80"), ((11, 0), "sm_110")]
        {
            assert_eq!(architecture(Some(capability)).unwrap(), expected);
        }
        for (capability, expected) in [
            ((9, 0), "sm_90a"),
            ((10, 0), "sm_100"),
            ((10, 3), "sm_100"),
            ((12, 0), "sm_120"),
            ((12, 1), "sm_120"),
        ] {
            assert_eq!(architecture(Some(capability)).unwrap(), expected);
        }
        for (capability, expected) in
            [(Some((7, 5)), "no kernels for sm_75"), (None, "compute capability"), (Some((0, 0)), "compute")]
        {
            let refused = architecture(capability).unwrap_err();
            assert!(refused.contains(expected), "{refused}");
        }
    }

    fn image(text: &str) -> Vec<u8> {
        text.as_bytes().to_vec()
    }

    #[expect(clippy::unnecessary_wraps, reason = "takes the place of what may fail")]
    fn made(_: &Sources, source: &Source, architecture: &str) -> Result<Vec<u8>> {
        Ok(image(&format!("{} compiled for {architecture}", source.name)))
    }

    fn never(_: &Sources, source: &Source, architecture: &str) -> Result<Vec<u8>> {
        Err(Error::Internal(format!("{} for {architecture} is compiled", source.name)))
    }

    fn text(image: &[u8]) -> String {
        String::from_utf8_lossy(image).into_owned()
    }

    /// Text of the image that is loaded where all but the first `refused` are.
    fn chosen(places: &Places, source: &Source, architecture: &str, mut refused: usize) -> Result<String> {
        let loaded = places.loaded(source, architecture, |image| {
            if refused > 0 {
                refused -= 1;
                return Err(Error::Cuda(format!("{} is refused", text(image))));
            }
            Ok(text(image))
        });
        Ok(loaded?.0)
    }

    /// A folder that is not there yet.
    fn folder(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("oxidion-{name}-{}", std::process::id()))
    }

    #[test]
    fn every_device_loads_the_shipped_code_that_it_runs_and_nothing_is_compiled() {
        let names = ["sm_80", "sm_90a", "sm_100"];
        let images: Vec<_> = sources()
            .all
            .iter()
            .flat_map(|source| {
                names.map(|name| (key(sources(), source, name), image(&format!("{} {name}", source.name))))
            })
            .collect();
        let shipped: Vec<_> = images.iter().map(|(key, image)| (&**key, &**image)).collect();
        let places = Places { sources: sources(), shipped: &shipped, folder: None, compile: never };
        for (capability, expected) in [
            ((8, 0), "sm_80"),
            ((8, 6), "sm_80"),
            ((8, 9), "sm_80"),
            ((9, 0), "sm_90a"),
            ((10, 0), "sm_100"),
            ((10, 3), "sm_100"),
        ] {
            for source in sources().all {
                let loaded = chosen(&places, source, &architecture(Some(capability)).unwrap(), 0).unwrap();
                assert_eq!(loaded, format!("{} {expected}", source.name), "{capability:?}");
            }
        }
        let places = Places { compile: made, ..places };
        let loaded = chosen(&places, source("updates.cu"), &architecture(Some((12, 0))).unwrap(), 0).unwrap();
        assert_eq!(loaded, "updates.cu compiled for sm_120");
    }

    #[test]
    fn refused_code_gives_way_to_what_is_kept_and_that_to_what_is_compiled() {
        let folder = folder("refused");
        let (key, shipped) = (key(sources(), source("updates.cu"), "sm_80"), image("shipped"));
        let shipped: [(&str, &[u8]); 1] = [(&key, &shipped)];
        let places =
            Places { sources: sources(), shipped: &shipped, folder: Some(folder.clone()), compile: made };
        let compiled = "updates.cu compiled for sm_80";
        assert_eq!(chosen(&places, source("updates.cu"), "sm_80", 0).unwrap(), "shipped");
        assert_eq!(chosen(&places, source("updates.cu"), "sm_80", 1).unwrap(), compiled);
        let refused = chosen(&places, source("updates.cu"), "sm_80", 3).unwrap_err().to_string();
        assert!(refused.contains(&format!("{compiled} is refused")), "{refused}");
        store(&folder.join(format!("{key}.cubin")), &key, &image("kept")).unwrap();
        assert_eq!(chosen(&places, source("updates.cu"), "sm_80", 0).unwrap(), "shipped");
        assert_eq!(chosen(&places, source("updates.cu"), "sm_80", 1).unwrap(), "kept");
        assert_eq!(chosen(&places, source("updates.cu"), "sm_80", 2).unwrap(), compiled);
        // What is compiled takes the place of what was refused.
        let places = Places { sources: sources(), shipped: &[], compile: never, ..places };
        assert_eq!(chosen(&places, source("updates.cu"), "sm_80", 0).unwrap(), compiled);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn code_of_other_sources_is_not_loaded() {
        let folder = folder("stale");
        let old = Source { text: "an older text", ..*source("updates.cu") };
        let (key, image) = (key(sources(), &old, "sm_80"), image("stale"));
        store(&folder.join(format!("{key}.cubin")), &key, &image).unwrap();
        let shipped: [(&str, &[u8]); 1] = [(&key, &image)];
        let places =
            Places { sources: sources(), shipped: &shipped, folder: Some(folder.clone()), compile: made };
        assert_eq!(chosen(&places, &old, "sm_80", 1).unwrap(), "stale");
        for (source, architecture) in
            [(source("updates.cu"), "sm_80"), (&old, "sm_90a"), (source("symmetric_mma.cu"), "sm_80")]
        {
            let expected = format!("{} compiled for {architecture}", source.name);
            assert_eq!(chosen(&places, source, architecture, 0).unwrap(), expected);
        }
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn key_names_source_architecture_and_content() {
        let one = key(sources(), source("updates.cu"), "sm_80");
        assert!(one.starts_with("updates-sm_80-") && one.len() == "updates-sm_80-".len() + 24);
        assert_ne!(one, key(sources(), source("updates.cu"), "sm_90a"));
        assert_ne!(one, key(sources(), &Source { text: "", ..*source("updates.cu") }, "sm_80"));
        assert!(key(sources(), source("symmetric_mma.cu"), "sm_80").starts_with("symmetric_mma-"));
    }

    #[test]
    fn kept_code_is_read_only_as_it_was_written_for_its_key_by_its_owner() {
        let folder = folder("kept");
        let file = folder.join("a.cubin");
        store(&file, "a", b"image").unwrap();
        let whole = fs::read(&file).unwrap();
        assert_eq!(read(&file, "a").unwrap(), b"image");
        assert!(read(&file, "b").is_none() && read(&folder.join("none"), "a").is_none());
        assert!(read(&folder, "a").is_none());
        for at in [0, 4, 5, whole.len() - 1] {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&file, damaged).unwrap();
            assert!(read(&file, "a").is_none(), "byte {at}");
        }
        for length in [0, 31, 32, whole.len() - 1] {
            fs::write(&file, &whole[..length]).unwrap();
            assert!(read(&file, "a").is_none(), "{length} bytes");
        }
        fs::write(&file, &whole).unwrap();
        for mode in [0o620, 0o602] {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            assert!(read(&file, "a").is_none(), "{mode:o}");
        }
        store(&file, "a", b"image").unwrap();
        assert_eq!(read(&file, "a").unwrap(), b"image");
        // Only root may give a file away: elsewhere tests/test_cache.py looks at other owners.
        if std::os::unix::fs::chown(&file, Some(1), None).is_ok() {
            assert!(read(&file, "a").is_none());
        }
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn every_header_that_a_source_includes_is_there() {
        let Sources { all, headers } = sources();
        let texts = all.iter().map(|s| s.text).chain(headers.iter().map(|(_, text)| &**text));
        for line in texts.flat_map(str::lines).filter_map(|line| line.strip_prefix("#include \"")) {
            let name = line.trim_end_matches('"');
            assert!(headers.iter().any(|(header, _)| *header == name), "{name}");
        }
    }

    #[test]
    fn store_leaves_a_whole_file_and_nothing_else() {
        let folder = std::env::temp_dir().join(format!("oxidion-store-{}", std::process::id()));
        let file = folder.join("made").join("a.cubin");
        store(&file, "a", b"first").unwrap();
        store(&file, "a", b"second").unwrap();
        assert_eq!(read(&file, "a").unwrap(), b"second");
        let made = file.parent().unwrap();
        assert_eq!(fs::read_dir(made).unwrap().count(), 1);
        assert_eq!(fs::metadata(made).unwrap().mode() & 0o777, 0o700);
        assert_eq!(fs::metadata(&file).unwrap().mode() & OTHERS_WRITE, 0);
        // What cannot take its place leaves nothing.
        fs::create_dir(folder.join("b.cubin")).unwrap();
        assert!(store(&folder.join("b.cubin"), "b", b"image").is_err());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
        fs::remove_dir_all(folder).unwrap();
    }
}
