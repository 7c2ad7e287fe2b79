//! Threads that work on the same jobs.
//!
//! A job is a number of items and what is done to each. The thread that posts one works on it too, and returns when all of
//! it is done; the others take up items of any job that has some left. An item may post a job of its own.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex, PoisonError};

/// Function that is applied to each item.
type Task<'a> = &'a (dyn Fn(usize) + Sync);

/// Jobs that can be open at the same time: one, and one of each of 32 of its items.
const JOBS: usize = 33;
/// Number of times that a thread looks for work before it lets others have its core: about 0.1 ms.
const LOOKS: u32 = 2000;
/// Number of times that a thread then lets others have its core before it sleeps.
const YIELDS: u32 = 50;

thread_local! {
    static CURRENT: Cell<*const Team> = const { Cell::new(std::ptr::null()) };
}

/// The threads that work together, and their jobs.
#[derive(Debug)]
pub(super) struct Team {
    jobs: [Job; JOBS],
    /// Jobs behind this one were never open.
    used: AtomicUsize,
    closed: AtomicBool,
    sleepers: AtomicUsize,
    bed: Mutex<()>,
    alarm: Condvar,
}

/// One job, on lines of memory of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Job {
    taken: AtomicBool,
    /// Upper half: number of the job among those that were here; lower half: items that no thread has taken up.
    left: AtomicU64,
    count: AtomicUsize,
    /// Address at which the thread that posted the job keeps the `Task`.
    task: AtomicPtr<()>,
    done: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

const LEFT: u64 = u32::MAX as u64;

impl Job {
    /// Opens a job, in place of the one that was here.
    fn open(&self, count: u32, task: &Task<'_>) {
        self.count.store(count as usize, Ordering::Relaxed);
        self.task.store(std::ptr::from_ref(task).cast::<()>().cast_mut(), Ordering::Relaxed);
        self.done.store(0, Ordering::Relaxed);
        let next = (self.left.load(Ordering::Relaxed) >> 32).wrapping_add(1) << 32;
        self.left.store(next | u64::from(count), Ordering::Release);
    }

    fn has_items(&self) -> bool {
        self.left.load(Ordering::Relaxed) & LEFT != 0
    }

    /// Works on items until none is left; returns whether there was one.
    fn work(&self) -> bool {
        let mut any = false;
        let mut left = self.left.load(Ordering::Acquire);
        while left & LEFT != 0 {
            let (task, count) = (self.task.load(Ordering::Relaxed), self.count.load(Ordering::Relaxed));
            match self.left.compare_exchange(left, left - 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    // Of the same job: another one is not opened here before this item is done.
                    let item = count - usize::try_from(left & LEFT).unwrap_or(count);
                    // SAFETY: the thread that posted the job keeps the task until all items are done.
                    let task: &Task<'_> = unsafe { &*task.cast::<Task<'_>>() };
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| task(item))) {
                        *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
                    }
                    self.done.fetch_add(1, Ordering::AcqRel);
                    any = true;
                    left = self.left.load(Ordering::Acquire);
                }
                Err(now) => left = now,
            }
        }
        any
    }
}

/// Wait that gets a little longer each time.
#[derive(Default)]
struct Patience(u32);

impl Patience {
    /// Waits once; true if patience is at its end.
    fn wait(&mut self) -> bool {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            0..LOOKS => std::hint::spin_loop(),
            LOOKS.. => std::thread::yield_now(),
        }
        self.0 > LOOKS + YIELDS
    }
}

/// Guard that makes a team the one of this thread while it lives.
struct Membership;

impl Membership {
    fn of(team: &Team) -> Self {
        CURRENT.set(team);
        Self
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        CURRENT.set(std::ptr::null());
    }
}

impl Team {
    /// Team without jobs.
    pub(super) fn new() -> Self {
        Self {
            jobs: std::array::from_fn(|_| Job::default()),
            used: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            bed: Mutex::default(),
            alarm: Condvar::new(),
        }
    }

    /// Tests whether this thread works in a team.
    pub(super) fn is_there() -> bool {
        !CURRENT.get().is_null()
    }

    /// Runs `work` with the team of this thread, if it works in one.
    pub(super) fn with_current<R>(work: impl FnOnce(&Self) -> R) -> Option<R> {
        // SAFETY: a member leaves before its team ends.
        unsafe { CURRENT.get().as_ref() }.map(work)
    }

    /// Runs `work` as the leader of the team, which then ends. A panic of it is returned as an error.
    pub(super) fn lead<R>(&self, work: impl FnOnce() -> R) -> std::thread::Result<R> {
        let member = Membership::of(self);
        let result = catch_unwind(AssertUnwindSafe(work));
        drop(member);
        self.closed.store(true, Ordering::Release);
        self.wake();
        result
    }

    /// Works on whatever is posted until the team ends.
    pub(super) fn help(&self) {
        let _member = Membership::of(self);
        let mut patience = Patience::default();
        while !self.closed.load(Ordering::Acquire) {
            if self.open().any(Job::work) {
                patience = Patience::default();
            } else if patience.wait() {
                self.sleep();
                patience = Patience::default();
            }
        }
    }

    /// Applies `task` to items `0..count`, with the other threads; returns when all are done.
    ///
    /// # Panics
    /// As one of the items did.
    pub(super) fn each(&self, count: usize, task: Task<'_>) {
        let free = || self.jobs.iter().position(|job| !job.taken.swap(true, Ordering::Acquire));
        let Some((items, at)) = u32::try_from(count).ok().and_then(|items| Some((items, free()?))) else {
            return (0..count).for_each(task);
        };
        let job = &self.jobs[at];
        self.used.fetch_max(at + 1, Ordering::Relaxed);
        job.open(items, &task);
        self.wake();
        job.work();
        let mut patience = Patience::default();
        while job.done.load(Ordering::Acquire) < count {
            patience.wait();
        }
        let panic = job.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        job.taken.store(false, Ordering::Release);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// The jobs that may have items.
    fn open(&self) -> impl Iterator<Item = &Job> {
        self.jobs[..self.used.load(Ordering::Relaxed)].iter()
    }

    fn sleep(&self) {
        let mut bed = self.bed.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        // Either this sees what was posted, or who posted it sees a sleeper.
        fence(Ordering::SeqCst);
        while !self.closed.load(Ordering::Acquire) && !self.open().any(Job::has_items) {
            bed = self.alarm.wait(bed).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            drop(self.bed.lock().unwrap_or_else(PoisonError::into_inner));
            self.alarm.notify_all();
        }
    }
}
