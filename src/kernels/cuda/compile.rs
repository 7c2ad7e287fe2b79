//! Machine code of the sources: shipped with the package, kept from an earlier run, or compiled by NVRTC.
//!
//! Machine code that is shipped is compiled by the oldest NVRTC of CUDA 12 that knows the architecture
//! (`.ci/nvrtc.py`). NVIDIA promises that code of NVRTC 13 runs on drivers of CUDA 13 only. All sources
//! together, with seconds of one core:
//!
//! | architecture | NVRTC | drivers | sources | MB | seconds |
//! |---|---|---|---|---|---|
//! | `sm_80` | 12.1 | 12.1 (R530) | 15 | 9.0 | 55 |
//! | `sm_90a` | 12.1 | 12.1 (R530) | 16 | 8.5 | 63 |
//! | `sm_100` | 12.8 | 12.8 (R570) | 15 | 9.5 | 57 |

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::num::NonZero;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use sha2::{Digest, Sha256};

use super::kept::{PATIENCE, Turn, read, store};
use super::nvrtc::{self, Compiled, OPTIONS};
use super::sources::{Source, Sources};
use super::states::Origin;
use crate::error::{Error, Result};

/// Machine code that was compiled when the package was built: key and bytes.
const SHIPPED: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/cubins.rs"));

/// Maximum number of sources that are compiled at once, each on its own core.
const MOST_AT_ONCE: usize = 4;

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
    format!("{}-{architecture}-{}", source.name.trim_end_matches(".cu"), digits(&digest[..12]))
}

/// Bytes in hexadecimal digits.
pub(super) fn digits(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Loads an image: machine code, or PTX that ends with a zero.
type Load<'a, Module> = &'a (dyn Fn(&[u8]) -> Result<Module> + Sync);

/// Compiles a source for an architecture and has it loaded.
type Compile<Module> =
    fn(&Sources, &Source, &str, &dyn Fn(&[u8]) -> Result<Module>) -> Result<Compiled<Module>>;

/// A source that is loaded, with the origin of its machine code and the seconds that it took.
pub(super) type Made<Module> = Result<(Module, Origin, f64)>;

/// Locations where machine code may be found, and what makes it.
struct Places<'a, Module> {
    sources: &'a Sources,
    /// In the package: key and bytes.
    shipped: &'a [(&'a str, &'a [u8])],
    /// The user's folder.
    folder: Option<PathBuf>,
    compile: Compile<Module>,
}

/// Has the machine code of sources loaded: that of the package, else what is kept in the user's folder, else what is
/// compiled now, which is kept. What a driver does not take, as that of another major version, gives way to the next. Of each
/// what came of it: errors of `load` and of NVRTC.
pub(super) fn loaded<Module: Send>(
    sources: &Sources,
    wanted: &[&'static Source],
    architecture: &str,
    load: Load<Module>,
) -> Vec<Made<Module>> {
    let folder = FOLDER.lock().unwrap_or_else(PoisonError::into_inner).clone();
    Places { sources, shipped: SHIPPED, folder, compile: nvrtc::compiled }.loaded(wanted, architecture, load)
}

impl<Module: Send> Places<'_, Module> {
    fn loaded(&self, wanted: &[&Source], architecture: &str, load: Load<Module>) -> Vec<Made<Module>> {
        let mut refused = BTreeMap::new();
        let mut made = Vec::new();
        for source in wanted {
            let begun = Instant::now();
            made.push(match self.found(source, architecture, load) {
                Ok((module, origin)) => Some(Ok((module, origin, begun.elapsed().as_secs_f64()))),
                Err(kept) => {
                    refused.insert(source.name, kept);
                    None
                }
            });
        }
        let missing: Vec<_> = (0..wanted.len()).filter(|at| made[*at].is_none()).collect();
        for (at, one) in self.compiled(wanted, missing, &refused, (architecture, load)) {
            made[at] = Some(one);
        }
        let lost = || Err(Error::Internal("a source was left out".into()));
        made.into_iter().map(|one| one.unwrap_or_else(lost)).collect()
    }

    fn file(&self, key: &str) -> Option<PathBuf> {
        self.folder.as_ref().map(|folder| folder.join(format!("{key}.cubin")))
    }

    /// A source that need not be compiled; else what is kept of it, which the driver refuses.
    fn found(
        &self,
        source: &Source,
        architecture: &str,
        load: Load<Module>,
    ) -> std::result::Result<(Module, Origin), Option<Vec<u8>>> {
        let key = key(self.sources, source, architecture);
        let shipped = self.shipped.iter().find(|(name, _)| *name == key).map(|(_, image)| image.to_vec());
        let kept = || read(&self.file(&key)?, &key);
        let mut refused = None;
        let found: [(_, &dyn Fn() -> Option<Vec<u8>>); 2] =
            [(Origin::Shipped, &|| shipped.clone()), (Origin::Kept, &kept)];
        for (origin, image) in found {
            let Some(image) = image() else { continue };
            match load(&image) {
                Ok(module) => return Ok((module, origin)),
                Err(error) => {
                    log::info!(target: "oxidion.cuda", "{} as {}: {error}", source.name, origin.name());
                    refused = (origin == Origin::Kept).then_some(image);
                }
            }
        }
        Err(refused)
    }

    /// Compiles sources, given by their places, several at once; says before how long it takes.
    fn compiled(
        &self,
        wanted: &[&Source],
        mut missing: Vec<usize>,
        refused: &BTreeMap<&str, Option<Vec<u8>>>,
        (architecture, load): (&str, Load<Module>),
    ) -> Vec<(usize, Made<Module>)> {
        if missing.is_empty() {
            return Vec::new();
        }
        missing.sort_by(|a, b| wanted[*b].seconds.total_cmp(&wanted[*a].seconds));
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let at_once = cores.min(MOST_AT_ONCE).min(missing.len());
        let sources: Vec<_> = missing.iter().map(|at| wanted[*at]).collect();
        log::warn!(target: "oxidion.cuda", "{}", self.announcement(&sources, at_once, architecture));
        let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let work = || {
            while let Some(at) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                let begun = Instant::now();
                let source = wanted[*at];
                let one =
                    self.made(source, refused.get(source.name).and_then(Option::as_ref), architecture, load);
                let one = one.map(|(module, origin)| (module, origin, begun.elapsed().as_secs_f64()));
                done.lock().unwrap_or_else(PoisonError::into_inner).push((*at, one));
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..at_once {
                // Where there is no other thread, this one does everything.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        done.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Text that says what is about to be compiled, how long it takes and where the result is kept.
    fn announcement(&self, sources: &[&Source], at_once: usize, architecture: &str) -> String {
        let seconds = sources.iter().map(|source| source.seconds);
        let threads = f64::from(u32::try_from(at_once).unwrap_or(1));
        let longest = seconds.clone().fold(1.0, f64::max);
        let seconds = longest.max(seconds.sum::<f64>() / threads);
        let names: Vec<_> = sources.iter().map(|source| source.name).collect();
        let kept = self.folder.as_ref().map_or_else(
            || "the result is not kept".to_owned(),
            |folder| format!("the result is kept in {}", folder.display()),
        );
        format!(
            "compiling {} CUDA {} for {architecture}, once: about {seconds:.0} s on {at_once} {}; {kept} ({})",
            names.len(),
            if names.len() == 1 { "source" } else { "sources" },
            if at_once == 1 { "core" } else { "cores" },
            names.join(", ")
        )
    }

    /// A source that is compiled here, or by another process which this one waits for.
    /// Not loaded is what is kept if the driver has `refused` it.
    fn made(
        &self,
        source: &Source,
        refused: Option<&Vec<u8>>,
        architecture: &str,
        load: Load<Module>,
    ) -> Result<(Module, Origin)> {
        let key = key(self.sources, source, architecture);
        let file = self.file(&key);
        let begun = Instant::now();
        let _turn = file.as_ref().map(|file| Turn::at(file, PATIENCE));
        let kept = || load(&read(file.as_ref()?, &key).filter(|image| Some(image) != refused)?).ok();
        if let Some(module) = kept() {
            let waited = begun.elapsed().as_secs_f64();
            log::info!(target: "oxidion.cuda", "{}: another process made it in {waited:.1} s", source.name);
            return Ok((module, Origin::Kept));
        }
        log::info!(target: "oxidion.cuda", "compiling {} for {architecture}", source.name);
        let Compiled { module, image, origin } = (self.compile)(self.sources, source, architecture, load)?;
        if let Some(file) = file
            && let Err(error) = store(&file, &key, &image)
        {
            log::warn!(target: "oxidion.cuda", "{} cannot be kept: {error}", file.display());
        }
        Ok((module, origin))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use std::fs;

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

    fn made(
        _: &Sources,
        source: &Source,
        architecture: &str,
        load: &dyn Fn(&[u8]) -> Result<String>,
    ) -> Result<Compiled<String>> {
        let image = image(&format!("{} compiled for {architecture}", source.name));
        Ok(Compiled { module: load(&image)?, image, origin: Origin::Compiled })
    }

    fn never(
        _: &Sources,
        source: &Source,
        architecture: &str,
        _: &dyn Fn(&[u8]) -> Result<String>,
    ) -> Result<Compiled<String>> {
        Err(Error::Internal(format!("{} for {architecture} is compiled", source.name)))
    }

    fn text(image: &[u8]) -> String {
        String::from_utf8_lossy(image).into_owned()
    }

    /// Text of the image that is loaded where all but the first `refused` are.
    fn chosen(
        places: &Places<String>,
        source: &Source,
        architecture: &str,
        refused: usize,
    ) -> Result<String> {
        let left = AtomicUsize::new(refused);
        let load = |image: &[u8]| {
            if left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
                return Err(Error::Cuda(format!("{} is refused", text(image))));
            }
            Ok(text(image))
        };
        places.loaded(&[source], architecture, &load).remove(0).map(|(text, ..)| text)
    }

    /// A folder that is not there yet.
    fn folder(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("oxidion-{name}-{}", std::process::id()))
    }

    #[test]
    fn every_device_loads_shipped_code_and_nothing_is_compiled() {
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
    fn refused_code_gives_way_to_kept_and_then_compiled_code() {
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
    fn every_header_that_a_source_includes_is_there() {
        let Sources { all, headers, .. } = sources();
        let texts = all.iter().map(|s| s.text).chain(headers.iter().map(|(_, text)| &**text));
        for line in texts.flat_map(str::lines).filter_map(|line| line.strip_prefix("#include \"")) {
            let name = line.trim_end_matches('"');
            assert!(headers.iter().any(|(header, _)| *header == name), "{name}");
        }
    }
}
