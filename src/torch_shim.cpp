// The library between the core and one minor version of torch: liboxidion_torch.so.
//
// The core calls C functions under names that no version of torch changes. Those of torch-sys are cut out of the crate
// by python/build_shim.py and put where the mark below stands; the others are here. The library is compiled once for each
// minor version, against the headers of that version, and nothing else of the package knows the ABI of libtorch.
//
// Macros that are set by the generator and by the compile command:
//   OXIDION_SHIM_ABI   hash of this file and of the list of names, as a string
//   OXIDION_PAYLOAD    type of what a Python tensor holds, from the headers of this version; without it there are no
//                      functions for Python objects (tests of the core run without Python)
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/TorchDispatchUtils.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/version.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#define OXIDION_PUBLIC extern "C" __attribute__((visibility("default")))

// libstdc++ asks glibc 2.32 and newer whether there is only one thread. "There may be more" is always right, and lets
// the library run with an older glibc.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

// What the functions of torch-sys are written with.
namespace torch {
using namespace at;
} // namespace torch
using std::exception;
using std::string;
using std::vector;
typedef at::Tensor *tensor;
typedef at::Scalar *scalar;
static thread_local char *torch_last_err = nullptr;
#define PROTECT(x)                                                                                                   \
  try {                                                                                                              \
    x                                                                                                                \
  } catch (const std::exception &e) {                                                                                \
    torch_last_err = strdup(e.what());                                                                               \
  } catch (...) {                                                                                                    \
    torch_last_err = strdup("libtorch threw an object that is not a std::exception");                                \
  }

// @functions of torch-sys

OXIDION_PUBLIC const char *oxidion_shim_abi() { return OXIDION_SHIM_ABI; }

OXIDION_PUBLIC const char *oxidion_torch_version() { return TORCH_VERSION; }

/// A tensor over memory. torch-sys leaves the device to libtorch, which asks the driver whose the pointer is: about a
/// microsecond for each, some hundred times in a step by libtorch.
OXIDION_PUBLIC tensor at_tensor_of_blob(void *data, int64_t *dims, size_t ndims, int64_t *strides, size_t nstrides,
                                        int type, int device) {
  PROTECT(const auto place = device_of_int(device);
          const auto options = at::TensorOptions().device(place).dtype(at::ScalarType(type));
          auto maker = at::for_blob(data, at::IntArrayRef(dims, ndims));
          maker.options(options).target_device(place);
          if (nstrides) maker.strides(at::IntArrayRef(strides, nstrides));
          return new at::Tensor(maker.make_tensor());)
  return nullptr;
}

/// A storage that is held, and the tensor that had it: what the core calls `Entry`.
struct OxidionHeld {
  const c10::TensorImpl *object;
  /// Word that holds the address of the tensor while it is alive; null if the caller keeps the tensor alive.
  const c10::TensorImpl *const *owner;
  c10::StorageImpl *storage;
  const void *address;
  size_t bytes;
};

namespace {
/// Takes a reference to the storage of a tensor, which keeps its memory while the tensor gets another one.
void hold(const at::Tensor &t, OxidionHeld *held) {
  auto *storage = t.storage().unsafeGetStorageImpl();
  held->address = storage->data();
  held->bytes = storage->nbytes();
  held->storage = storage;
  c10::raw::intrusive_ptr::incref(storage);
}
} // namespace

/// The memory of a tensor of this type and shape that is contiguous on a CUDA device, or below 0 on the CPU, and counts its
/// changes, or null. With `held` its storage is held.
OXIDION_PUBLIC void *oxidion_memory(const at::Tensor *t, int kind, int device, uint8_t dims,
                                    const uint32_t *sizes, OxidionHeld *held) noexcept {
  try {
    const auto place = t->device();
    const bool there = device < 0 ? place.is_cpu() : place.is_cuda() && place.index() == device;
    const bool plain = there && t->layout() == at::kStrided && static_cast<int>(t->scalar_type()) == kind &&
                       t->dim() == dims && t->is_contiguous() && !t->is_neg() && !t->is_inference();
    if (!plain)
      return nullptr;
    const auto actual = t->sizes();
    for (uint8_t d = 0; d < dims; ++d)
      if (actual[d] != static_cast<int64_t>(sizes[d]))
        return nullptr;
    const auto end = static_cast<size_t>(t->storage_offset() + t->numel()) * t->itemsize();
    auto *memory = end <= t->storage().nbytes() ? t->data_ptr() : nullptr;
    if (memory && held)
      hold(*t, held);
    return memory;
  } catch (...) {
    return nullptr;
  }
}

/// Bytes that the elements of a tensor need, from the beginning of its storage, and those that the storage has: none for one
/// that only stands for zeros.
OXIDION_PUBLIC void oxidion_storage(const at::Tensor *t, size_t *needed, size_t *there) noexcept {
  *needed = *there = 0;
  try {
    if (t->layout() == at::kStrided && t->has_storage()) {
      *needed = at::detail::computeStorageNbytes(t->sizes(), t->strides(), t->itemsize(), t->storage_offset());
      *there = t->storage().data() ? t->storage().nbytes() : 0;
    }
  } catch (...) {
  }
}

/// Holds the storage of a tensor, if it has one.
OXIDION_PUBLIC bool oxidion_hold(const at::Tensor *t, OxidionHeld *held) noexcept {
  try {
    if (t->layout() != at::kStrided || !t->has_storage())
      return false;
    hold(*t, held);
    return true;
  } catch (...) {
    return false;
  }
}

/// True if these tensors still have the storages that were held, with the memory that they had then. `ahead`: how many
/// stand behind them, whose memory is asked for.
OXIDION_PUBLIC bool oxidion_are_held(const OxidionHeld *all, size_t count, size_t ahead) noexcept {
  constexpr size_t far = 24, near = 12;
  try {
    for (size_t i = 0; i < count; ++i) {
      if (i + far < count + ahead) {
        __builtin_prefetch(all[i + far].object);
        __builtin_prefetch(all[i + near].storage);
      }
      const auto &[object, owner, storage, address, bytes] = all[i];
      const bool there = !owner || *static_cast<const c10::TensorImpl *const volatile *>(owner) == object;
      if (!there || object->unsafe_storage().unsafeGetStorageImpl() != storage || storage->data() != address ||
          storage->nbytes() != bytes)
        return false;
    }
    return true;
  } catch (...) {
    return false;
  }
}

/// Gives back the references to storages.
OXIDION_PUBLIC void oxidion_release(const OxidionHeld *all, size_t count) noexcept {
  constexpr size_t near = 12;
  for (size_t i = 0; i < count; ++i) {
    if (i + near < count)
      __builtin_prefetch(all[i + near].storage, 1);
    try {
      c10::raw::intrusive_ptr::decref(all[i].storage);
    } catch (...) {
    }
  }
}

/// Takes further references.
OXIDION_PUBLIC void oxidion_hold_again(const OxidionHeld *all, size_t count) noexcept {
  for (size_t i = 0; i < count; ++i)
    c10::raw::intrusive_ptr::incref(all[i].storage);
}

namespace {
/// Keys by which operations enter Python: modes, subclasses of tensors, functorch.
constexpr c10::DispatchKeySet python_keys({at::DispatchKey::Python, at::DispatchKey::PythonTLSSnapshot,
                                           at::DispatchKey::PythonDispatcher,
                                           at::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                           at::DispatchKey::FuncTorchDynamicLayerBackMode});
} // namespace

/// Has operations of this thread enter Python, or keeps them from it, until `oxidion_dispatch_as_before` gets the result.
OXIDION_PUBLIC void *oxidion_dispatch_to_python(bool enters) noexcept {
  try {
    const auto own = c10::impl::tls_local_dispatch_key_set();
    const auto excluded = enters ? own.excluded_ - python_keys : own.excluded_ | python_keys;
    return new c10::impl::ForceDispatchKeyGuard(own.included_, excluded);
  } catch (...) {
    return nullptr;
  }
}

OXIDION_PUBLIC void oxidion_dispatch_as_before(void *guard) noexcept {
  delete static_cast<c10::impl::ForceDispatchKeyGuard *>(guard);
}

OXIDION_PUBLIC const at::Tensor *oxidion_grad(const c10::TensorImpl *object) noexcept { return &object->grad(); }

OXIDION_PUBLIC bool oxidion_is_defined(const at::Tensor *t) noexcept { return t->defined(); }

OXIDION_PUBLIC bool oxidion_has_dispatch(const at::Tensor *t) noexcept { return at::impl::tensor_has_dispatch(*t); }

OXIDION_PUBLIC void oxidion_bump_version(const at::Tensor *t) noexcept { t->unsafeGetTensorImpl()->bump_version(); }

namespace {
/// How devices of CUDA multiply matrices of float32: "tf32", "ieee", or "none" where a setting of more decides.
std::string products(const at::Context &context) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
  return at::precision2str(context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL));
#elif TORCH_VERSION_MINOR == 9
  return context.float32Precision("cuda", "matmul");
#else
  return context.allowTF32CuBLAS() ? "tf32" : "ieee";
#endif
}

/// Has a setting of more decide.
void set_no_products([[maybe_unused]] at::Context &context) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
  context.setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL, at::Float32Precision::NONE);
#elif TORCH_VERSION_MINOR == 9
  context.setFloat32Precision("cuda", "matmul", "none");
#endif
}
} // namespace

/// What `oxidion_products_as_before` is to undo.
struct OxidionProducts {
  std::unique_ptr<at::NoTF32Guard> exact;
  bool had_none = false;
};

/// Has devices of CUDA multiply matrices of float32 in TF32, in the whole process, or not in TF32, on this thread; null where
/// they do so already, where torch's settings contradict each other, and on ROCm.
OXIDION_PUBLIC OxidionProducts *oxidion_products(bool tf32) noexcept {
  try {
    auto &context = at::globalContext();
    if (!context.hasCUDA() || context.hasROCM())
      return nullptr;
    auto before = std::make_unique<OxidionProducts>();
    if (!tf32) {
      before->exact = std::make_unique<at::NoTF32Guard>();
      return before.release();
    }
    const auto now = products(context);
    before->had_none = now == "none";
    if (now == "tf32" || context.float32MatmulPrecision() != at::Float32MatmulPrecision::HIGHEST)
      return nullptr;
    context.setAllowTF32CuBLAS(true);
    return before.release();
  } catch (...) {
    return nullptr;
  }
}

OXIDION_PUBLIC void oxidion_products_as_before(OxidionProducts *before) noexcept {
  try {
    if (!before->exact) {
      at::globalContext().setAllowTF32CuBLAS(false);
      if (before->had_none)
        set_no_products(at::globalContext());
    }
  } catch (...) {
  }
  delete before;
}

#ifdef OXIDION_PAYLOAD
// Python objects, without pybind11's header: it would tie the library to one version of Python.
struct _object;
typedef struct _object PyObject;
extern "C" int PyType_IsSubtype(void *, void *);
extern PyObject *THPVariableClass;
PyObject *THPVariable_Wrap(const at::TensorBase &);

namespace {
/// A tensor's object. The two words in front are the same in every Python with a global interpreter lock.
struct Object {
  void *head[2];
  OXIDION_PAYLOAD payload;
};
const at::Tensor &tensor_in(const at::Tensor &payload) { return payload; }
[[maybe_unused]] const at::Tensor &tensor_in(const c10::MaybeOwned<at::Tensor> &payload) { return *payload; }
} // namespace

/// Where the object of a tensor is thought to keep the pointer that its attribute `_cdata` is: compared at import.
OXIDION_PUBLIC const void *oxidion_cdata(PyObject *object) noexcept {
  constexpr auto last = sizeof(OXIDION_PAYLOAD) / sizeof(void *) - 1;
  return reinterpret_cast<void *const *>(&reinterpret_cast<Object *>(object)->payload)[last];
}

OXIDION_PUBLIC bool thp_variable_check(PyObject *object) {
  // `isinstance` would ask the object, which may claim to be what it is not.
  return THPVariableClass && PyType_IsSubtype(reinterpret_cast<Object *>(object)->head[1], THPVariableClass);
}

OXIDION_PUBLIC PyObject *thp_variable_wrap(tensor t) {
  PROTECT(return THPVariable_Wrap(*t);)
  return nullptr;
}

OXIDION_PUBLIC tensor thp_variable_unpack(PyObject *object) {
  PROTECT(return new at::Tensor(tensor_in(reinterpret_cast<Object *>(object)->payload));)
  return nullptr;
}
#endif
