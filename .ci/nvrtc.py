"""Fetches the compilers that make and test the machine code which a wheel ships.

    python .ci/nvrtc.py FOLDER

Wheels come from pip's index, 24 to 88 MB each, checked by their digests, which are those for x86-64. Of each
the compiler alone is unpacked, into ``FOLDER/X.Y.Z``. A folder that is there is kept. Prints the folders,
separated by colons, as ``tests/cuda/compile.py --nvrtc`` takes them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "nvidia-cuda-nvrtc-cu12"
DIGESTS = {
    "12.1.105": "339b385f50c309763ca65456ec75e17bbefcbbf2893f462cb8b90584cd27a1c2",
    "12.6.85": "800927308ccc5dd6246d3f61f7fcef2ed7ec4e59e199090d360d3293f78bd5a2",
    "12.8.93": "a7756528852ef889772a84c6cd89d41dfa74667e24cca16bb31f8f061e3e9994",
}
"""The oldest release that the package takes, one between, and the oldest that knows sm_100."""
READ = re.compile(r"nvidia/cuda_nvrtc/lib/(libnvrtc(?:-builtins)?\.so\.[\d.]+)")


def fetch(release: str, into: Path) -> None:
    """Fills a folder with the libraries of one release: whole or not at all."""
    with tempfile.TemporaryDirectory(dir=into.parent) as scratch:
        wanted = Path(scratch, "wanted.txt")
        wanted.write_text(f"{PACKAGE}=={release} --hash=sha256:{DIGESTS[release]}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--require-hashes", "--dest", scratch, "--requirement", str(wanted)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        (wheel,) = Path(scratch).glob("*.whl")
        made = Path(scratch, "libraries")
        made.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for found in filter(None, map(READ.fullmatch, archive.namelist())):
                (made / found[1]).write_bytes(archive.read(found[0]))
        made.rename(into)


def main() -> None:
    """Runs the command line."""
    root = Path(sys.argv[1]).resolve()
    root.mkdir(parents=True, exist_ok=True)
    folders = [root / release for release in DIGESTS]
    for release, folder in zip(DIGESTS, folders, strict=True):
        if not folder.is_dir():
            sys.stderr.write(f"fetching NVRTC {release} into {folder}\n")
            fetch(release, folder)
    sys.stdout.write(os.pathsep.join(map(str, folders)) + "\n")


if __name__ == "__main__":
    main()
