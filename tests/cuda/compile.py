"""Compiles the CUDA sources to cubins without a GPU and reads what the machine code needs and contains.

NVRTC and ``ptxas`` come with torch's CUDA packages, ``cuobjdump`` and ``nvdisasm`` with triton.
``python tests/cuda/compile.py`` prints the table of ``docs/cuda.md``; with ``--cubins FOLDER`` it writes the
machine code that a wheel ships, each file named by the key under which the package looks for it.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import re
import subprocess
import tempfile
import time
from collections import Counter
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
    "jacobi.cu": EVERYWHERE,
    "updates.cu": EVERYWHERE,
    "sums.cu": EVERYWHERE,
    "columns.cu": EVERYWHERE,
    "copies.cu": EVERYWHERE,
    "messages.cu": EVERYWHERE,
    "coded.cu": EVERYWHERE,
    "coded_sums.cu": EVERYWHERE,
    "neurons.cu": EVERYWHERE,
    "select.cu": EVERYWHERE,
    "totals.cu": EVERYWHERE,
    "factors.cu": EVERYWHERE,
    "rows.cu": EVERYWHERE,
    "means.cu": EVERYWHERE,
    "low_rank.cu": EVERYWHERE,
}
OPTIONS = ("--std=c++17", "-default-device")
FORMED = ("coded.cu", "coded_sums.cu")
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
def nvrtc() -> ctypes.CDLL:
    """The run-time compiler of torch's CUDA packages."""
    folder = _folder("nvidia") / "cu13" / "lib"
    # NVRTC opens its builtins by name, which finds them once they are loaded.
    ctypes.CDLL(str(next(folder.glob("libnvrtc-builtins.so.*"))))
    return ctypes.CDLL(str(next(folder.glob("libnvrtc.so.*"))))


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def texts() -> dict[str, str]:
    """Sources and headers by name: files of the checkout, and what is written from declared operations."""
    from oxidion import _oxidion

    files = (*SOURCES.glob("*.cu*"), *(KERNELS / "ops").glob("*.cuh"))
    return {**{path.name: path.read_text() for path in files}, **_oxidion.generated_headers()}


def headers() -> dict[str, str]:
    """The headers, in the order of their names."""
    return {name: text for name, text in sorted(texts().items()) if name.endswith(".cuh")}


def machine_code(source: str, architecture: str) -> tuple[bytes, str]:
    """The cubin of a source and the compilers' messages.

    Raises:
        RuntimeError: if the source does not compile; the message is the compiler's.
    """
    library = nvrtc()
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


def _spilled_bytes(log: str) -> dict[str, int]:
    found = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads",
        log,
        re.DOTALL,
    )
    return {name: int(stores) + int(loads) for name, stores, loads in found}


@cache
def compiled(source: str, architecture: str) -> Cubin:
    """Compiles one file of ``src/kernels/cuda/src`` and takes its cubin apart."""
    start = time.perf_counter()
    code, log = machine_code(source, architecture)
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


def write_cubins(folder: Path) -> None:
    """Writes the machine code of what the package launches; files of other sources are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        folder / f"{key(source, architecture)}.cubin": (source, architecture)
        for source, architectures in ARCHITECTURES.items()
        for architecture in architectures
    }
    for stale in set(folder.glob("*.cubin")) - set(files):
        stale.unlink()
    for file, (source, architecture) in files.items():
        if not file.exists():
            file.write_bytes(machine_code(source, architecture)[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cubins", type=Path, metavar="FOLDER")
    folder = parser.parse_args().cubins
    if folder:
        write_cubins(folder)
    else:
        print(table())
