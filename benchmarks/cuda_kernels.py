"""The kernels of symmetric products, launched alone.

Their machine code is read from a folder (`packed`), or from what the package keeps, else NVRTC compiles it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
MULTIPROCESSORS, MAJOR, MINOR = 16, 75, 76
SHARED_LIMIT = 8
#: Bytes of the digest behind kept machine code.
DIGEST = 32

#: Rows of a tile; threads and dynamic shared memory of either kernel, as `symmetric/device.rs` launches them.
TILE = 128
MMA = ("symmetric_mma", 256, 65536)
GROUPS = ("symmetric_wgmma", 384, 229488)
#: Blocks that take a pair of tiles.
CLUSTER = 2
#: Rows and columns of what a tensor copy moves: of the left matrix, the right one, the result.
BOXES = ((64, 64), (128, 64), (64, 64))


class Matrices(ctypes.Structure):
    """Mirror of ``MatrixBatch``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("first", "each")),
        *((name, ctypes.c_longlong) for name in ("matrix_stride", "row_stride")),
    )

    @classmethod
    def of(cls, x: Tensor) -> Matrices:
        """A tensor ``[batch, rows, cols]`` with contiguous rows."""
        return cls(x.data_ptr(), None, x.stride(0), x.stride(1))


class Factor(ctypes.Structure):
    """Mirror of ``Factor``."""

    _fields_ = (("live", ctypes.c_void_p), ("value", ctypes.c_float))


class Terms(ctypes.Structure):
    """Mirror of ``SymmetricTerms``: by default the product alone."""

    _fields_ = (("addend", Matrices * 2), ("alpha", Factor), ("beta", Factor * 2), ("gamma", Factor))


class Product(ctypes.Structure):
    """Mirror of ``SymmetricProduct``."""

    _fields_ = (
        *((name, Matrices) for name in ("left", "right", "out")),
        ("terms", Terms),
        *((name, ctypes.c_int) for name in ("size", "depth", "tiles", "parts")),
        ("partial", ctypes.c_void_p),
    )


class GroupProduct(ctypes.Structure):
    """Mirror of ``SymmetricTensorProduct``; tensor maps start at multiples of 64 bytes."""

    _fields_ = (
        ("maps", (ctypes.c_ubyte * 128) * 3),
        ("each", ctypes.c_void_p * 3),
        ("terms", Terms),
        *((name, ctypes.c_int) for name in ("size", "depth", "pairs", "batch")),
        ("rest", ctypes.c_ubyte * 88),
    )


@functools.cache
def _compiler() -> ModuleType:
    """``tests/cuda/compile.py``, which has NVRTC compile a source."""
    path = ROOT / "tests" / "cuda" / "compile.py"
    spec = importlib.util.spec_from_file_location("oxidion_compile", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _aligned(kind: type[ctypes.Structure]) -> Any:
    """A structure at a multiple of 128 bytes."""
    memory = ctypes.create_string_buffer(ctypes.sizeof(kind) + 128)
    start = -ctypes.addressof(memory) % 128
    made = kind.from_buffer(memory, start)
    made.memory = memory
    return made


def packed(folder: Path) -> dict[str, Path]:
    """Files of ready machine code in a folder by the name of their kernel.

    ``symmetric_wgmma-sm_90a-nvrtc13.0-relaxed.cubin`` is called ``symmetric_wgmma nvrtc13.0-relaxed``.
    """
    found = {}
    for file in sorted(folder.glob("symmetric_*-sm_*.cubin")):
        kernel, _, *variant = file.stem.split("-", 2)
        found[" ".join([kernel, *variant])] = file
    return found


class SymmetricKernels:
    """Launches ``X X^T`` of bfloat16 matrices on the current stream of a device.

    Args:
        stream: Handle of the stream.
        files: Machine code by name, as from `packed`.
    """

    def __init__(self, stream: int = 0, files: Mapping[str, Path] | None = None) -> None:
        self._files = dict(files or {})
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._stream = ctypes.c_void_p(stream)
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._device = device
        self.multiprocessors = self._attribute(MULTIPROCESSORS)
        self._capability = self._attribute(MAJOR), self._attribute(MINOR)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: error {code} of the driver")

    def _attribute(self, which: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), which, self._device)
        return value.value

    @property
    def names(self) -> list[str]:
        """The kernels that this device runs."""
        return [MMA[0], *([GROUPS[0]] if self._capability[0] == 9 else [])]

    @property
    def architecture(self) -> str:
        """The one whose machine code is taken."""
        major, minor = self._capability
        return "sm_90a" if major == 9 else "sm_80" if major == 8 else f"sm_{major}{minor}"

    def _code(self, name: str) -> bytes:
        if file := self._files.get(name):
            if f"-{self.architecture}" not in file.name:
                raise RuntimeError(f"{file.name} is not for {self.architecture}")
            return file.read_bytes()
        source = f"{name.split()[0]}.cu"
        kept = Path(
            os.environ.get("OXIDION_CACHE", ""), f"{_compiler().key(source, self.architecture)}.cubin"
        )
        if kept.is_file():
            return kept.read_bytes()[:-DIGEST]
        code: bytes = _compiler().machine_code(source, self.architecture)[0]
        return code

    def _function(self, name: str) -> ctypes.c_void_p:
        if name not in self._functions:
            kernel, _, shared = MMA if name.startswith(MMA[0]) else GROUPS
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), self._code(name))
            self._call("cuModuleGetFunction", ctypes.byref(function), module, f"{kernel}_bfloat16".encode())
            self._call("cuFuncSetAttribute", function, SHARED_LIMIT, shared)
            self._functions[name] = function
        return self._functions[name]

    def multiply(self, name: str, x: Tensor, out: Tensor) -> None:
        """``out = x x^T`` for ``[batch, rows, cols]``; a name is that of a kernel or of a file.

        Raises:
            RuntimeError: with the driver's number of an error, or for a kernel of other devices.
        """
        if name.split()[0] not in self.names:
            raise RuntimeError(f"{name} is not for {self.architecture}")
        batch, size, depth = x.shape
        kernel, threads, shared = MMA if name.startswith(MMA[0]) else GROUPS
        function = self._function(name)
        down = -(-size // TILE)
        tiles = down * (down + 1) // 2
        terms = Terms(alpha=Factor(None, 1.0))
        blocks = batch * tiles
        if kernel == MMA[0]:
            operands = (Matrices.of(x), Matrices.of(x), Matrices.of(out))
            what: Any = Product(*operands, terms, size, depth, tiles, 1)
        else:
            what = _aligned(GroupProduct)
            pairs = down * down // 4 + -(-down // 4)
            what.terms, what.size, what.depth, what.pairs, what.batch = terms, size, depth, pairs, batch
            for to, matrices, box in zip(what.maps, (x, x, out), BOXES, strict=True):
                self._map(to, matrices, box)
            blocks = CLUSTER * min(batch * pairs, self.multiprocessors // CLUSTER)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(what))
        grid = (blocks, 1, 1, threads, 1, 1, shared)
        self._call("cuLaunchKernel", function, *grid, self._stream, arguments, None)

    def _map(self, to: Any, x: Tensor, box: Sequence[int]) -> None:
        """A tensor map with boxes of these rows and columns, swizzled by 128 bytes."""
        three, two = ctypes.c_uint32 * 3, ctypes.c_uint64 * 2
        extent = (ctypes.c_uint64 * 3)(x.shape[2], x.shape[1], x.shape[0])
        strides = two(2 * x.stride(1), 2 * x.stride(0))
        rows, cols = box
        self._call(
            "cuTensorMapEncodeTiled",
            ctypes.byref(to),
            *(9, 3, ctypes.c_void_p(x.data_ptr()), extent, strides, three(cols, rows, 1), three(1, 1, 1)),
            *(0, 3, 3, 0),  # no interleaving, the swizzle, 256 bytes to L2, zeros outside
        )


def is_product(x: Tensor, out: Tensor, *, is_symmetric: bool = True) -> bool:
    """Whether ``out`` is ``x x^T`` within the rounding of bfloat16; by default equal to its transpose too."""
    exact = torch.bmm(x.float(), x.float().mT)
    off = (out.float() - exact).abs().max() / exact.abs().max()
    return bool(off <= 2.0**-8) and (not is_symmetric or torch.equal(out, out.mT))
