"""Contents of the wheel in ``dist/``: its tag holds, libtorch is not in it. ``make wheel`` runs this file."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from cuda import compile as compiler
from support import elf

ROOT = Path(__file__).resolve().parents[1]
WHEELS = sorted((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
MEGABYTE = 2**20
CUDA_MACHINE = 190  # in the header of an ELF file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WHEELS, reason="no wheel in dist/: make wheel"),
    pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf"),
]


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel that was built last."""
    return WHEELS[-1]


@pytest.fixture(scope="module")
def content(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def information(content: Path) -> Path:
    """Its folder ``dist-info``."""
    (folder,) = content.glob("*.dist-info")
    return folder


@pytest.fixture(scope="module")
def table(content: Path) -> dict[str, Any]:
    """The torch versions that it has libraries for."""
    return json.loads((content / "oxidion" / "_torch" / "table.json").read_text())


def test_name_is_for_every_python_from_3_10_on(wheel: Path) -> None:
    assert re.fullmatch(r"oxidion-[\d.]+(rc\d+)?-cp310-abi3-(many)?linux\w*\.whl", wheel.name)


def test_size_is_less_than_fifteen_megabytes(wheel: Path) -> None:
    assert wheel.stat().st_size < 15 * MEGABYTE


def test_content_is_the_package_alone(content: Path, information: Path) -> None:
    assert {path.name for path in content.iterdir()} == {"oxidion", information.name}
    package = content / "oxidion"
    for name in ("py.typed", "_oxidion.pyi", "_oxidion.abi3.so"):
        assert (package / name).is_file()
    libraries = {path.name for path in content.rglob("*.so*")}
    assert libraries == {"_oxidion.abi3.so", "liboxidion_torch.so"}, "libtorch comes with torch"
    assert not list(content.rglob("__pycache__"))


def test_table_and_libraries_name_the_same_versions(content: Path, table: dict[str, Any]) -> None:
    folder = content / "oxidion" / "_torch"
    found = {path.parent.name for path in folder.glob("*/liboxidion_torch.so")}
    assert found == set(table["minors"])
    assert found
    source = (folder / "oxidion_torch.cpp").read_text()
    assert f'#define OXIDION_SHIM_ABI "{table["abi"]}"' in source
    core = (content / "oxidion" / "_oxidion.abi3.so").read_bytes()
    assert table["abi"].encode() in core, "core and libraries are of one build"


def test_every_library_runs_on_the_systems_of_the_tag(wheel: Path, content: Path) -> None:
    for path in content.rglob("*.so"):
        assert not elf.has_search_path(path), path
        others = {"liboxidion_torch.so"} if path.name.startswith("_oxidion") else elf.OF_LIBTORCH
        assert elf.needed(path) <= others | elf.OF_SYSTEM, path
        if "manylinux_2_28" in wheel.name:
            assert not elf.too_new(path), path


def test_machine_code_is_of_compilers_that_older_drivers_take(content: Path) -> None:
    core = (content / "oxidion" / "_oxidion.abi3.so").read_bytes()
    starts = [found.start() for found in re.finditer(rb"\x7fELF", core)]
    machine = [int.from_bytes(core[start + 18 : start + 20], "little") for start in starts]
    images = [core[start:] for start, number in zip(starts, machine, strict=True) if number == CUDA_MACHINE]
    architectures = [name for names in compiler.ARCHITECTURES.values() for name in names]
    # CUDA 12.1 is the oldest that the package takes, and 12.8 the first that knows sm_100.
    expected = Counter((12, 8) if name == "sm_100" else (12, 1) for name in architectures)
    assert Counter(map(compiler.release, images)) == expected


def test_core_uses_the_stable_abi_of_python_alone(content: Path) -> None:
    core = content / "oxidion" / "_oxidion.abi3.so"
    command = [sys.executable, "-m", "abi3audit", "--strict", "--assume-minimum-abi3", "3.10", core]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_licences_of_all_that_is_inside_are_there(content: Path, information: Path) -> None:
    for which in ("MIT", "APACHE"):
        assert (information / "licenses" / f"LICENSE-{which}").is_file()
        assert (content / "oxidion" / "_torch" / f"torch-sys-LICENSE-{which}").is_file()
    (bill,) = (information / "sboms").iterdir()
    crates = {part["name"] for part in json.loads(bill.read_text())["components"]}
    assert {"tch", "faer", "pyo3"} <= crates


def test_metadata_has_a_floor_for_torch_and_no_ceiling(information: Path) -> None:
    headers = Parser().parsestr((information / "METADATA").read_text())
    assert "torch>=2.7" in headers.get_all("Requires-Dist")
    assert headers["Requires-Python"] == ">=3.10"
    assert headers["License-Expression"] == "MIT OR Apache-2.0"
