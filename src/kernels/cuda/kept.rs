//! Machine code in the user's folder: files that are there whole or not at all, each made by one process while others wait.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, UNIX_EPOCH};

use sha2::{Digest, Sha256};

/// Bits of a mode that let others write.
const OTHERS_WRITE: u32 = 0o022;
/// Time after which a process no longer waits for another one that makes a file.
pub(super) const PATIENCE: Duration = Duration::from_secs(300);
/// Time between two looks at a file that another process makes.
const PAUSE: Duration = Duration::from_millis(50);

/// Digest of an image under its key, which a kept file has at its end.
fn digest(key: &str, image: &[u8]) -> [u8; 32] {
    Sha256::new().chain_update(key).chain_update(image).finalize().into()
}

/// Returns the image of a kept file, if it was written for this key and no other user can have written to it. The driver
/// trusts what it loads.
pub(super) fn read(file: &Path, key: &str) -> Option<Vec<u8>> {
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
    log::warn!(target: "oxidion.cuda", "{} is not loaded, and is compiled again: {why}", file.display());
    None
}

/// Numbers the files that this process writes.
static NUMBER: AtomicU64 = AtomicU64::new(0);

/// Writes a file that other processes see whole or not at all: under a unique name in the same folder, then renamed.
pub(super) fn store(file: &Path, key: &str, image: &[u8]) -> std::io::Result<()> {
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

/// The right to make a file, until it is dropped. All processes have it where a file system has no locks.
#[derive(Debug)]
pub(super) struct Turn(Option<(File, PathBuf)>);

impl Turn {
    /// Waits until no other process makes the file, or for as long as a making may take.
    pub(super) fn at(file: &Path, patience: Duration) -> Self {
        let lock = file.with_extension("lock");
        let begun = Instant::now();
        loop {
            match try_lock(&lock) {
                Ok(Some(held)) => return Self(Some((held, lock))),
                Ok(None) => {}
                Err(TryLockError::Error(error)) => {
                    log::debug!(target: "oxidion.cuda", "{} is no lock: {error}", lock.display());
                    return Self(None);
                }
                Err(TryLockError::WouldBlock) => {
                    let age = fs::metadata(&lock).and_then(|found| found.modified());
                    let age = age.ok().and_then(|since| since.elapsed().ok()).unwrap_or_default();
                    if age.max(begun.elapsed()) >= patience {
                        let owner = fs::read_to_string(&lock).unwrap_or_default();
                        let path = file.display();
                        log::warn!(target: "oxidion.cuda", "process {owner} has not made {path}: it is made here too");
                        return Self(None);
                    }
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }
}

/// A lock that is held, with this process's number in it; none where it was taken away meanwhile by who had it.
fn try_lock(lock: &Path) -> std::result::Result<Option<File>, TryLockError> {
    let folder = lock.parent().unwrap_or(Path::new("."));
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(TryLockError::Error)?;
    let mut open = OpenOptions::new();
    let open = open.read(true).write(true).create(true).truncate(false).mode(0o600).open(lock);
    let mut held = open.map_err(TryLockError::Error)?;
    held.try_lock()?;
    let number = |found: std::io::Result<fs::Metadata>| found.map(|found| found.ino()).ok();
    if number(held.metadata()) != number(fs::metadata(lock)) {
        return Ok(None);
    }
    let written = held.set_len(0).and_then(|()| write!(held, "{}", std::process::id()));
    written.map_err(TryLockError::Error)?;
    Ok(Some(held))
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some((_, lock)) = &self.0 {
            let _ = fs::remove_file(lock); // while it is held
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// A folder that is not there yet.
    fn folder(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("oxidion-{name}-{}", std::process::id()))
    }

    #[test]
    fn kept_code_is_read_only_if_intact_and_of_its_key_and_owner() {
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

    #[test]
    fn turns_are_taken_one_after_the_other_and_leave_nothing() {
        let folder = folder("turns");
        let file = folder.join("a.cubin");
        let first = Turn::at(&file, PATIENCE);
        assert_eq!(fs::read_to_string(folder.join("a.lock")).unwrap(), std::process::id().to_string());
        let held = AtomicU64::new(1);
        std::thread::scope(|scope| {
            let others: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        let turn = Turn::at(&file, PATIENCE);
                        assert!(turn.0.is_some());
                        assert_eq!(held.fetch_add(1, Ordering::SeqCst), 0);
                        std::thread::sleep(PAUSE);
                        held.fetch_sub(1, Ordering::SeqCst);
                    })
                })
                .collect();
            std::thread::sleep(PAUSE);
            held.fetch_sub(1, Ordering::SeqCst);
            drop(first);
            for other in others {
                other.join().unwrap();
            }
        });
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        // Other files have turns of their own.
        let (_a, b) = (Turn::at(&file, PATIENCE), Turn::at(&folder.join("b.cubin"), PATIENCE));
        assert!(b.0.is_some());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn waits_end_and_need_locks() {
        let folder = folder("patience");
        let file = folder.join("a.cubin");
        let _first = Turn::at(&file, PATIENCE);
        let begun = Instant::now();
        assert!(Turn::at(&file, Duration::from_millis(200)).0.is_none());
        assert!(begun.elapsed() >= Duration::from_millis(200));
        // An old lock that another process still holds is not waited for.
        let old = std::time::SystemTime::now() - PATIENCE;
        File::options().write(true).open(folder.join("a.lock")).unwrap().set_modified(old).unwrap();
        let begun = Instant::now();
        assert!(Turn::at(&file, PATIENCE).0.is_none());
        assert!(begun.elapsed() < PATIENCE / 10);
        // A lock that cannot be opened keeps no process out.
        fs::create_dir(folder.join("b.lock")).unwrap();
        assert!(Turn::at(&folder.join("b.cubin"), PATIENCE).0.is_none());
        fs::remove_dir_all(folder).unwrap();
    }
}
