"""Makes the library between the core and libtorch: source, from the crate torch-sys, and compiled files.

    python python/build_shim.py --into FOLDER [--torch PYTHON_OR_FOLDER ...] [--test FOLDER]

The functions of torch-sys that the core calls (``src/torch_names.txt``) are cut out of the crate that cargo
has downloaded and put into ``src/torch_shim.cpp``: nothing of it is kept in the repository. FOLDER gets what
the package has in ``oxidion/_torch``: source, table, licences of what was cut out, a library for each torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAMES = ROOT / "src" / "torch_names.txt"
NAMES_OF_TESTS = ROOT / "tests" / "rust" / "torch_names.txt"
OWN = ROOT / "src" / "torch_shim.cpp"
MARK = "// @functions of torch-sys\n"
TORCH_SYS = "0.24.0"
"""Version of torch-sys whose functions have the arguments that the core passes."""
HELPERS = ("of_carray_tensor", "device_of_int", "at_value_at_indexes")
"""Functions of torch-sys that those of the list call."""
OURS = re.compile(r"oxidion_|thp_|at_tensor_of_blob$")
"""Functions of the core, and one of torch-sys that it redefines."""


def _load_compiler() -> ModuleType:
    # By its file: importing the package would need the extension.
    path = ROOT / "python" / "oxidion" / "_torch" / "compiler.py"
    spec = importlib.util.spec_from_file_location("oxidion_shim_compiler", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compiler = _load_compiler()


def names(*lists: Path) -> list[str]:
    """Names of the functions in these files, one a line, in order.

    Raises:
        ValueError: for a list that is not sorted or names a function twice.
    """
    listed = [path.read_text("utf-8").split() for path in lists]
    for path, found in zip(lists, listed, strict=True):
        if found != sorted(set(found)):
            raise ValueError(f"{path.relative_to(ROOT)} must be sorted and name each function once")
    return sorted(set().union(*listed))


def abi() -> str:
    """Hash of all that core and library must agree on, as ``src/build.rs`` takes it: 64-bit FNV-1a."""
    value = 0xCBF29CE484222325
    for byte in NAMES.read_bytes() + OWN.read_bytes():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def crates() -> dict[str, Path]:
    """Folders of the crates tch and torch-sys.

    Raises:
        ValueError: for another version of torch-sys than the one that the core is written for.
    """
    metadata = subprocess.run(
        ["cargo", "metadata", "--locked", "--format-version", "1"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    packages: list[dict[str, Any]] = json.loads(metadata.stdout)["packages"]
    found = {package["name"]: package for package in packages if package["name"] in ("tch", "torch-sys")}
    version = found["torch-sys"]["version"]
    if version != TORCH_SYS:
        raise ValueError(f"python/build_shim.py is for torch-sys {TORCH_SYS}, Cargo.lock has {version}")
    return {name: Path(package["manifest_path"]).parent for name, package in found.items()}


def cut(sources: str, name: str) -> str:
    """Definition of the function of this name.

    Raises:
        ValueError: where there is none or more than one.
    """
    starts = list(
        re.finditer(rf"^(?:template <[^>\n]*>\s)?\w[\w:<>\s*]*?\b{name}\((?=[^;{{]*\)\s*{{)", sources, re.M)
    )
    if len(starts) != 1:
        raise ValueError(f"torch-sys {TORCH_SYS} must define {name} once, found {len(starts)} definitions")
    start, depth = starts[0].start(), 0
    for at in re.finditer(r'"(?:\\.|[^"\\])*"|//[^\n]*|[{}]', sources[start:]):
        depth += {"{": 1, "}": -1}.get(at[0], 0)
        if at[0] == "}" and depth == 0:
            return sources[start : start + at.end()]
    raise ValueError(f"the definition of {name} in torch-sys {TORCH_SYS} does not end")


def generate(listed: list[str], torch_sys: Path) -> str:
    """Source of the library with the functions of this list."""
    own = OWN.read_text("utf-8")
    before, mark, after = own.partition(MARK)
    if not mark:
        raise ValueError(f"{OWN.relative_to(ROOT)} must have a line {MARK.strip()!r}")
    files = ("torch_api.cpp", "torch_api_generated.cpp")
    sources = "\n".join((torch_sys / "libtch" / file).read_text("utf-8") for file in files)
    parts = [f'#define OXIDION_SHIM_ABI "{abi()}"\n', before]
    parts += [
        f"// Of the crate torch-sys {TORCH_SYS}: MIT or Apache-2.0, see the licences next to this file.\n"
    ]
    parts += ["namespace {\n", *(cut(sources, helper) + "\n" for helper in HELPERS), "} // namespace\n\n"]
    for name in listed:
        if OURS.match(name):
            if not re.search(rf"^OXIDION_PUBLIC [\w: *]*\b{name}\(", after, re.M):
                raise ValueError(f"{OWN.relative_to(ROOT)} must define {name}, which the core calls")
        else:
            parts.append(f"OXIDION_PUBLIC {cut(sources, name)}\n\n")
    return "".join([*parts, after])


def folder_of_torch(where: str) -> Path:
    """Folder of the package torch: given as such, or that of a virtual environment or an interpreter."""
    path = Path(where)
    if (path / "include" / "ATen").is_dir():
        return path
    interpreter = path / "bin" / "python" if path.is_dir() else path
    code = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    found = subprocess.run([interpreter, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return Path(found.stdout.strip())


def version_of(torch: Path) -> str:
    """Version of the torch in this folder, without importing it."""
    found = re.search(r"__version__ = ['\"]([^'\"]+)", (torch / "version.py").read_text("utf-8"))
    if found is None:
        raise ValueError(f"{torch / 'version.py'} must set __version__")
    return found[1]


def build(into: Path, torches: list[Path]) -> None:
    """Fills a folder with what ``oxidion/_torch`` holds; a library that is up to date is kept."""
    found = crates()
    source = generate(names(NAMES), found["torch-sys"])
    into.mkdir(parents=True, exist_ok=True)
    stale = not (into / compiler.SOURCE).is_file() or (into / compiler.SOURCE).read_text("utf-8") != source
    if stale:
        (into / compiler.SOURCE).write_text(source, "utf-8")
    for licence in ("LICENSE-MIT", "LICENSE-APACHE"):
        shutil.copyfile(found["tch"] / licence, into / f"torch-sys-{licence}")
    minors: dict[str, dict[str, str]] = {}
    for torch in torches:
        version = version_of(torch)
        minor = ".".join(version.split(".")[:2])
        facts = {"torch": version, "standard": compiler.standard(torch), "payload": compiler.payload(torch)}
        minors[minor] = facts
        if not compiler.cxx11_abi(torch):
            raise ValueError(f"torch {version} in {torch} must have the new ABI of libstdc++")
        library = into / minor / compiler.NAME
        if stale or _listed(into).get(minor) != facts or _is_older(library, Path(compiler.__file__)):
            sys.stderr.write(f"compiling {library} for torch {version}\n")
            compiler.compile_shim(into / compiler.SOURCE, torch, library)
    table = {"abi": abi(), "torch-sys": TORCH_SYS, "minors": minors}
    (into / compiler.TABLE).write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    for folder in into.iterdir():
        if re.fullmatch(r"\d+\.\d+", folder.name) and folder.name not in minors:
            shutil.rmtree(folder)


def build_for_tests(into: Path, torch: Path) -> None:
    """Makes the library that tests of the core run with: more functions, none for Python."""
    source = generate(names(NAMES, NAMES_OF_TESTS), crates()["torch-sys"]) + f"// torch {version_of(torch)}\n"
    path, library = into / compiler.SOURCE, into / compiler.NAME
    if library.is_file() and path.is_file() and path.read_text("utf-8") == source:
        return
    into.mkdir(parents=True, exist_ok=True)
    library.unlink(missing_ok=True)
    path.write_text(source, "utf-8")
    compiler.compile_shim(path, torch, library, python=False)


def _is_older(library: Path, script: Path) -> bool:
    return not library.is_file() or library.stat().st_mtime < script.stat().st_mtime


def _listed(into: Path) -> dict[str, dict[str, str]]:
    table = into / compiler.TABLE
    return dict(json.loads(table.read_text("utf-8"))["minors"]) if table.is_file() else {}


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--into", type=Path, help="folder to fill")
    parser.add_argument(
        "--torch",
        nargs="*",
        default=os.environ.get("OXIDION_SHIMS", "").split(os.pathsep),
        help="folders of torch, virtual environments or interpreters (default: those in OXIDION_SHIMS)",
    )
    parser.add_argument("--test", type=Path, help="folder for the library that tests of the core run with")
    given = parser.parse_args(arguments)
    torches = [folder_of_torch(where) for where in given.torch if where]
    if given.into:
        build(given.into, torches)
    if given.test:
        build_for_tests(given.test, *torches)


if __name__ == "__main__":
    main()
