"""Machine code of the CUDA sources and what was read from it, kept between runs."""

from __future__ import annotations

import base64
import ctypes
import json
from collections import Counter
from functools import cache
from pathlib import Path

from support import cache as files

from . import compile as compiler
from .compile import Cubin, Kernel


@cache
def tools(library: ctypes.CDLL | None = None) -> str:
    """Which compiler and which disassembler are used."""
    library = library or compiler.nvrtc()
    major, minor = compiler.version(library)
    size = Path(library._name).stat().st_size
    disassembler = compiler._tool("cuobjdump", "--version")
    return f"NVRTC {major}.{minor}, {size} bytes, {disassembler}"


def parts(
    source: str, architecture: str, library: ctypes.CDLL | None = None, macros: tuple[str, ...] = ()
) -> list[str]:
    """All that the machine code of a source depends on, and what is read from it."""
    made = {source: compiler.texts()[source], **compiler.headers()}
    texts = [text for pair in made.items() for text in pair]
    return [
        tools(library),
        architecture,
        *compiler.OPTIONS,
        *macros,
        *texts,
        *map(read, (compiler.__file__, __file__)),
    ]


def read(file: str) -> str:
    """The text of a file."""
    return Path(file).read_text()


def written(cubin: Cubin) -> str:
    """A cubin as text."""
    kernels = {
        name: [kernel.registers, kernel.stack, kernel.spill, kernel.instructions]
        for name, kernel in cubin.kernels.items()
    }
    return json.dumps([kernels, cubin.log, cubin.seconds, base64.b64encode(cubin.code).decode()])


def read_back(text: str) -> Cubin:
    """The cubin of a text."""
    kernels, log, seconds, code = json.loads(text)
    made = {name: Kernel(*numbers, Counter(counts)) for name, (*numbers, counts) in kernels.items()}
    return Cubin(made, log, seconds, base64.b64decode(code))


@cache
def compiled(
    source: str, architecture: str, library: ctypes.CDLL | None = None, macros: tuple[str, ...] = ()
) -> Cubin:
    """A file of ``src/kernels/cuda/src`` compiled and disassembled, now or in an earlier run."""

    def make(file: Path) -> None:
        file.write_text(written(compiler.compiled(source, architecture, library, macros)))

    name = f"{source.removesuffix('.cu')}-{architecture}.json"
    made_of = parts(source, architecture, library, macros)
    return read_back(files.kept(name, made_of, make).read_text())
