"""Fetches headers and libraries of every minor version of torch that a released wheel has a library for.

    python .ci/torches.py FOLDER [PLATFORM]

PLATFORM is pip's word for another kind of machine, as ``manylinux_2_28_aarch64``. Wheels come from pip's
index, 0.2 to 0.9 GB each; ``PIP_INDEX_URL=https://download.pytorch.org/whl/cpu`` has the small ones. Of each
only what `python/build_shim.py` reads is unpacked, into ``FOLDER/X.Y.Z``. A folder that is there is kept.
Prints the folders, separated by colons, as ``OXIDION_SHIMS`` takes them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

RELEASES = ("2.7.0", "2.8.0", "2.9.0", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.0", "2.15.0")
"""The first release of each minor version: what is compiled against it runs with its later ones."""
PYTHON = "3.11"
"""Headers are the same for every Python."""
READ = re.compile(r"torch/(include/.*|version\.py|lib/lib(torch_cpu|c10|torch_python)\.so)")


def fetch(release: str, into: Path, platform: str) -> None:
    """Fills a folder with what is read of one release, for a platform: whole or not at all."""
    with tempfile.TemporaryDirectory(dir=into.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", PYTHON, "--dest", scratch, f"torch=={release}"]
        command += ["--platform", platform] if platform else []
        subprocess.run(command, check=True, stdout=sys.stderr)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch, [name for name in archive.namelist() if READ.fullmatch(name)])
        Path(scratch, "torch").rename(into)


def main() -> None:
    """Runs the command line."""
    root, platform = Path(sys.argv[1]).resolve(), "".join(sys.argv[2:3])
    root.mkdir(parents=True, exist_ok=True)
    folders = [root / release for release in RELEASES]
    for release, folder in zip(RELEASES, folders, strict=True):
        if not folder.is_dir():
            sys.stderr.write(f"fetching torch {release} into {folder}\n")
            fetch(release, folder, platform)
    sys.stdout.write(os.pathsep.join(map(str, folders)) + "\n")


if __name__ == "__main__":
    main()
