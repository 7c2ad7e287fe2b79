"""Choice of the library between the core and the torch that is there.

The package has one for each minor version of torch that was out when it was built. For any other torch it is
compiled once, from the source in the package, and kept in the user's folder for caches.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import sys
import tempfile
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from oxidion._torch import compiler
from oxidion._torch.cache import (
    UntrustedFolder,
    cache_folder,
    keep_with_digest,
    locked,
    open_private,
    open_whole,
    private_folder,
)

FOLDER = Path(__file__).parent
OLDEST = (2, 7)
"""The first minor version of torch that works."""
FORBID = "OXIDION_TORCH_COMPILE"
"""Environment variable that forbids the compilation with the value 0."""


class Library(NamedTuple):
    """The library that is open.

    Attributes:
        path: its file.
        torch: the version of torch that it was compiled for.
        shipped: whether it came with the package; otherwise it was compiled on this machine.
    """

    path: Path
    torch: str
    shipped: bool


@functools.cache
def serving() -> Library:
    """The library for the torch that is there, opened so that the core finds it when it is imported.

    Raises:
        ImportError: where there is none and it cannot be made, with what was found and what to do.
    """
    version, table = str(torch.__version__), _table()
    minor = _minor(version)
    if minor < OLDEST:
        oldest = "{}.{}".format(*OLDEST)
        raise ImportError(
            f"oxidion needs torch {oldest} or newer, found torch {version}: `pip install 'torch>={oldest}'`"
        )
    if "t" in getattr(sys, "abiflags", ""):
        raise ImportError(
            f"oxidion needs a Python with its global interpreter lock, found the free-threaded Python "
            f"{sys.version.split()[0]}: install it for python{sys.version_info[0]}.{sys.version_info[1]}"
        )
    name = "{}.{}".format(*minor)
    if name in table["minors"] and torch.compiled_with_cxx11_abi() and ".dev" not in version:
        # A distributor's build may lack a function of the release, which is an OSError: one is made for it.
        with contextlib.suppress(OSError):
            return _opened(FOLDER / name / compiler.NAME, table, shipped=True)
    try:
        path, descriptor = _compiled(version, table)
        return _opened(path, table, shipped=False, descriptor=descriptor)
    except compiler.CompileError as error:
        raise ImportError(_message(version, table, str(error))) from None
    except OSError as error:
        reason = f"the one that was compiled does not load: {error}"
        raise ImportError(_message(version, table, reason)) from None


def _loaded(path: Path, descriptor: int) -> ctypes.CDLL:
    """Loads an open file by its descriptor, where the system has a path for it; else by its own path.

    The descriptor then stays open: the loader of glibc knows a library by the path with which it was loaded,
    and would return it for another file with the same descriptor.
    """
    name = f"/proc/self/fd/{descriptor}"
    try:
        if Path(name).exists():
            return ctypes.CDLL(name)
        # No other user can replace the file: `private_folder` has checked all on the way to it.
        library = ctypes.CDLL(str(path))
    except OSError as error:
        os.close(descriptor)
        raise OSError(str(error).replace(name, str(path))) from None
    os.close(descriptor)
    return library


def _opened(path: Path, table: dict[str, Any], *, shipped: bool, descriptor: int | None = None) -> Library:
    library = ctypes.CDLL(str(path)) if descriptor is None else _loaded(path, descriptor)
    library.oxidion_shim_abi.restype = library.oxidion_torch_version.restype = ctypes.c_char_p
    library.oxidion_cdata.restype, library.oxidion_cdata.argtypes = ctypes.c_void_p, [ctypes.py_object]
    found, built_for = library.oxidion_shim_abi().decode(), library.oxidion_torch_version().decode()
    if found != table["abi"]:
        raise ImportError(
            f"{path} has interface {found}, this oxidion has {table['abi']}: they are of different builds. "
            "Reinstall oxidion, or run `make build` in the source directory"
        )
    if _minor(built_for) != _minor(torch.__version__):
        raise ImportError(
            f"{path} is for torch {built_for}, but torch {torch.__version__} is imported from "
            f"{torch.__file__}: there are two in this process. Leave one torch on sys.path"
        )
    sample = torch.empty(0)
    if library.oxidion_cdata(sample) != sample._cdata:
        raise ImportError(
            f"torch {torch.__version__} keeps a tensor's pointer elsewhere in its Python object than torch "
            f"{built_for}, for which {path} was compiled: remove this file so that it is compiled again, or "
            f"install torch {built_for}"
        )
    return Library(path, built_for, shipped)


def _compiled(version: str, table: dict[str, Any]) -> tuple[Path, int]:
    """The library for this version in the user's cache, compiled where there is none, and its descriptor."""
    root = cache_folder()
    if root is None:
        raise compiler.CompileError("there is no folder to keep it in: set OXIDION_CACHE to one")
    key = re.sub(r"[^\w.+]", "_", f"{version}-{int(torch.compiled_with_cxx11_abi())}-{table['abi']}")
    folder = root / "torch" / key
    library = folder / compiler.NAME
    try:
        with contextlib.suppress(FileNotFoundError), private_folder(folder) as at:
            if (kept := open_whole(at, library.name)) is not None:
                return library, kept
        if os.environ.get(FORBID) == "0":
            raise compiler.CompileError(f"{FORBID}=0 forbids to compile it")
        home = Path(str(torch.__file__)).parent
        compiler.check(home, _minor(version))
        with private_folder(folder, make=True) as at, locked(at, "lock"):
            if (kept := open_whole(at, library.name)) is None:
                warnings.warn(
                    f"oxidion compiles its library for torch {version}: this takes about 20 s and is kept in "
                    f"{folder}",
                    stacklevel=2,
                )
                kept = _made(home, folder, at)
            return library, kept
    except UntrustedFolder as error:
        raise compiler.CompileError(str(error)) from None
    except OSError as error:
        raise compiler.CompileError(
            f"it cannot be kept in {folder} ({error}): set OXIDION_CACHE to a folder that can be written"
        ) from None


def _made(torch_folder: Path, folder: Path, at: int) -> int:
    """Compiles the library and keeps it in an open folder; returns its descriptor."""
    with tempfile.TemporaryDirectory(prefix=".compiling-", dir=folder) as place:
        made = Path(place, compiler.NAME)
        compiler.compile_shim(FOLDER / compiler.SOURCE, torch_folder, made)
        keep_with_digest(at, compiler.NAME, made.read_bytes())
    return open_private(at, compiler.NAME)


def _table() -> dict[str, Any]:
    path = FOLDER / compiler.TABLE
    try:
        table: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ImportError(
            f"{path} is missing: reinstall oxidion, or run `make build` in the source directory"
        ) from None
    return table


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _message(version: str, table: dict[str, Any], reason: str) -> str:
    minors = sorted(table["minors"], key=_minor)
    has = " to ".join(dict.fromkeys((minors[0], minors[-1]))) if minors else "no version"
    ways = ["`pip install -U oxidion`", f"a C++ compiler so that it can be made here ({reason})"]
    if minors:
        ways.append(f"`pip install 'torch=={minors[-1]}.*'`")
    return (
        f"oxidion {metadata.version('oxidion')} has code for torch {has}, found torch {version}. Either "
        f"{', or '.join(ways)}."
    )
