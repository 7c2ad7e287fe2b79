"""Steps optimizers of a wheel for aarch64 Linux in an emulator, on x86-64 Debian.

    python .ci/aarch64.py FOLDER WHEEL

Needs qemu-aarch64-static and, once, `dpkg --add-architecture arm64 && apt-get update`. FOLDER gets a Python
and a torch for the CPU, both for aarch64, and is kept. Fails where a step differs from its reference.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

DEBIAN = [
    "libc6",
    "libgcc-s1",
    "libstdc++6",
    "libgomp1",
    "zlib1g",
    "libexpat1",
    "libssl3",
    "libffi8",
    "libbz2-1.0",
    "liblzma5",
    "libsqlite3-0",
    "libuuid1",
    "libcrypt1",
    "python3.11-minimal",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
]
PYPI = [
    "torch==2.10.0",
    "numpy",
    "typing_extensions",
    "filelock",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "markupsafe",
    "fsspec",
]
"""The last torch on PyPI that needs no CUDA on aarch64, with what it imports."""
STEPS = """
import torch, oxidion
torch.manual_seed(0)
torch.set_num_threads(1)
print("torch", torch.__version__)
for name in ("AdamW", "Lion", "Muon", "NorMuon", "Dion", "SOAP", "CAME"):
    weight = torch.nn.Parameter(torch.randn(48, 32))
    optimizer = getattr(oxidion, name)([weight], lr=1e-3)
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    for row in optimizer.verify():
        print(name, row["update_error"], "expected", row["expected"])
        assert row["update_error"] < 4 * row["expected"], row
"""


def prepare(folder: Path) -> None:
    """Fills a folder with a Python and packages for aarch64."""
    debs, site = folder / "debs", folder / "site"
    debs.mkdir(parents=True)
    names = [f"{name}:arm64" for name in DEBIAN]
    subprocess.run(["apt-get", "download", "-q", *names], cwd=debs, check=True, stdout=sys.stderr)
    for package in debs.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder / "root")], check=True)
    platforms = [f"--platform=manylinux{tag}_aarch64" for tag in ("_2_28", "_2_17", "2014")]
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:", *platforms]
    subprocess.run([*command, "--python-version=3.11", "--target", str(site), *PYPI], check=True)


def main() -> None:
    """Runs the command line."""
    folder, wheel = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    if not (folder / "site").is_dir():
        prepare(folder)
    package = folder / "package"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(package)
    root = folder / "root"
    libraries = f"{root}/usr/lib/aarch64-linux-gnu:{folder}/site/torch.libs"
    command = ["qemu-aarch64-static", "-L", str(root), "-E", f"LD_LIBRARY_PATH={libraries}"]
    command += ["-E", f"PYTHONPATH={folder}/site:{package}", f"{root}/usr/bin/python3.11", "-c", STEPS]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
