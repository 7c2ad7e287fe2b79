"""Compiles the CUDA sources to cubins without a GPU and reads what the machine code needs and contains.

NVRTC and ``ptxas`` come with torch's CUDA packages, ``cuobjdump`` and ``nvdisasm`` with triton.
``python tests/cuda/compile.py`` prints registers and instructions of every kernel; with ``--cubins FOLDER``
it writes the machine code that a wheel ships, each file named by the key under which the package looks for
it. That is made by the compilers of ``--nvrtc``, folders that ``.ci/nvrtc.py`` prints: of CUDA 12, since a
driver of CUDA 12 refuses what newer ones make. With ``--source NAME --out FILE`` it compiles one source for
``--architecture``, with the macros of ``--define`` and by the one compiler of ``--nvrtc``, or by torch's.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import os
import re
import struct
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "src" / "kernels"
SOURCES = KERNELS / "cuda" / "src"
# wgmma exists on sm_90a only; everything else is for every machine from sm_80 on.
EVERYWHERE = ("sm_80", "sm_90a", "sm_100")
ARCHITECTURES = {
    "symmetric_mma.cu": EVERYWHERE,
    "symmetric_wgmma.cu": ("sm_90a",),
    "gram.cu": EVERYWHERE,
    "cholesky.cu": EVERYWHERE,
    "updates.cu": EVERYWHERE,
    "sums.cu": EVERYWHERE,
    "copies.cu": EVERYWHERE,
    "messages.cu": EVERYWHERE,
    "quantized.cu": EVERYWHERE,
    "quantized_sums.cu": EVERYWHERE,
    "select.cu": EVERYWHERE,
    "totals.cu": EVERYWHERE,
    "factors.cu": EVERYWHERE,
    "rows.cu": EVERYWHERE,
    "means.cu": EVERYWHERE,
    "normals.cu": EVERYWHERE,
}
OPTIONS = ("--std=c++17", "-default-device")
MAJOR = 12
"""Of the compilers of wheels: drivers of this major version of CUDA and newer ones take what they make."""
UNQUALIFIED_ARRIVE = "OXIDION_UNQUALIFIED_ARRIVE"
"""Macro of ``hopper.cuh``: blocks of a cluster release stages to each other without a fence of the device."""
FORMED = ("quantized.cu", "quantized_sums.cu")
"""What is loaded for 8-bit states and stochastic rounding only."""


@dataclass(frozen=True)
class Kernel:
    """One kernel of a cubin: resources of a thread, and how often each instruction stands in the code."""

    registers: int
    stack: int
    spill: int
    instructions: Counter[str] = field(default_factory=Counter)

    def count(self, prefix: str) -> int:
        """Instructions whose name begins with ``prefix``."""
        return sum(number for name, number in self.instructions.items() if name.startswith(prefix))


@dataclass(frozen=True)
class Cubin:
    """Machine code of one source for one architecture."""

    kernels: dict[str, Kernel]
    log: str
    seconds: float
    code: bytes = b""


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"the package {package} is not installed")
    return Path(spec.submodule_search_locations[0])


def missing() -> str:
    """Which of the folders with compilers and tools is not installed; empty if both are there."""
    absent = []
    for package, folder in (("nvidia", "cu13"), ("triton", "backends/nvidia/bin")):
        spec = importlib.util.find_spec(package)
        places = spec.submodule_search_locations if spec else None
        if not any((Path(place) / folder).is_dir() for place in places or ()):
            absent.append(f"{package}/{folder}")
    return ", ".join(absent)


@cache
def nvrtc(folder: Path | None = None) -> ctypes.CDLL:
    """The run-time compiler in a folder, else that of torch's CUDA packages."""
    folder = folder or _folder("nvidia") / "cu13" / "lib"
    # NVRTC opens its builtins by name, which finds them once they are loaded.
    ctypes.CDLL(str(next(folder.glob("libnvrtc-builtins.so.*"))))
    return ctypes.CDLL(str(next(folder.glob("libnvrtc.so.*"))))


def version(library: ctypes.CDLL) -> tuple[int, int]:
    """The CUDA release of a compiler."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def knows(library: ctypes.CDLL, architecture: str) -> bool:
    """Whether a compiler makes machine code for an architecture."""
    count = ctypes.c_int()
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    numbers = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(numbers)
    return int(architecture.removeprefix("sm_").removesuffix("a")) in numbers


def release(code: bytes) -> tuple[int, int]:
    """The CUDA release whose compiler made a cubin.

    The older form of them has ten times the release in the version field of the ELF header. In the newer one,
    of CUDA 13 and of sm_100, that is 1 as in other ELF files, and a note names the tools.
    """
    (field,) = struct.unpack_from("<I", code, 20)
    if field > 1:
        return divmod(field, 10)
    named = re.search(rb"Cuda compilation tools, release (\d+)\.(\d+)", code)
    if named is None:
        raise ValueError("the cubin does not say what made it")
    return int(named[1]), int(named[2])


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def texts() -> dict[str, str]:
    """Sources and headers by name: files of the checkout, and what is written from declared operations."""
    from oxidion import _oxidion

    files = {path.name: path.read_text() for path in SOURCES.glob("*.cu*")}
    return {**files, **_oxidion.generated_headers()}


def headers() -> dict[str, str]:
    """The headers, in the order of their names."""
    return {name: text for name, text in sorted(texts().items()) if name.endswith(".cuh")}


def machine_code(
    source: str, architecture: str, library: ctypes.CDLL | None = None, macros: Sequence[str] = ()
) -> tuple[bytes, str]:
    """Returns the cubin of a source and the compilers' messages.

    Args:
        source: name of the source.
        architecture: what it is compiled for, as ``sm_90a``.
        library: NVRTC; torch's if it is None.
        macros: names that are defined, as by ``-D``.

    Raises:
        RuntimeError: if the source does not compile; the message is the compiler's.
    """
    library = library or nvrtc()
    program = ctypes.c_void_p()
    included = headers()
    strings = ctypes.c_char_p * len(included)
    library.nvrtcCreateProgram(
        ctypes.byref(program),
        texts()[source].encode(),
        source.encode(),
        len(included),
        strings(*(text.encode() for text in included.values())),
        strings(*(name.encode() for name in included)),
    )
    options = [*OPTIONS, "--ptxas-options=-v", f"--gpu-architecture={architecture}"]
    options += [f"--define-macro={macro}" for macro in macros]
    array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    failed = library.nvrtcCompileProgram(program, len(options), array)
    log = _text(library, program, "ProgramLog").rstrip(b"\0").decode()
    if failed:
        raise RuntimeError(f"{source} for {architecture}:\n{log}")
    code = _text(library, program, "CUBIN")
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return code, log


def _tool(name: str, *arguments: str) -> str:
    tool = _folder("triton") / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True).stdout


def _instructions(file: str) -> dict[str, Counter[str]]:
    """Instruction names with their first modifiers, counted per kernel."""
    counts: dict[str, Counter[str]] = {}
    for part in re.split(r"\n\s*Function : ", _tool("cuobjdump", "--dump-sass", file))[1:]:
        names = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", part, re.MULTILINE)
        counts[part.split(None, 1)[0]] = Counter(names)
    return counts


def listing(code: bytes) -> dict[str, list[str]]:
    """The instructions of each kernel of a cubin, in the order of their addresses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        parts = re.split(r"\n\s*Function : ", _tool("cuobjdump", "--dump-sass", file.name))[1:]
    found = r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);"
    return {part.split(None, 1)[0]: re.findall(found, part, re.MULTILINE) for part in parts}


def loads_before_use(instructions: Sequence[str], *loads: str) -> list[int]:
    """Counts loads of some kinds that are issued in a row before one of them is needed.

    Two loads of these kinds may fill the same register: one of them is predicated off.
    """
    widths = {
        load: int(load.rpartition(".")[2]) // 32 if load[-1].isdigit() and not load.endswith("U16") else 1
        for load in loads
    }
    runs, pending = [0], set[int]()
    for text in instructions:
        named = [int(number) for number in re.findall(r"\bR(\d+)\b", text)]
        form = r"(?:@!?U?P\w+ )?{}(?![\w.])"
        width = next((widths[load] for load in loads if re.match(form.format(re.escape(load)), text)), 0)
        if pending.intersection(named[1:] if width else named):
            runs.append(0)
            pending.clear()
        if width:
            runs[-1] += 1
            pending.update(range(named[0], named[0] + width))
    return [run for run in runs if run]


def _spilled_bytes(log: str) -> dict[str, int]:
    found = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads",
        log,
        re.DOTALL,
    )
    return {name: int(stores) + int(loads) for name, stores, loads in found}


@cache
def compiled(
    source: str, architecture: str, library: ctypes.CDLL | None = None, macros: tuple[str, ...] = ()
) -> Cubin:
    """Compiles one file of ``src/kernels/cuda/src`` and disassembles its cubin."""
    start = time.perf_counter()
    code, log = machine_code(source, architecture, library, macros)
    seconds = time.perf_counter() - start
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        instructions = _instructions(file.name)
    spilled = _spilled_bytes(log)
    resources = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", usage)
    kernels = {
        name: Kernel(int(registers), int(stack), spilled[name], instructions[name])
        for name, registers, stack in resources
    }
    return Cubin(kernels, log, seconds, code)


SHOWN = ("HMMA", "LDSM", "LDGSTS", "HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "FFMA")


def table() -> str:
    """One line for each kernel and architecture."""
    lines = []
    for source, architectures in ARCHITECTURES.items():
        for architecture in architectures:
            cubin = compiled(source, architecture)
            for name, kernel in sorted(cubin.kernels.items()):
                counts = ", ".join(f"{word} {kernel.count(word)}" for word in SHOWN if kernel.count(word))
                needs = f"{kernel.registers} | {kernel.stack} | {kernel.spill}"
                lines.append(f"| {name} | {architecture} | {needs} | {counts} |")
    head = [
        "| kernel | architecture | registers | stack | spilled | instructions |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join(head + lines)


def key(source: str, architecture: str) -> str:
    """The name of machine code: as ``src/kernels/cuda/compile.rs`` makes it."""
    content = hashlib.sha256()
    for part in (*OPTIONS, texts()[source], *(part for header in headers().items() for part in header)):
        content.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    return f"{source.removesuffix('.cu')}-{architecture}-{content.hexdigest()[:24]}"


def compilers_of_wheels(folders: Sequence[Path]) -> dict[str, ctypes.CDLL]:
    """What makes the machine code of each architecture: the oldest compiler that knows it, of CUDA 12.

    Raises:
        ValueError: if there is none for an architecture.
    """
    libraries = sorted(map(nvrtc, folders), key=version)
    chosen = {}
    for architecture in EVERYWHERE:
        able = [one for one in libraries if version(one)[0] == MAJOR and knows(one, architecture)]
        if not able:
            raise ValueError(f"no NVRTC of CUDA {MAJOR} for {architecture} in {[*map(str, folders)]}")
        chosen[architecture] = able[0]
    return chosen


def write_cubins(folder: Path, compilers: Sequence[Path]) -> str:
    """Writes the machine code of what the package launches; files of other sources and compilers go.

    Args:
        folder: where files are written.
        compilers: folders with NVRTC.

    Returns:
        A table of what is there; seconds are those of a core for what was compiled now.
    """
    chosen = compilers_of_wheels(compilers)
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        folder / f"{key(source, architecture)}.cubin": (source, architecture)
        for source, architectures in ARCHITECTURES.items()
        for architecture in architectures
    }
    for stale in set(folder.glob("*.cubin")) - set(files):
        stale.unlink()
    seconds: Counter[str] = Counter()
    for file, (source, architecture) in files.items():
        library, start = chosen[architecture], time.process_time()
        if not file.exists() or release(file.read_bytes()) != version(library):
            file.write_bytes(machine_code(source, architecture, library)[0])
            seconds[architecture] += time.process_time() - start
    lines = ["| architecture | NVRTC | sources | MB | seconds |", "|---|---|---|---|---|"]
    for name, library in chosen.items():
        sizes = [file.stat().st_size for file, (_, architecture) in files.items() if architecture == name]
        made = ".".join(map(str, version(library)))
        lines.append(f"| {name} | {made} | {len(sizes)} | {sum(sizes) / 1e6:.1f} | {seconds[name]:.0f} |")
    return "\n".join(lines)


def write_one(
    file: Path, source: str, architecture: str, compilers: Sequence[Path], macros: Sequence[str]
) -> str:
    """Writes the machine code of one source, with macros; returns a line that says what made it.

    Raises:
        ValueError: if there is more than one compiler.
    """
    if len(compilers) > 1:
        raise ValueError(f"--nvrtc: expected one folder for --source, got {len(compilers)}")
    library = nvrtc(*compilers)
    code, _ = machine_code(source, architecture, library, macros)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(code)
    made = ".".join(map(str, version(library)))
    return f"{file}: {source} for {architecture} by NVRTC {made}, {len(code)} bytes, macros {[*macros]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cubins", type=Path, metavar="FOLDER")
    parser.add_argument("--nvrtc", default="", metavar="FOLDERS", help="compilers, separated by colons")
    parser.add_argument("--source", choices=ARCHITECTURES, metavar="NAME", help="the one that is compiled")
    parser.add_argument("--architecture", default="sm_90a", help="what --source is compiled for")
    parser.add_argument("--define", action="append", default=[], metavar="MACRO", help="for --source")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the machine code of --source")
    arguments = parser.parse_args()
    if (arguments.source is None) != (arguments.out is None):
        parser.error("--source and --out: expected both or none")
    folders = [*map(Path, filter(None, arguments.nvrtc.split(os.pathsep)))]
    if arguments.source:
        how = (arguments.architecture, folders, arguments.define)
        print(write_one(arguments.out, arguments.source, *how))
    elif arguments.cubins:
        print(write_cubins(arguments.cubins, folders))
    else:
        print(table())
