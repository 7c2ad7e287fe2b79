"""Reading of shared libraries: what they need, what they export, which systems they run on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

#: Newest symbol versions that a system of the tag manylinux_2_28 has.
MANYLINUX_2_28 = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
OF_LIBTORCH = {"libtorch_cpu.so", "libc10.so", "libtorch_python.so"}
OF_SYSTEM = {
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libm.so.6",
    "libc.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "ld-linux-x86-64.so.2",
}
_OF_TORCH = re.compile(r"at_|atg_|ats_|thp_|get_and_reset|oxidion_|aoti_|_Z")


def readelf(option: str, path: Path) -> str:
    """Output of ``readelf`` with one option."""
    done = subprocess.run(["readelf", "-W", option, path], capture_output=True, text=True, check=True)
    return done.stdout


def needed(path: Path) -> set[str]:
    """Libraries that a library names."""
    return set(re.findall(r"NEEDED.*\[(.*)\]", readelf("-d", path)))


def has_search_path(path: Path) -> bool:
    """True for a library with folders of its own to search in."""
    return bool(re.search(r"R(UN)?PATH", readelf("-d", path)))


def undefined(path: Path) -> set[str]:
    """Functions of libtorch and of the library over it that a library expects."""
    names = re.findall(r"\sUND ([^\s@]+)", readelf("--dyn-syms", path))
    return {name for name in names if _OF_TORCH.match(name)}


def exported(path: Path) -> set[str]:
    """Names that a library defines for others."""
    pattern = r"(?:FUNC|OBJECT)\s+\w+\s+DEFAULT\s+\d+ ([^\s@]+)"
    return set(re.findall(pattern, readelf("--dyn-syms", path)))


def python_names(path: Path) -> list[str]:
    """Names of Python that a library expects."""
    return re.findall(r"\sUND (_?Py\w+)", readelf("--dyn-syms", path))


def symbol_versions(path: Path) -> dict[str, tuple[int, ...]]:
    """Newest version of each kind of symbol that a library asks the system for."""
    newest: dict[str, tuple[int, ...]] = {}
    for kind, text in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", readelf("-V", path)):
        version = tuple(map(int, text.split(".")))
        newest[kind] = max(newest.get(kind, (0,)), version)
    return newest


def too_new(path: Path) -> dict[str, tuple[int, ...]]:
    """Symbol versions that a system of the tag manylinux_2_28 lacks."""
    return {kind: v for kind, v in symbol_versions(path).items() if v > MANYLINUX_2_28[kind]}
