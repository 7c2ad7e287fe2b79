//! Properties of tensors at the moment, read through libtorch's C interface: no copies of sizes, no references taken.
//!
//! A step over thousands of small tensors spends its time waiting for the lines of memory in which libtorch keeps what
//! it knows of each, so they can be asked for ahead.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use tch::Tensor;

use super::{DType, FlatPtr};

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

/// Pointer to a libtorch `Tensor`, which is one pointer to a counted object: what its C interface takes.
type TensorPtr = *const *const c_void;

// SAFETY: as libtorch's `shim.h` and the wrappers of `torch-sys` declare them.
unsafe extern "C" {
    fn aoti_torch_get_layout(tensor: TensorPtr, layout: *mut i32) -> i32;
    fn aoti_torch_layout_strided() -> i32;
    fn aoti_torch_get_device_type(tensor: TensorPtr, device: *mut i32) -> i32;
    fn aoti_torch_device_type_cpu() -> i32;
    fn aoti_torch_get_dtype(tensor: TensorPtr, dtype: *mut i32) -> i32;
    fn aoti_torch_get_dim(tensor: TensorPtr, dim: *mut i64) -> i32;
    fn aoti_torch_get_sizes(tensor: TensorPtr, sizes: *mut *const i64) -> i32;
    fn aoti_torch_is_contiguous(tensor: TensorPtr, contiguous: *mut bool) -> i32;
    fn aoti_torch_get_data_ptr(tensor: TensorPtr, address: *mut *mut c_void) -> i32;
    fn aoti_torch_is_defined(tensor: TensorPtr, defined: *mut bool) -> i32;
    fn atg_is_neg(tensor: TensorPtr) -> c_int;
    fn atg_is_inference(tensor: TensorPtr) -> c_int;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// # Safety
/// The object is alive.
type OfObject = unsafe extern "C" fn(*const c_void) -> TensorPtr;
/// # Safety
/// The tensor is alive.
type Asks = unsafe extern "C" fn(TensorPtr) -> bool;
/// # Safety
/// The tensor is alive.
type Tells = unsafe extern "C" fn(TensorPtr);

/// Functions of libtorch that its C interface does not have.
struct Functions {
    /// `const at::Tensor& c10::TensorImpl::grad() const`
    grad: OfObject,
    /// `bool at::impl::tensor_has_dispatch(const at::Tensor&)`
    has_dispatch: Asks,
    /// `void torch::autograd::impl::bump_version(const at::Tensor&)`
    bump_version: Tells,
}

/// None where this libtorch has not all of them: then every tensor is looked at through `tch`.
fn functions() -> Option<&'static Functions> {
    static FOUND: OnceLock<Option<Functions>> = OnceLock::new();
    let find = |name: &CStr| {
        // SAFETY: the null handle means the libraries of this one; the name ends in a zero.
        let address = unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) };
        (!address.is_null()).then_some(address)
    };
    let load = || {
        let grad = find(c"_ZNK3c1010TensorImpl4gradEv")?;
        let dispatch = find(c"_ZN2at4impl19tensor_has_dispatchERKNS_6TensorE")?;
        let bump = find(c"_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE")?;
        // SAFETY: a mangled name spells the types of the arguments; references and `this` are pointers.
        unsafe {
            Some(Functions {
                grad: std::mem::transmute::<*mut c_void, OfObject>(grad),
                has_dispatch: std::mem::transmute::<*mut c_void, Asks>(dispatch),
                bump_version: std::mem::transmute::<*mut c_void, Tells>(bump),
            })
        }
    };
    FOUND.get_or_init(load).as_ref()
}

/// Properties that a tensor had when it was bound. The tensor must outlive this.
#[derive(Clone, Copy, Debug)]
pub struct Watch {
    /// The counted object.
    object: *const c_void,
    kind: i32,
    dtype: DType,
    dims: u8,
    sizes: [u32; DIMS],
}

// SAFETY: the object is counted across threads; what is written to it is written by the thread that takes the step.
unsafe impl Send for Watch {}
// SAFETY: as above.
unsafe impl Sync for Watch {}

/// The gradient of a watched tensor.
#[derive(Debug)]
pub enum Gradient {
    /// There is none.
    Absent,
    /// Of the tensor's type and shape, contiguous on the CPU.
    Plain(Tensor, FlatPtr),
    /// Anything else.
    Other,
}

impl Watch {
    /// Watches a tensor whose elements are of type `dtype`; none for what has to be looked at closely in every step.
    #[must_use]
    pub fn of(tensor: &Tensor, dtype: DType) -> Option<Self> {
        functions()?;
        let size = tensor.size();
        if size.len() > DIMS || tensor.kind() != dtype.kind() {
            return None;
        }
        let (mut sizes, mut kind) = ([0; DIMS], 0);
        for (to, size) in sizes.iter_mut().zip(&size) {
            *to = u32::try_from(*size).ok()?;
        }
        let ptr: TensorPtr = tensor.as_ptr().cast();
        // SAFETY: the tensor is alive.
        let object = unsafe { aoti_torch_get_dtype(ptr, &raw mut kind).eq(&0).then_some(*ptr) }?;
        let dims = u8::try_from(size.len()).ok()?;
        Some(Self { object, kind, dtype, dims, sizes })
    }

    fn ptr(&self) -> TensorPtr {
        &raw const self.object
    }

    /// The memory of the tensor, if it still has its type and shape, is contiguous on the CPU and counts its changes.
    #[must_use]
    #[inline]
    pub fn memory(&self) -> Option<FlatPtr> {
        // SAFETY: the tensor is alive.
        unsafe { self.memory_at(self.ptr()) }
    }

    /// As `memory`, of a tensor that should be as this one.
    ///
    /// # Safety
    /// The tensor is alive.
    #[inline]
    unsafe fn memory_at(&self, ptr: TensorPtr) -> Option<FlatPtr> {
        let (mut layout, mut device, mut kind, mut dim) = (-1, -1, -1, -1);
        let (mut sizes, mut address) = (std::ptr::null(), std::ptr::null_mut());
        let mut contiguous = false;
        // SAFETY: the caller upholds that the tensor is alive; libtorch writes what it is asked for.
        let plain = unsafe {
            aoti_torch_get_layout(ptr, &raw mut layout) == 0
                && layout == aoti_torch_layout_strided()
                && aoti_torch_get_device_type(ptr, &raw mut device) == 0
                && device == aoti_torch_device_type_cpu()
                && aoti_torch_get_dtype(ptr, &raw mut kind) == 0
                && kind == self.kind
                && aoti_torch_get_dim(ptr, &raw mut dim) == 0
                && dim == i64::from(self.dims)
                && aoti_torch_is_contiguous(ptr, &raw mut contiguous) == 0
                && contiguous
                && atg_is_neg(ptr) == 0
                && atg_is_inference(ptr) == 0
                && aoti_torch_get_sizes(ptr, &raw mut sizes) == 0
        };
        if !plain {
            return None;
        }
        let mut len = 1;
        for (d, expected) in self.sizes[..usize::from(self.dims)].iter().enumerate() {
            // SAFETY: there are `dim` sizes.
            if unsafe { *sizes.add(d) } != i64::from(*expected) {
                return None;
            }
            len *= *expected as usize;
        }
        // SAFETY: as above.
        let known = unsafe { aoti_torch_get_data_ptr(ptr, &raw mut address) } == 0;
        if known { FlatPtr::told(address.cast(), len, self.dtype) } else { None }
    }

    /// The gradient, of which a reference is taken. Nobody else may set it meanwhile.
    #[must_use]
    #[inline]
    pub fn gradient(&self) -> Gradient {
        let (Some(functions), mut defined) = (functions(), false) else { return Gradient::Other };
        // SAFETY: the tensor is alive, and with it its gradient, which the caller keeps from being replaced.
        unsafe {
            let ptr = (functions.grad)(self.object);
            if aoti_torch_is_defined(ptr, &raw mut defined) != 0 {
                return Gradient::Other;
            }
            if !defined {
                return Gradient::Absent;
            }
            if (functions.has_dispatch)(ptr) {
                return Gradient::Other;
            }
            let Some(flat) = self.memory_at(ptr) else { return Gradient::Other };
            Gradient::Plain(Tensor::clone_from_ptr(ptr.cast_mut().cast()), flat)
        }
    }

    /// Counts a change of the elements, as autograd wants it; false where no way to do that is known. The memory must
    /// have been found in this step: a tensor without a counter, as those made for inference are, has none.
    #[must_use]
    #[inline]
    pub fn bump_version(&self) -> bool {
        let Some(functions) = functions() else { return false };
        // SAFETY: the tensor is alive, and has a counter.
        unsafe { (functions.bump_version)(self.ptr()) };
        true
    }

    /// Asks for the memory in which libtorch keeps what it knows of the tensor: all of it, or the first line.
    #[inline]
    pub fn prefetch(&self, all: bool) {
        prefetch_object(self.object, all);
    }

    /// Asks for what a look at the tensor reads behind that memory, which should have arrived.
    #[inline]
    pub fn prefetch_storage(&self) {
        // SAFETY: the tensor is alive.
        unsafe { prefetch_targets(self.object, &[STORAGE, AUTOGRAD]) };
    }

    /// Asks for the counter of changes. The first line of the tensor should have arrived.
    #[inline]
    pub fn prefetch_counter(&self) {
        // SAFETY: the tensor is alive.
        unsafe { prefetch_targets(self.object, &[COUNTER]) };
    }

    /// Asks for the memory in which libtorch keeps what it knows of the gradient, or for what a look at that reads behind
    /// it.
    #[inline]
    pub fn prefetch_gradient(&self, behind: bool) {
        let Some(functions) = functions() else { return };
        // SAFETY: the tensor is alive, and with it its gradient, which nobody else may set meanwhile.
        unsafe {
            let object = *(functions.grad)(self.object);
            if behind {
                prefetch_targets(object, &[STORAGE]);
            } else {
                prefetch_object(object, true);
            }
        }
    }
}

/// Asks for a line of memory, wherever it is.
#[inline]
pub fn prefetch(address: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: asking for memory that is not there does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address as *const i8) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
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
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn functions_of_this_libtorch_are_found() {
        assert!(functions().is_some());
    }

    #[test]
    fn memory_after_a_change_is_that_of_the_changed_tensor_or_none() {
        let mut x = Tensor::zeros([3, 4], (Kind::Float, Device::Cpu));
        let watch = Watch::of(&x, DType::F32).unwrap();
        assert_eq!(watch.memory().unwrap().address(), x.data_ptr() as usize);
        assert_eq!(watch.memory().unwrap().len(), 12);
        let other = Tensor::ones([3, 4], (Kind::Float, Device::Cpu));
        x.set_data(&other);
        assert_eq!(watch.memory().unwrap().address(), other.data_ptr() as usize);
        for changed in [
            other.view([4, 3]),
            other.to_kind(Kind::Double),
            other.view([12]),
            Tensor::zeros([4, 3], (Kind::Float, Device::Cpu)).tr(),
            Tensor::zeros([3, 0], (Kind::Float, Device::Cpu)),
        ] {
            x.set_data(&changed);
            assert!(watch.memory().is_none(), "{:?} {:?}", changed.size(), changed.kind());
        }
    }

    #[test]
    fn gradient_of_another_kind_is_not_plain() {
        let x = Tensor::zeros([3, 4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let watch = Watch::of(&x, DType::F32).unwrap();
        assert!(matches!(watch.gradient(), Gradient::Absent));
        (&x * 2.0).sum(Kind::Float).backward();
        let Gradient::Plain(_, flat) = watch.gradient() else { panic!("a gradient") };
        assert_eq!(flat.address(), x.grad().data_ptr() as usize);
        let _ = x.grad().transpose_(0, 1);
        assert!(matches!(watch.gradient(), Gradient::Other));
    }

    #[test]
    fn bump_version_counts_one_change() {
        let x = Tensor::zeros([3], (Kind::Float, Device::Cpu));
        let before = x.internal_version();
        assert!(Watch::of(&x, DType::F32).unwrap().bump_version());
        assert_eq!(x.internal_version(), before + 1);
    }
}
