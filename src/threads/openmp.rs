//! The threads of the OpenMP that libtorch computes with.
//!
//! After a parallel region they look for more work for some milliseconds before they sleep. Threads of another pool would
//! share the cores with them for that long, and have to be woken first; these are awake.

use std::ffi::{CStr, c_char, c_uint, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

// SAFETY: as POSIX declares it.
unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Function that every thread of a region runs, with the region's argument.
type Entry = extern "C" fn(*mut c_void);
/// Runs a region on at most the given number of threads, including the calling one; flags are zero. The OpenMP of LLVM and
/// of Intel have it under the same name.
///
/// # Safety
/// The argument is what the entry takes.
type Parallel = unsafe extern "C" fn(Entry, *mut c_void, c_uint, c_uint);

const PARALLEL: &CStr = c"GOMP_parallel";

/// Flag set in a forked child: the threads stayed with its parent, and the library waits for them.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Finds the function that runs a region; none where libtorch has another way to be parallel.
fn parallel() -> Option<Parallel> {
    static FOUND: OnceLock<Option<Parallel>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        // SAFETY: the null handle means the libraries of this one, libtorch's among them; the name ends in a zero.
        let address = unsafe { dlsym(std::ptr::null_mut(), PARALLEL.as_ptr()) };
        // SAFETY: it is the function of that name.
        (!address.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Parallel>(address) })
    })
}

/// State that the threads of a region share.
struct Region<'a> {
    work: &'a (dyn Fn() + Sync),
}

extern "C" fn enter(region: *mut c_void) {
    // SAFETY: `run` passes a region that outlives all threads of it.
    let region = unsafe { &*region.cast::<Region<'_>>() };
    (region.work)();
}

/// Runs `work`, which must not panic, on at most `threads` threads, including the calling one. Returns whether it did.
pub(super) fn run(threads: usize, work: &(dyn Fn() + Sync)) -> bool {
    let (false, Some(parallel), Ok(threads)) =
        (FORKED.load(Ordering::Relaxed), parallel(), c_uint::try_from(threads))
    else {
        return false;
    };
    let mut region = Region { work };
    // SAFETY: the function returns when all threads have left the region.
    unsafe { parallel(enter, std::ptr::from_mut(&mut region).cast(), threads, 0) };
    true
}

/// Tests whether the process is a forked child.
#[must_use]
pub fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// Marks the process as a forked child, which has none of the threads.
pub(super) fn forget_after_fork() {
    FORKED.store(true, Ordering::Relaxed);
}
