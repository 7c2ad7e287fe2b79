"""Machine code of wheels is made by compilers of CUDA 12, whose code drivers of CUDA 12 and newer take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import compile as compiler
from .driver import TESTS, needs_nvrtc
from .kept import compiled
from .test_compile import (
    ELEMENTS,
    assert_addends_are_copied_during_products,
    assert_addends_are_loaded_before_a_wait,
    assert_is_within_resources,
)

ROOT = TESTS.parent
SHORT = "factors.cu"  # which is compiled in a tenth of a second
pytestmark = needs_nvrtc
#: All that an architecture is compiled by: the release of wheels first, then newer ones.
RELEASES = {"sm_80": ["12.1.105", "12.6.85"], "sm_90a": ["12.1.105", "12.6.85"], "sm_100": ["12.8.93"]}
CASES = [
    (release, source, architecture)
    for source, architectures in compiler.ARCHITECTURES.items()
    for architecture in architectures
    for release in RELEASES[architecture]
]


def fetched() -> dict[str, Path]:
    """Folders of the pinned compilers by release, as `make wheel` has them."""
    command = [sys.executable, str(ROOT / ".ci" / "nvrtc.py"), str(ROOT / ".cache" / "nvrtc")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {Path(folder).name: Path(folder) for folder in done.stdout.strip().split(os.pathsep)}


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    """The pinned compilers."""
    return fetched()


def torchs() -> Path:
    """The folder of torch's compiler."""
    return Path(compiler.nvrtc()._name).parent


def written(folder: Path, *compilers: Path) -> dict[str, tuple[int, int]]:
    """Has machine code of a short source written for a wheel; the releases that made it, by architecture."""
    compiler.write_cubins(folder, compilers)
    return {file.stem.split("-")[1]: compiler.release(file.read_bytes()) for file in folder.iterdir()}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with one source."""
    monkeypatch.setattr(compiler, "ARCHITECTURES", {SHORT: compiler.EVERYWHERE})


@pytest.mark.parametrize("architecture", compiler.EVERYWHERE)
def test_machine_code_says_which_release_made_it(architecture: str) -> None:
    code = compiled(SHORT, architecture).code
    assert compiler.release(code) == compiler.version(compiler.nvrtc())
    with pytest.raises(ValueError, match="does not say"):
        compiler.release(code.replace(b"Cuda compilation tools", b"Some compilation tools"))


def test_newer_compilers_make_nothing_for_wheels(short: None, tmp_path: Path) -> None:
    for folders in ([], [torchs()]):
        with pytest.raises(ValueError, match="no NVRTC of CUDA 12 for sm_80"):
            written(tmp_path / "cubins", *folders)
    assert not (tmp_path / "cubins").exists()


@pytest.mark.slow
def test_oldest_capable_compiler_makes_what_wheels_ship(
    short: None, folders: dict[str, Path], tmp_path: Path
) -> None:
    # What another compiler made is replaced, as that of an earlier `make wheel`.
    stale = compiler.machine_code(SHORT, "sm_80")[0]
    (tmp_path / f"{compiler.key(SHORT, 'sm_80')}.cubin").write_bytes(stale)
    expected = {"sm_80": (12, 1), "sm_90a": (12, 1), "sm_100": (12, 8)}
    newest_first = [torchs(), *reversed(folders.values())]
    assert written(tmp_path, *newest_first) == expected
    assert {architecture: RELEASES[architecture][0].rpartition(".")[0] for architecture in RELEASES} == {
        architecture: f"{major}.{minor}" for architecture, (major, minor) in expected.items()
    }


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("release", "source", "architecture"), CASES)
def test_every_source_compiles_by_older_compilers(
    folders: dict[str, Path], release: str, source: str, architecture: str
) -> None:
    made = compiled(source, architecture, compiler.nvrtc(folders[release]))
    assert ".".join(map(str, compiler.release(made.code))) == release.rpartition(".")[0]
    assert "Compiling entry function" in made.log
    assert "warning" not in made.log.lower()
    assert "serializ" not in made.log
    assert_is_within_resources(made)
    for element in ELEMENTS:
        if source == "symmetric_wgmma.cu":
            assert_addends_are_loaded_before_a_wait(made, element)
        if source == "symmetric_mma.cu":
            assert_addends_are_copied_during_products(made, element)
