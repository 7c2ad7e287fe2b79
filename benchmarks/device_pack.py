"""Packs all that a quarter of an hour on a GPU needs into a folder of the checkout.

    python benchmarks/device_pack.py --into .device --dion ~/src/dion

The folder gets the wheel, stripped; machine code for sm_90a; variants of the products for the races; the
plain Python source of microsoft/dion; a manifest with the digest of each file; and the script ``go``. Then
the whole run is rehearsed on the emulator of the tests. A pack that is too large to be sent is refused.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# ``cuda`` is the folder of tests here, not the script in this folder.
sys.path[:] = [str(ROOT / "tests"), *(p for p in sys.path if Path(p).resolve() != ROOT / "benchmarks")]
LIBRARY = "oxidion/_torch"
"""Folder of the wheel that gets what `make build` has compiled against torch's headers."""

ARCHITECTURE = "sm_90a"
MOST = 60 << 20
"""Bytes of the checkout and the pack together."""
GOOD = ("PASS", "SLOW", "LEFT_OUT")
STRETCH, EMULATED_SECONDS = 3, 900
"""By what limits are multiplied in the rehearsal, and the seconds that it has."""


def complete(wheel: Path) -> None:
    """Adds the library for the torch that is installed, and takes symbols out of all libraries."""
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch)
            names = archive.namelist()
        own = ROOT / "python" / LIBRARY
        for file in sorted(own.rglob("*")):
            name = f"{LIBRARY}/{file.relative_to(own)}"
            if file.is_file() and "__pycache__" not in name and name not in names:
                Path(scratch, name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, Path(scratch, name))
                names.append(name)
        for name in names:
            if name.endswith(".so") or ".so." in name:
                subprocess.run(["strip", "--strip-unneeded", Path(scratch, name)], check=True)
        (listed,) = (name for name in names if name.endswith(".dist-info/RECORD"))
        rows = io.StringIO()
        csv.writer(rows, lineterminator="\n").writerows(_recorded(Path(scratch), names, listed))
        Path(scratch, listed).write_text(rows.getvalue())
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
            for name in names:
                archive.write(Path(scratch, name), name)


def _recorded(folder: Path, names: Sequence[str], listed: str) -> Iterator[tuple[str, str, str]]:
    for name in names:
        content = folder.joinpath(name).read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        yield (name, "", "") if name == listed else (name, f"sha256={digest}", str(len(content)))


def wheel(into: Path) -> None:
    """Builds the wheel of the extension that is built already."""
    with tempfile.TemporaryDirectory() as scratch:
        command = ["maturin", "build", "--release", "--out", scratch, "--interpreter", sys.executable]
        subprocess.run(command, check=True, cwd=ROOT)
        (made,) = Path(scratch).glob("*.whl")
        complete(made)
        shutil.copyfile(made, into / made.name)


def machine_code(into: Path) -> dict[str, int]:
    """Writes the machine code of all sources as the package keeps it; returns registers by kernel."""
    from cuda.compile import ARCHITECTURES, key
    from cuda.kept import compiled

    into.mkdir()
    registers = {}
    for source, architectures in ARCHITECTURES.items():
        if ARCHITECTURE in architectures:
            name, found = key(source, ARCHITECTURE), compiled(source, ARCHITECTURE)
            digest = hashlib.sha256(name.encode() + found.code).digest()
            (into / f"{name}.cubin").write_bytes(found.code + digest)
            registers.update({kernel: known.registers for kernel, known in found.kernels.items()})
    return registers


def products(into: Path, compilers: Sequence[Path]) -> None:
    """Writes the variants of the products that race: as is and with relaxed arrivals, by several NVRTCs."""
    from cuda.compile import UNQUALIFIED_ARRIVE, nvrtc, version
    from cuda.compile import machine_code as made

    into.mkdir()
    own = nvrtc()
    (into / f"symmetric_mma-{ARCHITECTURE}.cubin").write_bytes(made("symmetric_mma.cu", ARCHITECTURE, own)[0])
    for library in (own, *map(nvrtc, compilers)):
        name = f"symmetric_wgmma-{ARCHITECTURE}-nvrtc{'.'.join(map(str, version(library)))}"
        for ending, macros in (("", ()), ("-relaxed", (UNQUALIFIED_ARRIVE,))):
            code, _ = made("symmetric_wgmma.cu", ARCHITECTURE, library, macros)
            (into / f"{name}{ending}.cubin").write_bytes(code)


def dion(into: Path, checkout: Path) -> None:
    """Copies the Python files of a checkout of microsoft/dion; they are never committed."""
    for file in sorted((checkout / "dion").rglob("*.py")):
        target = into / file.relative_to(checkout)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def size(pack: Path) -> int:
    """Bytes of the checkout, without what git ignores, and of the pack."""
    listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    files = [ROOT / name for name in listed if name] + [file for file in pack.rglob("*") if file.is_file()]
    return sum(file.lstat().st_size for file in set(files) if file.is_file() or file.is_symlink())


def pack(into: Path, dion_checkout: Path | None, compilers: Sequence[Path]) -> None:
    """Fills the folder."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    wheel(into)
    registers = machine_code(into / "cache")
    products(into / "products", compilers)
    if dion_checkout is not None:
        dion(into / "dion", dion_checkout)
    shutil.copyfile(ROOT / "benchmarks" / "device_go.sh", into / "go")
    files = {
        str(file.relative_to(into)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(into.rglob("*"))
        if file.is_file()
    }
    import torch

    manifest = {
        "commit": _git("rev-parse", "HEAD").strip(),
        "dirty": bool(_git("status", "--porcelain").strip()),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "torch": torch.__version__,
        "registers": registers,
        "files": files,
    }
    (into / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for run in ("1", "2"):
        words = ["--run", run, "--pack", str(into), "--plan", "--out", str(into / "plan")]
        subprocess.run([sys.executable, str(ROOT / "benchmarks" / "device.py"), *words], check=True)
        (into / "plan" / "report.json").rename(into / f"first-{run}.json")
    shutil.rmtree(into / "plan")


def rehearse(into: Path, seconds: float) -> list[str]:
    """Runs the first run on the emulator; returns what is wrong with its report."""
    from cuda.driver import build

    with tempfile.TemporaryDirectory() as scratch:
        environment = {
            **build(Path(scratch, "driver")),
            "OXIDION_DEVICE": "emulated",
            "OXIDION_DEVICE_STRETCH": str(STRETCH),
            "OXIDION_DEVICE_STATE": str(Path(scratch, "state")),
            "OUT": str(Path(scratch, "out")),
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "OXIDION_CUDA": "auto",
        }
        began = time.monotonic()
        code = subprocess.run(
            ["bash", into / "go", "1", f"{seconds:g}"], env=environment, check=False
        ).returncode
        spent = time.monotonic() - began
        log = Path(scratch, "out", "log.txt")
        report = json.loads(Path(scratch, "out", "report.json").read_text())
        shutil.copyfile(Path(scratch, "out", "report.json"), into / "rehearsal.json")
        if log.is_file():
            shutil.copyfile(log, into / "rehearsal.txt")
    wrong = [f"{p['name']}: {p['status']}, {p['reason']}" for p in report["parts"] if p["status"] not in GOOD]
    if code or spent > seconds:
        wrong.append(f"it ended with {code} after {spent:.0f} of {seconds:g} s")
    return wrong


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, default=ROOT / ".device")
    parser.add_argument("--dion", type=Path, help="a checkout of microsoft/dion to race against")
    parser.add_argument("--nvrtc", default="", metavar="FOLDERS", help="more compilers, separated by colons")
    parser.add_argument("--seconds", type=float, default=EMULATED_SECONDS, help="of the rehearsal")
    parser.add_argument("--no-rehearsal", action="store_true")
    given = parser.parse_args()
    into, began = given.into.resolve(), time.monotonic()
    pack(into, given.dion, [Path(word) for word in given.nvrtc.split(os.pathsep) if word])
    total = size(into)
    print(f"{into}: {total / 2**20:.1f} MiB with the checkout, {time.monotonic() - began:.0f} s")
    if total > MOST:
        sys.exit(f"error: the checkout and the pack have {total / 2**20:.1f} MiB, {MOST >> 20} at most")
    if not given.no_rehearsal:
        if wrong := rehearse(into, given.seconds):
            sys.exit("error: the rehearsal went wrong\n" + "\n".join(wrong))
        print(f"rehearsed on the emulator; {time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
