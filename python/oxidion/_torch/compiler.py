"""Compilation of the library between the core and one version of torch, without importing either.

The source is generated when oxidion is built (``python/build_shim.py``) and is part of the package, so that
the library can be made for a torch that is newer than the package.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

NAME = "liboxidion_torch.so"
SOURCE = "oxidion_torch.cpp"
TABLE = "table.json"
EXPORTS = "{ global: at_*; atg_*; ats_*; get_and_reset_last_err; oxidion_*; thp_*; local: *; };"
"""Names that others see, as a version script of the linker: headers declare more to be visible."""
SEEN_LINES = 20
"""Lines of a compiler's output that an error carries."""


class CompileError(Exception):
    """Failure to compile a library, with the reason and a hint."""


def compiler() -> list[str] | None:
    """Command of the C++ compiler, if any: ``$CXX``, else ``c++``, ``g++`` or ``clang++``."""
    given = os.environ.get("CXX", "").split()
    if given:
        return given if shutil.which(given[0]) else None
    return next(([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


def standard(torch: Path) -> str:
    """C++ standard that the headers of a torch ask for: ``"c++17"`` or newer."""
    header = torch / "include" / "ATen" / "ATen.h"
    asked = [int(year) for year in re.findall(r"__cplusplus < (\d{4})\d\dL", _read(header))]
    return f"c++{max(asked, default=2017) % 100}"


def payload(torch: Path) -> str:
    """C++ type of what a Python tensor of a torch holds, as its header declares it.

    Raises:
        CompileError: for a header with anything but the two layouts that are known.
    """
    header = torch / "include" / "torch" / "csrc" / "autograd" / "python_variable.h"
    declared = r"struct THPVariable \{\s*PyObject_HEAD[;\s]*(?://[^\n]*\s+)*([^;]+?)\s+cdata;"
    found = re.search(declared, _read(header))
    known = ("c10::MaybeOwned<at::Tensor>", "at::Tensor")
    if found is None or found[1] not in known:
        raise CompileError(
            f"{header} must declare a THPVariable that begins with one of {known}, found "
            f"{found and found[1]}: install a newer oxidion"
        )
    return found[1]


def check(torch: Path, minor: tuple[int, int]) -> None:
    """Refuses to compile without a compiler, or with headers of another version than the torch next to them.

    Raises:
        CompileError: without a compiler or headers, and for headers of another minor version.
    """
    _program()
    places = ("headeronly", "csrc/api/include/torch")  # from 2.9 on, and before
    headers = [torch / "include" / "torch" / place / "version.h" for place in places]
    header = next(filter(Path.is_file, headers), headers[0])
    found = re.findall(r"#define TORCH_VERSION_(?:MAJOR|MINOR) (\d+)", _read(header))
    if [int(part) for part in found] != list(minor):
        raise CompileError(f"{header} must be of torch {minor[0]}.{minor[1]}, found {'.'.join(found)}")


def cxx11_abi(torch: Path) -> bool:
    """True for a torch that was compiled with the C++11 ABI of libstdc++."""
    return b"__cxx11" in (torch / "lib" / "libc10.so").read_bytes()


def command(source: Path, torch: Path, to: Path, *, python: bool) -> list[str]:
    """Returns the command that compiles the source for the torch in this folder.

    Args:
        source: the generated source.
        torch: folder of the installed package ``torch``.
        to: library to write; the file of `EXPORTS` is next to it.
        python: with functions for Python's tensors; without them it runs in a process without Python.

    Raises:
        CompileError: without a compiler or torch's headers.
    """
    program = _program()
    include = torch / "include"
    if not include.is_dir():
        raise CompileError(f"torch's headers are not installed: no folder {include}")
    return [
        *program,
        f"-std={standard(torch)}",
        "-O2",
        "-w",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        "-fvisibility-inlines-hidden",
        "-ffunction-sections",
        "-fdata-sections",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(cxx11_abi(torch))}",
        *([f"-DOXIDION_PAYLOAD={payload(torch)}"] if python else []),
        f"-I{include}",
        f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
        str(source),
        f"-L{torch / 'lib'}",
        "-Wl,--no-as-needed",
        "-ltorch_cpu",
        "-lc10",
        *(["-ltorch_python"] if python else []),
        "-Wl,--as-needed,--gc-sections,--strip-all,-z,now",
        f"-Wl,-soname,{NAME}",
        f"-Wl,--version-script={to}.exports",
        "-o",
        str(to),
    ]


def compile_shim(source: Path, torch: Path, to: Path, *, python: bool = True) -> None:
    """Compiles the library, which is written completely or not at all.

    Raises:
        CompileError: with the end of the compiler's output.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".compiling-", dir=to.parent) as folder:
        made = Path(folder, NAME)
        Path(f"{made}.exports").write_text(EXPORTS, "utf-8")
        parts = command(source, torch, made, python=python)
        done = subprocess.run(parts, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            tail = "\n".join(done.stdout.splitlines()[-SEEN_LINES:])
            raise CompileError(f"{parts[0]} ended with status {done.returncode}:\n{tail}")
        made.replace(to)


def _program() -> list[str]:
    program = compiler()
    if program is None:
        raise CompileError("no C++ compiler: neither $CXX nor c++, g++ or clang++ is a program on PATH")
    return program


def _read(header: Path) -> str:
    try:
        return header.read_text("utf-8")
    except FileNotFoundError:
        raise CompileError(f"torch's headers are not installed: no file {header}") from None
