"""Builds a CUDA source of the package for the host and launches its kernels on arrays.

g++ compiles the unchanged sources against twins of ``ptx.cuh`` and ``hopper.cuh``. A block is a set of fibers
that run in changing order. Warps fall behind at random, and single lanes on demand. Asynchronous copies and
products happen as early or as late as the rules allow. Blocks of a cluster run together, and one begins
later. Shared memory begins with NaN, and guards of NaN around every array show accesses outside of it.

The emulator does not check:

- speed, bank conflicts and caches;
- the memory model beyond the order of operations: of fences only the one between shared memory and tensor
  copies;
- truncation inside matrix units;
- the driver's encoding of tensor maps (its arguments are checked);
- clocks and limits of a real device, and NCCL (``tests/distributed/test_nccl.py`` needs devices).
"""

from __future__ import annotations

import atexit
import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from torch import Tensor

from support import cache as files

from ..compile import texts  # noqa: TID252 (`cuda` is another package's name)
from ..operations import names  # noqa: TID252

HERE = Path(__file__).resolve().parent
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-U_FORTIFY_SOURCE", "-fno-exceptions", "-fno-rtti")
TWINS = "twins.h"
SHARED_BYTES = 227 * 1024
# A static shared array of a block, which is uninitialized at the start: the emulator fills it.
SHARED = re.compile(r"^(\s*)__shared__ ([\w<>]+) (\w+)((?:\[[^;]*\])?);$", re.MULTILINE)

# What a pass takes: jobs in a small table, in a large one, in float64.
FORMS = {"few": "FEW", "many": "MANY", "wide": "FEW"}
QUANTIZED_FORMS = {"many": "MANY_QUANTIZED", "wide": "FEW"}
BY_SIZE = ("few", "many")
# The same of passes over stacks of matrices.
STACKS = {"few": "FEW_STACKS", "many": "MANY_STACKS", "wide": "FEW_STACKS"}

# Blocks of a cluster, where a source has its kernels run in such.
CLUSTER = re.compile(r"__cluster_dims__\((\w+), 1, 1\)")

# Kernels of each source and the structure that they take by value.
KERNELS = {
    "symmetric_mma.cu": {
        f"symmetric_mma{share}_{element}": "SymmetricProduct"
        for share in ("", "_part", "_total")
        for element in ("bfloat16", "float16")
    },
    "symmetric_wgmma.cu": {
        "symmetric_wgmma_bfloat16": "SymmetricTensorProduct",
        "symmetric_wgmma_float16": "SymmetricTensorProduct",
    },
    "updates.cu": {
        f"{name}_{form}": f"Jobs<{most}>" for name in names("elementwise") for form, most in FORMS.items()
    },
    "copies.cu": {"copy_few": "Rectangles<FEW>", "copy_many": "Rectangles<MANY>"},
    "messages.cu": {"sum_messages": "Messages"},
    "quantized.cu": {
        f"{name}_quantized_{form}": f"QuantizedJobs<{most}>"
        for name in names("elementwise", encoded=True)
        for form, most in QUANTIZED_FORMS.items()
    },
    "quantized_sums.cu": {
        f"{name}_quantized_{form}": f"QuantizedSumJobs<{most}>"
        for name in names("sum", encoded=True)
        for form, most in QUANTIZED_FORMS.items()
    },
    "sums.cu": {
        f"{name}_{form}": f"SumJobs<{most}>" for name in names("sum") for form, most in FORMS.items()
    },
    "totals.cu": {
        **{"add_pieces": "PieceSums", "add_numbers": "Addends"},
        **{
            f"{name}_{form}": f"Stacks<{STACKS[form]}>"
            for name in ("add_strips", "add_tiles")
            for form in BY_SIZE
        },
    },
    "factors.cu": {"lamb_factors": "LambFactors", "update_factors": "UpdateFactors"},
    "rows.cu": {
        f"{name}_{form}": f"Stacks<{most}>" for name in names("row") for form, most in STACKS.items()
    },
    "means.cu": {f"{name}_{form}": f"Jobs<{FORMS[form]}>" for name in names("mean") for form in BY_SIZE},
    "gram.cu": {"gram_product": "GramProduct"},
    "normals.cu": {"fill_normals": "NormalJobs"},
    "select.cu": {
        **{f"slice_{form}": "LineSums" for form in ("rows", "columns", "chunks")},
        "slice_choice": "Choices",
        **{f"slice_{form}": "SliceJobs" for form in ("take", "apply")},
    },
    "cholesky.cu": {
        **dict.fromkeys(("cholesky_factor", "cholesky_diagonal", "cholesky_below"), "CholeskyFactor"),
        "cholesky_solve": "CholeskySolve",
    },
}

Edit = tuple[str, str, str]  # file, text that occurs there once, replacement


class KernelFault(RuntimeError):
    """A kernel did what is undefined on the device, or came to a stop."""


class Launch(ctypes.Structure):
    """Mirror of ``emulator::Launch``."""

    _fields_ = (
        ("blocks", ctypes.c_int),
        ("threads", ctypes.c_int),
        ("seed", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
    )


def _sources(source: str, edits: Sequence[Edit], kernels: Sequence[str]) -> dict[str, str]:
    """Sources, edited, without their PTX, whose twins the include path finds, and what enters the kernels."""
    edited = dict(texts())
    for name, old, new in edits:
        if edited[name].count(old) != 1:
            raise ValueError(f"{name}: expected one {old!r}, found {edited[name].count(old)}")
        edited[name] = edited[name].replace(old, new)
    twins = {path.name for path in HERE.glob("*.cuh")}
    filled = r"\1static \2 \3\4; emulator::leave_unwritten(&\3, sizeof \3);"
    made = {name: SHARED.sub(filled, text) for name, text in edited.items() if name not in twins}
    clusters = CLUSTER.search(edited[source])
    together = clusters[1] if clusters else "1"
    entry = [f'#include "{source}"']
    entry += [
        f"EMULATED_KERNEL({kernel}, {structure}, {together})"
        for kernel, structure in KERNELS[source].items()
        if not kernels or kernel in kernels
    ]
    return {**made, "entry.cpp": "\n".join(entry) + "\n"}


def parts(*texts: str) -> list[str]:
    """All that a library depends on which is made of these texts: the emulator, the flags, the compiler."""
    emulator = sorted(path for path in HERE.iterdir() if path.suffix in (".h", ".cuh"))
    own = (part for path in emulator for part in (path.name, path.read_text()))
    return [files.version("g++"), *FLAGS, *own, *texts]


def library_parts(source: str, edits: Sequence[Edit] = (), kernels: Sequence[str] = ()) -> list[str]:
    """All that the library of a source's kernels depends on."""
    made = _sources(source, edits, kernels)
    return parts(*(part for name in sorted(made) for part in (name, made[name])))


def _compile(*arguments: str) -> None:
    done = subprocess.run(["g++", *FLAGS, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"g++ does not compile for the emulator:\n{done.stderr[:4000]}")


@cache
def _precompiled() -> Path:
    """A folder with the emulator's headers compiled once, which halves the time of each source."""
    folder = Path(tempfile.mkdtemp(prefix="oxidion-emulator-"))
    atexit.register(shutil.rmtree, folder)
    (folder / TWINS).write_text('#include "hopper.cuh"\n#include "block.h"\n')
    _compile(f"-I{HERE}", "-x", "c++-header", str(folder / TWINS), "-o", str(folder / f"{TWINS}.gch"))
    return folder


class Emulated:
    """Kernels of one source, compiled by g++ together with the emulator; all of them, or those named."""

    def __init__(
        self, source: str, folder: Path, edits: Sequence[Edit] = (), kernels: Sequence[str] = ()
    ) -> None:
        def make(library: Path) -> None:
            for name, text in _sources(source, edits, kernels).items():
                (library.parent / name).write_text(text)
            folders = [f"-I{place}" for place in (library.parent, HERE, _precompiled())]
            _compile(*folders, "-include", TWINS, str(library.parent / "entry.cpp"), "-o", str(library))

        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "kernels.so"
        # A copy: the loader gives the variables of one file to all that load it.
        name = f"{source.removesuffix('.cu')}.so"
        shutil.copyfile(files.kept(name, library_parts(source, edits, kernels), make), self.path)
        self._library = ctypes.CDLL(str(self.path))
        self._library.emulator_failure.restype = ctypes.c_char_p

    def let_lanes_lag(self) -> None:
        """Lets single lanes fall behind their warps, for as long as a device may let them."""
        self._library.emulator_let_lanes_lag(1)

    def launch(
        self,
        kernel: str,
        parameters: ctypes.Structure,
        *,
        blocks: int,
        threads: int,
        shared_bytes: int,
        readable: Sequence[Tensor],
        seed: int = 0,
    ) -> None:
        """Runs a kernel to its end. Its asynchronous copies may read the tensors of ``readable`` and no more.

        Raises:
            KernelFault: if the emulator found a fault.
        """
        if shared_bytes > SHARED_BYTES:
            raise ValueError(f"shared_bytes: expected at most {SHARED_BYTES}, got {shared_bytes}")
        self._library.emulator_forget_ranges()
        for tensor in readable:
            extent = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            size = ctypes.c_size_t((extent + 1) * tensor.element_size())
            if self._library.emulator_add_range(ctypes.c_void_p(tensor.data_ptr()), size):
                raise ValueError(f"readable: too many arrays ({len(readable)})")
        how = Launch(blocks, threads, seed, shared_bytes)
        entry = getattr(self._library, f"launch_{kernel}")
        size = ctypes.c_size_t(ctypes.sizeof(parameters))
        outcome = entry(ctypes.byref(how), ctypes.byref(parameters), size)
        if outcome == 2:
            raise ValueError(f"{kernel}: the structure has another size in C++ than {size.value} bytes")
        if outcome:
            raise KernelFault(f"{kernel}: {self._library.emulator_failure().decode()}")
