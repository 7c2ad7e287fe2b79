"""Installs the peers that the benchmarks race, from PyPI, into an environment of their own.

The environment sees the packages of the running one, to which nothing is added: torch is the same for all. A
peer that cannot be installed is named, and the benchmark records it as ``not installed``. The last line names
the folder for ``--peer-path``.

    python benchmarks/peers.py ~/.cache/oxidion-peers
    python benchmarks/step.py --peer-path FOLDER --compiled --only memory- --update
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

#: Requirements with their versions.
PINNED = Path(__file__).resolve().parent / "peers.txt"


def requirements() -> list[str]:
    """The lines of the file that are no comments."""
    lines = (line.strip() for line in PINNED.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def main() -> None:
    """Install what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of the environment; made where it is not there")
    parser.add_argument("--only", default=",".join(requirements()), help="requirements of pip, by comma")
    options = parser.parse_args()
    folder = options.folder.expanduser().resolve()
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for peer in options.only.split(","):
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", peer]
        done = subprocess.run(command, check=False)
        print(f"{peer}: {'installed' if done.returncode == 0 else 'could not be installed'}")
    link = folder / "packages"
    link.unlink(missing_ok=True)
    link.symlink_to(packages)
    print(link)


if __name__ == "__main__":
    main()
