"""Which NVRTC compiles, and how often: libraries that compile nothing, on the emulated driver."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from oxidion._cuda import device

from .driver import PREAMBLE, needs_nvrtc, run, unless, with_driver
from .emulator.library import HERE

pytestmark = [needs_nvrtc, unless("" if shutil.which("gcc") else "gcc")]

LOAD = """
import os, sys
from oxidion import _oxidion
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
kept = os.environ["KEPT"] or None
_oxidion.prepare_devices(kept, os.environ["PATHS"].split(":"), emulated=True)

def load(*names):
    rows = {row[0]: row for row in _oxidion.load_sources(0, 0, names)}
    return [rows[name] for name in names]
"""
Made = Callable[..., dict[str, str]]


def library(folder: Path, version: str) -> Path:
    """A library that says that it is of a version."""
    major, minor = version.split(".")
    made = folder / version / f"libnvrtc.so.{major}"
    made.parent.mkdir(parents=True, exist_ok=True)
    macros = [f"-DMAJOR={major}", f"-DMINOR={minor}"]
    source = str(HERE / "nvrtc.c")
    subprocess.run(["gcc", "-shared", "-fPIC", *macros, "-o", str(made), source], check=True)
    return made


@pytest.fixture
def made(environment: dict[str, str], tmp_path: Path) -> Made:
    """The environment of a process with a driver of CUDA 12.4 and libraries of these versions."""

    def of(*versions: str, **more: str) -> dict[str, str]:
        changed = with_driver(environment, tmp_path / "driver", "-DDRIVER_VERSION=12040")
        paths = [str(library(tmp_path, version)) for version in versions]
        said = {
            "PATHS": ":".join(paths),
            "KEPT": str(tmp_path / "kept"),
            "FAKE_NVRTC_LOG": str(tmp_path / "log"),
        }
        return {**changed, **said, **more}

    return of


def asked(tmp_path: Path) -> list[str]:
    """What the libraries were asked for, in order."""
    log = tmp_path / "log"
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize(
    ("versions", "used"),
    [
        (["11.8", "12.0", "13.9", "12.2"], "12.2"),
        (["12.4", "12.2"], "12.4"),
        (["12.6", "12.1"], "12.1"),  # not newer than the driver
        (["12.6"], "12.6"),  # of its major version, if there is no other
    ],
    ids=str,
)
def test_library_that_the_driver_takes_compiles(
    made: Made, tmp_path: Path, versions: list[str], used: str
) -> None:
    run(made(*versions), LOAD, "assert load('sums.cu')[0][1:3] == ('loaded', 'compiled')")
    assert asked(tmp_path) == [f"{used} sums.cu sm_90a"]


def test_error_names_libraries_driver_and_what_was_tried(made: Made, tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "libnvrtc.so.12"
    broken.parent.mkdir()
    broken.write_text("no library")
    environment = made("11.8", "12.0", "13.9")
    environment["PATHS"] += f":{broken}"
    said = run(
        environment,
        LOAD,
        """
        name, state, origin, seconds, reason = load("sums.cu")[0]
        assert state == "off", state
        print("REASON", reason)
        """,
    )
    reason = said.partition("REASON")[2]
    assert "sums.cu has to be compiled for sm_90a" in reason
    assert "the driver (CUDA 12.4)" in reason
    for version, why in [
        ("11.8", "older than 12.1"),
        ("12.0", "older than 12.1"),
        ("13.9", "newer than the driver"),
    ]:
        major = version.partition(".")[0]
        assert f"{tmp_path / version}/libnvrtc.so.{major} ({version}): {why}" in reason
    assert f"{broken}: " in reason
    assert asked(tmp_path) == []


@pytest.mark.parametrize(
    ("refusals", "capability", "expected", "origin"),
    [
        (1, "90", ["12.2 sm_90a", "12.3 sm_90a"], "compiled"),
        (2, "90", ["12.2 sm_90a", "12.3 sm_90a", "12.2 compute_90a"], "PTX"),
        (
            4,
            "90",
            ["12.2 sm_90a", "12.3 sm_90a", "12.2 compute_90a", "12.3 compute_90a", "12.2 compute_80"],
            "PTX",
        ),
        (
            4,
            "120",
            ["12.2 sm_120", "12.3 sm_120", "12.2 compute_120", "12.3 compute_120", "12.2 compute_80"],
            "PTX",
        ),
    ],
)
def test_image_that_the_driver_refuses_gives_way_to_the_next(
    made: Made, tmp_path: Path, refusals: int, capability: str, expected: list[str], origin: str
) -> None:
    """By the next library, then as PTX, then as PTX of the oldest architecture."""
    more = {"OXIDION_EMULATED_REFUSALS": str(refusals), "OXIDION_EMULATED_CAPABILITY": capability}
    code = f"assert load('sums.cu')[0][1:3] == ('loaded', {origin!r}), load('sums.cu')"
    run(made("12.2", "12.3", **more), LOAD, code)
    assert [line.replace("sums.cu ", "") for line in asked(tmp_path)] == expected


def test_ptx_is_not_made_by_newer_libraries_or_for_other_devices(made: Made, tmp_path: Path) -> None:
    said = run(
        made("12.6", OXIDION_EMULATED_REFUSALS="9"),
        LOAD,
        "print('REASON', load('symmetric_wgmma.cu')[0][4])",
    )
    assert asked(tmp_path) == ["12.6 symmetric_wgmma.cu sm_90a"]
    assert "INVALID_IMAGE" in said.partition("REASON")[2]


def test_architecture_that_no_library_knows_runs_ptx(made: Made, tmp_path: Path) -> None:
    more = {"OXIDION_EMULATED_CAPABILITY": "120", "FAKE_NVRTC_UNKNOWN": "sm_120"}
    run(made("12.2", **more), LOAD, "assert load('sums.cu')[0][2] == 'PTX'")
    assert asked(tmp_path) == ["12.2 sums.cu sm_120", "12.2 sums.cu compute_120"]
    # It is kept as machine code is.
    run(made("12.2", **more), LOAD, "assert load('sums.cu')[0][2] == 'kept'")
    assert len(asked(tmp_path)) == 2


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "not kept"])
def test_one_warning_precedes_compiling_only_what_is_asked_for(
    made: Made, tmp_path: Path, keep: bool
) -> None:
    code = "load('updates.cu', 'sums.cu', 'copies.cu')\nload('updates.cu', 'messages.cu')\n"
    environment = made("12.2", **({} if keep else {"KEPT": ""}))
    first, second = run(environment, LOAD, code).splitlines()
    assert first.startswith("WARNING:oxidion.cuda:compiling 3 CUDA sources for sm_90a, once: about ")
    assert "updates.cu, sums.cu, copies.cu" in first
    assert "compiling 1 CUDA source for sm_90a" in second
    place = f"the result is kept in {tmp_path / 'kept'}" if keep else "the result is not kept"
    assert place in first
    names = ["copies.cu", "messages.cu", "sums.cu", "updates.cu"]
    assert sorted(line.split()[1] for line in asked(tmp_path)) == names
    if keep:
        # A second process compiles nothing, says nothing and leaves no lock behind.
        assert run(environment, LOAD, code) == ""
        assert len(asked(tmp_path)) == 4
        assert {file.suffix for file in (tmp_path / "kept").iterdir()} == {".cubin"}


def test_processes_at_once_compile_each_source_once(made: Made, tmp_path: Path) -> None:
    environment = made("12.2", FAKE_NVRTC_MILLISECONDS="1500")
    names = ["updates.cu", "sums.cu", "rows.cu", "copies.cu", "select.cu"]
    code = f"{PREAMBLE}{LOAD}\ninput()\nassert all(row[1] == 'loaded' for row in load(*{names}))"
    command = [sys.executable, "-c", code]
    running = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in running:  # all begin when they have imported everything
        assert process.stdin
        process.stdin.write("\n")
    for process in running:
        process.communicate(timeout=300)
        assert process.returncode == 0
    assert sorted(line.split()[1] for line in asked(tmp_path)) == sorted(names)


def test_lock_of_a_process_that_has_ended_is_not_waited_for(made: Made, tmp_path: Path) -> None:
    environment = made("12.2", FAKE_NVRTC_MILLISECONDS="60000")
    killed = subprocess.Popen(
        [sys.executable, "-c", f"{PREAMBLE}{LOAD}\nload('sums.cu')"], env=environment, stdout=subprocess.PIPE
    )
    while not asked(tmp_path):
        assert killed.poll() is None
    killed.kill()
    killed.communicate()
    [lock] = (tmp_path / "kept").glob("*.lock")
    assert lock.read_text() == str(killed.pid)
    run(made("12.2"), LOAD, "assert load('sums.cu')[0][1] == 'loaded'")
    assert not lock.exists()


def test_steps_load_sources_where_the_folder_cannot_be_written(made: Made, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file")
    said = run(made("12.2"), LOAD, "assert load('sums.cu')[0][1] == 'loaded'")
    assert "cannot be kept" in said


def test_paths_begin_with_what_nvidia_finds_and_torch_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (
        "cuda_nvrtc/lib/libnvrtc.so.12",
        "cu13/lib/libnvrtc.so.13",
        "cu13/lib/libnvrtc-builtins.so.13.0",
    ):
        (tmp_path / "nvidia" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "nvidia" / place).touch()

    class Spec:
        submodule_search_locations = (str(tmp_path / "nvidia"),)

    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: Spec)
    monkeypatch.setattr(device, "_of_pathfinder", lambda: [Path("/elsewhere/libnvrtc.so.12")])
    for version, names in (
        ("13.0", ["libnvrtc.so.13", "libnvrtc.so.12"]),
        ("12.8", ["libnvrtc.so.12", "libnvrtc.so.13"]),
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        first, *others = device.nvrtc_libraries()
        assert str(first) == "/elsewhere/libnvrtc.so.12"
        assert [path.name for path in others] == names


@pytest.mark.parametrize("error", [ImportError, RuntimeError, OSError])
def test_search_of_nvidia_that_fails_is_left_out(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(name: str) -> None:
        raise error(name)

    monkeypatch.setattr(device.importlib, "import_module", fail)
    assert device._of_pathfinder() == []
