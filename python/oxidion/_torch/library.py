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
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from oxidion._torch import compiler
from oxidion._torch.cache import (
    UntrustedFolder,
    cache_folder,
    check_private,
    digest_file,
    digest_of,
    is_whole,
    make_private,
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
        ImportError: where there is none and it cannot be made, with what was found and the way out.
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
        return _opened(_compiled(version, table), table, shipped=False)
    except compiler.CompileError as error:
        raise ImportError(_message(version, table, str(error))) from None
    except OSError as error:
        reason = f"the one that was compiled does not load: {error}"
        raise ImportError(_message(version, table, reason)) from None


def _opened(path: Path, table: dict[str, Any], *, shipped: bool) -> Library:
    library = ctypes.CDLL(str(path))
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
            f"{built_for}, for which {path} was compiled: remove this file so that it is made anew, or "
            f"install torch {built_for}"
        )
    return Library(path, built_for, shipped)


def _compiled(version: str, table: dict[str, Any]) -> Path:
    """The library for this version in the user's cache, made where it is not there yet."""
    root = cache_folder()
    if root is None:
        raise compiler.CompileError("there is no folder to keep it in: set OXIDION_CACHE to one")
    key = re.sub(r"[^\w.+]", "_", f"{version}-{int(torch.compiled_with_cxx11_abi())}-{table['abi']}")
    folder = root / "torch" / key
    library = folder / compiler.NAME
    levels = (root, root / "torch", folder)
    try:
        for level in filter(Path.exists, levels):
            check_private(level)
        if is_whole(library):
            return library
        if os.environ.get(FORBID) == "0":
            raise compiler.CompileError(f"{FORBID}=0 forbids to compile it")
        home = Path(str(torch.__file__)).parent
        compiler.check(home, _minor(version))
        for level in levels:
            make_private(level)
        with _locked(folder / "lock"):
            if not is_whole(library):
                warnings.warn(
                    f"oxidion compiles its library for torch {version}: this takes about 20 s and is kept in "
                    f"{folder}",
                    stacklevel=2,
                )
                _keep(home, library)
    except UntrustedFolder as error:
        raise compiler.CompileError(str(error)) from None
    except OSError as error:
        raise compiler.CompileError(
            f"it cannot be kept in {folder} ({error}): set OXIDION_CACHE to a folder that can be written"
        ) from None
    return library


def _keep(torch_folder: Path, library: Path) -> None:
    """Compiles the library beside its place; it is there once its digest is."""
    with tempfile.TemporaryDirectory(prefix=".compiling-", dir=library.parent) as folder:
        made, said = Path(folder, library.name), Path(folder, "digest")
        compiler.compile_shim(FOLDER / compiler.SOURCE, torch_folder, made)
        made.chmod(0o755)
        said.write_text(digest_of(made), "ascii")
        said.chmod(0o644)
        digest_file(library).unlink(missing_ok=True)
        made.replace(library)
        said.replace(digest_file(library))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a file so that one process of a machine compiles; where locks are not served, several may."""
    with path.open("w") as file:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
