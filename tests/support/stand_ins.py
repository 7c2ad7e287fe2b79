"""Stand-ins for the CUDA libraries that a wheel of torch loads, for machines without a device.

    python -m support.stand_ins FOLDER_OF_TORCH

``pip install --no-deps torch`` leaves out several GB of libraries without which ``import torch`` fails,
though nothing of them is called. This writes a library of empty functions for each that is missing, into
``torch/lib``, where the loader looks: with the names and symbol versions that torch asks for.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from support import elf

NO_DEVICE = 100
"""What every function returns: ``cudaErrorNoDevice``."""


DRIVER = "libcuda.so.1"
"""Needed only by what torch opens when it compiles for a device: it must not be found by its name."""


def _is_on_the_machine(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def missing(folder: Path) -> dict[str, dict[str, set[str]]]:
    """Functions by symbol version, "" for none, of each missing library that ``torch/lib`` needs."""
    libraries = [path for path in sorted(folder.glob("*.so*")) if path.is_file()]
    needs = {path: elf.needed(path) for path in libraries}
    absent = {name for names in needs.values() for name in names} - {DRIVER}
    absent = {name for name in absent if not (folder / name).exists() and not _is_on_the_machine(name)}
    symbols = {path: elf.readelf("--dyn-syms", path) for path in libraries}
    defined = {
        name
        for text in symbols.values()
        for name in re.findall(r"(?:GLOBAL|WEAK|UNIQUE)\s+\w+\s+\d+ ([^\s@]+)", text)
    }
    found: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in absent}
    for path in libraries:
        wanted = re.findall(r"GLOBAL\s+\w+\s+UND ([^\s@]+)(?:@(\S+))?", symbols[path])
        files = re.split(r"File: ", elf.readelf("-V", path))[1:]
        owners = {version: file.split()[0] for file in files for version in re.findall(r"Name: (\S+)", file)}
        for name, version in wanted:
            if version:
                if owners.get(version) in found:
                    found[owners[version]][version].add(name)
            elif name not in defined and not name.startswith(("_Py", "Py", "_Z")):
                for library in absent.intersection(needs[path]):
                    found[library][""].add(name)
    return found


def write(name: str, versions: dict[str, set[str]], folder: Path) -> None:
    """Writes one stand-in."""
    functions = sorted(set().union(*versions.values()))
    script = "".join(
        f"{version} {{ global: {'; '.join(sorted(names))}; }};\n"
        for version, names in versions.items()
        if version
    )
    with tempfile.TemporaryDirectory() as scratch:
        source, exports = Path(scratch, "stand_in.c"), Path(scratch, "exports")
        source.write_text(
            "".join(f"int {function}(void) {{ return {NO_DEVICE}; }}\n" for function in functions)
        )
        exports.write_text(script)
        command = ["cc", "-w", "-fno-builtin", "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{name}"]
        command += [f"-Wl,--version-script={exports}"] if script else []
        subprocess.run([*command, source, "-o", folder / name], check=True)


def main() -> None:
    """Writes all that are missing, and prints their names."""
    folder = Path(sys.argv[1]) / "lib"
    for name, versions in sorted(missing(folder).items()):
        write(name, versions, folder)
        sys.stdout.write(f"{name}: {sum(map(len, versions.values()))} functions\n")


if __name__ == "__main__":
    main()
