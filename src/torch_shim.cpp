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
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/version.h>

#include <cstdint>
#include <cstring>
#include <exception>
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
    torch_last_err = strdup("libtorch threw what is no exception");                                                  \
  }

// @functions of torch-sys

OXIDION_PUBLIC const char *oxidion_shim_abi() { return OXIDION_SHIM_ABI; }

OXIDION_PUBLIC const char *oxidion_torch_version() { return TORCH_VERSION; }

/// The memory of a tensor of this type and shape that is contiguous on a CUDA device, or below 0 on the CPU, and counts its
/// changes, or null.
OXIDION_PUBLIC void *oxidion_memory(const at::Tensor *t, int kind, int device, uint8_t dims,
                                    const uint32_t *sizes) noexcept {
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
    return end <= t->storage().nbytes() ? t->data_ptr() : nullptr;
  } catch (...) {
    return nullptr;
  }
}

/// Bytes that the elements of a tensor need, from the beginning of its storage, and those that the storage has.
OXIDION_PUBLIC void oxidion_storage(const at::Tensor *t, size_t *needed, size_t *there) noexcept {
  *needed = *there = 0;
  try {
    if (t->layout() == at::kStrided && t->has_storage()) {
      *needed = at::detail::computeStorageNbytes(t->sizes(), t->strides(), t->itemsize(), t->storage_offset());
      *there = t->storage().nbytes();
    }
  } catch (...) {
  }
}

OXIDION_PUBLIC const at::Tensor *oxidion_grad(const c10::TensorImpl *object) noexcept { return &object->grad(); }

OXIDION_PUBLIC bool oxidion_is_defined(const at::Tensor *t) noexcept { return t->defined(); }

OXIDION_PUBLIC bool oxidion_has_dispatch(const at::Tensor *t) noexcept { return at::impl::tensor_has_dispatch(*t); }

OXIDION_PUBLIC void oxidion_bump_version(const at::Tensor *t) noexcept { t->unsafeGetTensorImpl()->bump_version(); }

#ifdef OXIDION_PAYLOAD
// Python objects, without pybind11's header: it would tie the library to one version of Python.
struct _object;
typedef struct _object PyObject;
extern "C" int PyObject_IsInstance(PyObject *, PyObject *);
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
  return THPVariableClass && PyObject_IsInstance(object, THPVariableClass) == 1;
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
