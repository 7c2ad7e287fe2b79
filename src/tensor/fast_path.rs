//! Properties of tensors at the moment, read through the shim over libtorch: no copies of sizes, no references taken.
//!
//! A step over thousands of small tensors spends its time waiting for the lines of memory in which libtorch keeps what
//! it knows of each, so they can be asked for ahead.

use std::ffi::{c_int, c_void};
use std::ops::Range;

use tch::Tensor;

use super::storage::{TensorPtr, prefetch};
use super::{DType, Device, FlatPtr};

/// Dimensions that a watched tensor has at most.
const DIMS: usize = 4;
/// Bytes of a line of memory.
const LINE: usize = 64;
/// Lines in which libtorch keeps what it knows of a tensor.
const LINES: usize = 4;

/// Which words of a tensor's object point to its storage, to what autograd keeps and to the counter of changes. Memory is
/// asked for by them, nothing is read: wrong ones would cost time.
const STORAGE: usize = 2;
const AUTOGRAD: usize = 3;
const COUNTER: usize = 5;

// SAFETY: as `src/torch_shim.cpp` and `torch-sys` define them.
unsafe extern "C" {
    fn at_scalar_type(tensor: TensorPtr) -> c_int;
    /// The memory of a tensor of this type and shape that is contiguous on a CUDA device, or below 0 on the CPU, and counts
    /// its changes, or null. Its storage is held in `held`, unless that is null.
    fn oxidion_memory(
        tensor: TensorPtr,
        kind: c_int,
        device: c_int,
        dims: u8,
        sizes: *const u32,
        held: *mut Entry,
    ) -> *mut c_void;
    /// Holds the storage of a tensor, if it has one.
    fn oxidion_hold(tensor: TensorPtr, held: *mut Entry) -> bool;
    fn oxidion_hold_again(all: *const Entry, count: usize);
    /// True if these tensors have the storages that were held, with their memory; `ahead` more stand behind them.
    fn oxidion_are_held(all: *const Entry, count: usize, ahead: usize) -> bool;
    fn oxidion_release(all: *const Entry, count: usize);
    /// Has operations of this thread enter Python, or keeps them from it, until the result is given back.
    fn oxidion_dispatch_to_python(enters: bool) -> *mut c_void;
    fn oxidion_dispatch_as_before(guard: *mut c_void);
    /// The gradient of a counted object: a tensor that may be undefined.
    fn oxidion_grad(object: *const c_void) -> TensorPtr;
    fn oxidion_is_defined(tensor: TensorPtr) -> bool;
    /// True where operations on the tensor enter Python.
    fn oxidion_has_dispatch(tensor: TensorPtr) -> bool;
    fn oxidion_bump_version(tensor: TensorPtr);
}

/// Tests whether operations on the tensor enter Python.
#[must_use]
pub fn has_dispatch(tensor: &Tensor) -> bool {
    // SAFETY: the tensor is alive.
    unsafe { oxidion_has_dispatch(tensor.as_ptr().cast()) }
}

/// A storage that is held, and the tensor that had it.
#[derive(Debug)]
#[repr(C)]
struct Entry {
    /// The counted object.
    object: *const c_void,
    /// As `Watch::owned`, null for none.
    owned: *const *const c_void,
    storage: *const c_void,
    address: *const c_void,
    bytes: usize,
}

impl Entry {
    const EMPTY: Self = Self {
        object: std::ptr::null(),
        owned: std::ptr::null(),
        storage: std::ptr::null(),
        address: std::ptr::null(),
        bytes: 0,
    };
}

/// Storages that a step uses. The references keep their memory while tensors get other storages. They do not prevent a resize
/// of a storage, which `are_there` detects. The holder of a tensor's storage also keeps the tensor, or its owner.
#[derive(Debug, Default)]
pub struct Held(Vec<Entry>);

// SAFETY: objects and storages are counted across threads.
unsafe impl Send for Held {}
// SAFETY: a thread that shares this reads alone.
unsafe impl Sync for Held {}

impl Held {
    /// Number of storages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Tests whether none is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Holds the storage of an alias of a tensor, if it has one, as the storage that the tensor had.
    pub fn push(&mut self, tensor: &Tensor, alias: &Tensor) {
        let ptr: TensorPtr = tensor.as_ptr().cast();
        // SAFETY: both tensors are alive, and the entry is there to be written.
        unsafe {
            let mut entry = Entry { object: *ptr, ..Entry::EMPTY };
            if oxidion_hold(alias.as_ptr().cast(), &raw mut entry) {
                self.0.push(entry);
            }
        }
    }

    /// Holds some of the storages a second time.
    #[must_use]
    pub fn again(&self, which: Range<usize>) -> Self {
        let entries = self.0.get(which).unwrap_or_default();
        // SAFETY: all storages are held.
        unsafe { oxidion_hold_again(entries.as_ptr(), entries.len()) };
        Self(entries.iter().map(|entry| Entry { ..*entry }).collect())
    }

    /// Tests whether tensors still have the storages, with the memory that these had when they were held.
    #[must_use]
    #[inline]
    pub fn are_there(&self, which: Range<usize>) -> bool {
        let ahead = self.0.len().saturating_sub(which.end);
        let entries = self.0.get(which).unwrap_or_default();
        // SAFETY: all storages are held, and tensors are kept, or alive where their owner has them; `ahead` more entries
        // stand behind these.
        unsafe { oxidion_are_held(entries.as_ptr(), entries.len(), ahead) }
    }

    /// Lets go of all storages but the first `len`.
    pub fn truncate(&mut self, len: usize) {
        // What goes may run Python, which may come here again.
        let gone = self.0.split_off(len.min(self.0.len()));
        // SAFETY: all storages are held, and these are given back once.
        unsafe { oxidion_release(gone.as_ptr(), gone.len()) };
    }

    /// Lets go of all storages, and keeps the room.
    pub fn clear(&mut self) {
        let mut gone = std::mem::take(&mut self.0);
        // SAFETY: as in `truncate`.
        unsafe { oxidion_release(gone.as_ptr(), gone.len()) };
        gone.clear();
        if self.0.is_empty() {
            self.0 = gone;
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.truncate(0);
    }
}

/// Scope in which libtorch's operations on this thread enter Python, or are kept from it: modes of torch and subclasses of
/// tensors would act on something else than memory.
#[derive(Debug)]
pub struct Dispatch(*mut c_void);

impl Dispatch {
    /// Begins the scope. Scopes of a thread end in the opposite order.
    #[must_use]
    pub fn to_python(enters: bool) -> Self {
        // SAFETY: it sets state of this thread.
        Self(unsafe { oxidion_dispatch_to_python(enters) })
    }
}

impl Drop for Dispatch {
    fn drop(&mut self) {
        // SAFETY: the guard was made on this thread, which a raw pointer does not leave, and is given back once.
        unsafe { oxidion_dispatch_as_before(self.0) }
    }
}

/// Python object of a tensor, which may get another one.
#[derive(Clone, Copy, Debug)]
pub struct Owner(*const *const c_void);

// SAFETY: the object is not freed while this is there, and what is read of it is one word.
unsafe impl Send for Owner {}
// SAFETY: nothing is written through it.
unsafe impl Sync for Owner {}

/// Words of a Python object between which the address of its tensor's counted object is: behind the counter of references and
/// the type, or one further.
const OWNED: [usize; 2] = [2, 3];

impl Owner {
    /// Owner of a tensor.
    ///
    /// # Safety
    /// `object` is a Python object of four words or more, which outlives this and every watch that is made with it.
    #[must_use]
    pub unsafe fn new(object: *const c_void) -> Self {
        Self(object.cast())
    }

    /// The word that holds the address of a counted object, if the owner has it.
    fn word(self, counted: *const c_void) -> Option<*const *const c_void> {
        let words = OWNED.map(|at| self.0.wrapping_add(at));
        // SAFETY: the object is alive and has these words, as the caller of `new` upholds.
        words.into_iter().find(|word| unsafe { word.read() } == counted)
    }
}

/// Properties that a tensor had when it was bound. The tensor must outlive this, or have an owner that does.
#[derive(Clone, Copy, Debug)]
pub struct Watch {
    /// The counted object.
    object: *const c_void,
    /// The word of its owner that holds its address while it is the owner's, and alive.
    owned: Option<*const *const c_void>,
    kind: c_int,
    dtype: DType,
    device: Device,
    /// Number of the device as libtorch has it, below 0 for the CPU.
    place: c_int,
    dims: u8,
    sizes: [u32; DIMS],
}

// SAFETY: the object is counted across threads; what is written to it is written by the thread that takes the step.
unsafe impl Send for Watch {}
// SAFETY: the object is counted across threads; a thread that shares this reads it alone.
unsafe impl Sync for Watch {}

/// The gradient of a watched tensor.
#[derive(Debug)]
pub enum Gradient {
    /// There is none.
    Absent,
    /// Of the tensor's type and shape, contiguous on its device.
    Plain(Tensor, FlatPtr),
    /// Anything else.
    Other,
}

impl Watch {
    /// Watches a tensor whose elements are of type `dtype` and count as memory of `device`; none for what has to be looked at
    /// closely in every step.
    #[must_use]
    pub fn of(tensor: &Tensor, dtype: DType, device: Device) -> Option<Self> {
        let size = tensor.size();
        if size.len() > DIMS || tensor.kind() != dtype.kind() || tensor.device() != device.torch() {
            return None;
        }
        let place =
            if let tch::Device::Cuda(number) = device.torch() { c_int::try_from(number).ok()? } else { -1 };
        let mut sizes = [0; DIMS];
        for (to, size) in sizes.iter_mut().zip(&size) {
            *to = u32::try_from(*size).ok()?;
        }
        let ptr: TensorPtr = tensor.as_ptr().cast();
        // SAFETY: the tensor is alive.
        let (object, kind) = unsafe { (*ptr, at_scalar_type(ptr)) };
        let dims = u8::try_from(size.len()).ok()?;
        Some(Self { object, owned: None, kind, dtype, device, place, dims, sizes })
    }

    /// Watches the tensor of a Python object, so that no reference is needed. Returns `None` if the object does not hold its
    /// address.
    #[must_use]
    pub fn owned_by(self, owner: Owner) -> Option<Self> {
        Some(Self { owned: Some(owner.word(self.object)?), ..self })
    }

    /// Tests whether this is the watched tensor.
    #[must_use]
    pub fn is_of(&self, tensor: &Tensor) -> bool {
        let ptr: TensorPtr = tensor.as_ptr().cast();
        // SAFETY: the tensor is alive.
        self.object == unsafe { *ptr }
    }

    /// Tests whether the tensor is alive. Without an owner the caller keeps it alive.
    #[inline]
    fn is_there(&self) -> bool {
        // SAFETY: the owner is alive, as the caller of `Owner::new` upholds.
        self.owned.is_none_or(|word| unsafe { word.read_volatile() } == self.object)
    }

    fn ptr(&self) -> TensorPtr {
        &raw const self.object
    }

    /// The memory of the tensor, if it still has its type and shape, is contiguous on its device and counts its changes. The
    /// storage is held.
    #[must_use]
    #[inline]
    pub fn memory(&self, held: &mut Held) -> Option<FlatPtr> {
        if !self.is_there() {
            return None;
        }
        // SAFETY: the tensor is alive.
        unsafe { self.memory_at(self.ptr(), self.owned, held) }
    }

    /// As `memory`, of a tensor that should be as this one.
    ///
    /// # Safety
    /// The tensor is alive.
    #[inline]
    unsafe fn memory_at(
        &self,
        ptr: TensorPtr,
        owned: Option<*const *const c_void>,
        held: &mut Held,
    ) -> Option<FlatPtr> {
        let owned = owned.unwrap_or(std::ptr::null());
        // SAFETY: the caller upholds that the tensor is alive.
        let mut entry = Entry { object: unsafe { *ptr }, owned, ..Entry::EMPTY };
        let sizes = self.sizes.as_ptr();
        // SAFETY: the caller upholds that the tensor is alive; there are `dims` sizes, and the entry is there to be written.
        let address = unsafe { oxidion_memory(ptr, self.kind, self.place, self.dims, sizes, &raw mut entry) };
        if !address.is_null() {
            held.0.push(entry);
        }
        let len = self.sizes[..usize::from(self.dims)].iter().map(|size| *size as usize).product();
        FlatPtr::checked(address.cast(), len, self.dtype).map(|found| found.on(self.device))
    }

    /// Returns the gradient with a new reference, and holds its storage. No other code may set it meanwhile.
    #[must_use]
    #[inline]
    pub fn gradient(&self, held: &mut Held) -> Gradient {
        if !self.is_there() {
            return Gradient::Other;
        }
        // SAFETY: the tensor is alive, and with it its gradient, which the caller keeps from being replaced.
        unsafe {
            let ptr = oxidion_grad(self.object);
            if !oxidion_is_defined(ptr) {
                return Gradient::Absent;
            }
            if oxidion_has_dispatch(ptr) {
                return Gradient::Other;
            }
            let Some(flat) = self.memory_at(ptr, None, held) else { return Gradient::Other };
            Gradient::Plain(Tensor::clone_from_ptr(ptr.cast_mut().cast()), flat)
        }
    }

    /// Counts a change of the elements, as autograd wants it. The memory must have been found in this step: a tensor
    /// without a counter, as those made for inference are, has none.
    #[inline]
    pub fn bump_version(&self) {
        if self.is_there() {
            // SAFETY: the tensor is alive, and has a counter.
            unsafe { oxidion_bump_version(self.ptr()) };
        }
    }

    /// Asks for the memory in which libtorch keeps what it knows of the tensor: all of it, or the first line.
    #[inline]
    pub fn prefetch(&self, all: bool) {
        prefetch_object(self.object, all);
        if let Some(word) = self.owned {
            prefetch(word as usize);
        }
    }

    /// Asks for what a look at the tensor reads behind that memory, which should have arrived.
    #[inline]
    pub fn prefetch_storage(&self) {
        if self.is_there() {
            // SAFETY: the tensor is alive.
            unsafe { prefetch_targets(self.object, &[STORAGE, AUTOGRAD]) };
        }
    }

    /// Asks for the counter of changes. The first line of the tensor should have arrived.
    #[inline]
    pub fn prefetch_counter(&self) {
        if self.is_there() {
            // SAFETY: the tensor is alive.
            unsafe { prefetch_targets(self.object, &[COUNTER]) };
        }
    }

    /// Asks for the memory in which libtorch keeps what it knows of the gradient, or for what a look at that reads behind
    /// it.
    #[inline]
    pub fn prefetch_gradient(&self, behind: bool) {
        if !self.is_there() {
            return;
        }
        // SAFETY: the tensor is alive, and with it its gradient, which no other code may set meanwhile.
        unsafe {
            let object = *oxidion_grad(self.object);
            if behind {
                prefetch_targets(object, &[STORAGE]);
            } else {
                prefetch_object(object, true);
            }
        }
    }
}

fn prefetch_object(object: *const c_void, all: bool) {
    (0..if all { LINES } else { 1 }).for_each(|line| prefetch(object as usize + line * LINE));
}

/// Asks for what these words of a tensor's object point to.
///
/// # Safety
/// The object is alive: libtorch's are longer than the words that are read.
#[inline]
unsafe fn prefetch_targets(object: *const c_void, words: &[usize]) {
    for &word in words {
        // SAFETY: the caller upholds that the object is alive.
        let target = unsafe { object.cast::<usize>().add(word).read_volatile() };
        prefetch(target);
        if word == STORAGE {
            // It is longer than a line.
            prefetch(target.wrapping_add(LINE));
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    #[test]
    fn memory_after_a_change_is_that_of_the_changed_tensor_or_none() {
        let mut x = Tensor::zeros([3, 4], (Kind::Float, tch::Device::Cpu));
        let watch = Watch::of(&x, DType::F32, Device::Cpu).unwrap();
        assert_eq!(watch.memory(&mut Held::default()).unwrap().address(), x.data_ptr() as usize);
        assert_eq!(watch.memory(&mut Held::default()).unwrap().len(), 12);
        let other = Tensor::ones([3, 4], (Kind::Float, tch::Device::Cpu));
        x.set_data(&other);
        assert_eq!(watch.memory(&mut Held::default()).unwrap().address(), other.data_ptr() as usize);
        for changed in [
            other.view([4, 3]),
            other.to_kind(Kind::Double),
            other.view([12]),
            Tensor::zeros([4, 3], (Kind::Float, tch::Device::Cpu)).tr(),
            Tensor::zeros([3, 0], (Kind::Float, tch::Device::Cpu)),
        ] {
            x.set_data(&changed);
            assert!(
                watch.memory(&mut Held::default()).is_none(),
                "{:?} {:?}",
                changed.size(),
                changed.kind()
            );
        }
    }

    #[test]
    fn gradient_of_another_kind_is_not_plain() {
        let x = Tensor::zeros([3, 4], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
        let watch = Watch::of(&x, DType::F32, Device::Cpu).unwrap();
        assert!(matches!(watch.gradient(&mut Held::default()), Gradient::Absent));
        (&x * 2.0).sum(Kind::Float).backward();
        let Gradient::Plain(_, flat) = watch.gradient(&mut Held::default()) else { panic!("a gradient") };
        assert_eq!(flat.address(), x.grad().data_ptr() as usize);
        let _ = x.grad().transpose_(0, 1);
        assert!(matches!(watch.gradient(&mut Held::default()), Gradient::Other));
    }

    #[test]
    fn tensor_that_its_owner_has_no_more_has_no_memory() {
        let x = Tensor::zeros([3, 4], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
        let ptr: TensorPtr = x.as_ptr().cast();
        // SAFETY: the tensor is alive.
        let object = unsafe { *ptr };
        for at in OWNED {
            let mut words = [std::ptr::null(); 4];
            words[at] = object;
            // SAFETY: the words outlive the watch.
            let owner = unsafe { Owner::new(words.as_mut_ptr().cast()) };
            let watch = Watch::of(&x, DType::F32, Device::Cpu).unwrap().owned_by(owner).unwrap();
            assert_eq!(watch.memory(&mut Held::default()).unwrap().address(), x.data_ptr() as usize);
            std::hint::black_box(&mut words)[at] = std::ptr::null();
            assert!(watch.memory(&mut Held::default()).is_none());
            assert!(matches!(watch.gradient(&mut Held::default()), Gradient::Other));
            assert!(Watch::of(&x, DType::F32, Device::Cpu).unwrap().owned_by(owner).is_none());
        }
    }

    #[test]
    fn storage_that_is_held_stays_and_shows_what_changed() {
        let zeros = |n: i64| Tensor::zeros([n], (Kind::Float, tch::Device::Cpu));
        let (mut held, mut x, y) = (Held::default(), zeros(3), zeros(4));
        held.push(&x, &x);
        held.push(&y, &y);
        let address = x.data_ptr() as usize;
        assert!(held.are_there(0..2));
        x.set_data(&zeros(3));
        assert_eq!([held.are_there(0..1), held.are_there(1..2)], [false, true]);
        assert_ne!(x.data_ptr() as usize, address, "the memory of before is not given away");
        let again = held.again(1..2);
        held.clear();
        assert!(held.is_empty() && again.are_there(0..1));
        let _ = y.shallow_clone().resize_([4000]);
        assert!(!again.are_there(0..1));
    }

    #[test]
    fn bump_version_counts_one_change() {
        let x = Tensor::zeros([3], (Kind::Float, tch::Device::Cpu));
        let before = x.internal_version();
        Watch::of(&x, DType::F32, Device::Cpu).unwrap().bump_version();
        assert_eq!(x.internal_version(), before + 1);
    }
}
