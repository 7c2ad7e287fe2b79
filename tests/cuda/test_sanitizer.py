"""Steps under compute-sanitizer, where it is installed: no access outside of arrays, no race of threads."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .driver import TESTS, needs_nvrtc
from .emulator.library import KERNELS
from .sanitizer_steps import ALGORITHMS

SCRIPT = TESTS / "cuda" / "sanitizer_steps.py"
FOUND = 9
"""What the tool exits with where it found something."""
TOOLS = ("memcheck", "racecheck")
CLEAN = re.compile(r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards")
REFUSED = "Device not supported"
OURS = "regex=^(" + "|".join(sorted({name for names in KERNELS.values() for name in names})) + "|fault)$"


def sanitizer() -> str | None:
    """The tool: on the path, of the toolkit, or of NVIDIA's package nvidia-cuda-sanitizer-api."""
    if found := shutil.which("compute-sanitizer"):
        return found
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        places += sorted(Path(folder).glob("*/bin"))
    tools = (place / "compute-sanitizer" for place in places)
    return next((str(tool) for tool in tools if os.access(tool, os.X_OK)), None)


def checked(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the script under a tool; every tensor has memory of its own there."""
    program = sanitizer()
    if program is None:
        pytest.skip("no compute-sanitizer: it comes with the CUDA toolkit or nvidia-cuda-sanitizer-api")
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--kernel-name", OURS]
    options += ["--padding", "64"] if tool == "memcheck" else []
    done = subprocess.run(
        [program, *options, sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    if REFUSED in done.stdout:
        pytest.skip("compute-sanitizer refuses this device")
    return done


def assert_clean(done: subprocess.CompletedProcess[str]) -> None:
    """Asserts that all steps were taken and nothing was found."""
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert CLEAN.search(done.stdout), done.stdout[-2000:]
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("stepped")] == [
        *ALGORITHMS
    ]


@pytest.mark.cuda
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tool", TOOLS)
def test_steps_are_clean(tool: str) -> None:
    assert_clean(checked(tool))


@pytest.mark.cuda
@pytest.mark.parametrize(("tool", "fault"), [("memcheck", "planted"), ("racecheck", "race")])
def test_planted_fault_is_found(tool: str, fault: str) -> None:
    done = checked(tool, fault)
    assert done.returncode == FOUND, done.stdout[-2000:]
    assert not CLEAN.search(done.stdout)


@needs_nvrtc
def test_script_steps_every_algorithm(environment: dict[str, str]) -> None:
    """On the emulated device, whose kernels find neither fault by themselves."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "OXIDION_TEST_DEVICE": "emulated"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[1::2] == [*ALGORITHMS]


STEPPED = "\n".join(f"stepped {name}" for name in ALGORITHMS)


@pytest.mark.parametrize(
    ("said", "code", "outcome"),
    [
        (f"{STEPPED}\n========= ERROR SUMMARY: 0 errors", 0, "clean"),
        (f"{STEPPED}\n========= ERROR SUMMARY: 2 errors", FOUND, "found"),
        ("stepped dion\n========= ERROR SUMMARY: 0 errors", 0, "found"),
        (f"{STEPPED}\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, "clean"),
        (f"{STEPPED}", 0, "found"),
        ("========= Error: Device not supported", 255, "skipped"),
    ],
)
def test_outcome_is_what_the_tool_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, code: int, outcome: str
) -> None:
    """With a stub program instead of the tool."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        f"#!/bin/sh\necho \"$@\" > {tmp_path / 'arguments'}\ncat <<'END'\n{said}\nEND\nexit {code}\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert sanitizer() == str(tool)
    raised = {"clean": (), "found": AssertionError, "skipped": pytest.skip.Exception}[outcome]
    if outcome == "clean":
        assert_clean(checked("memcheck"))
    else:
        with pytest.raises(raised):
            assert_clean(checked("memcheck"))
    arguments = (tmp_path / "arguments").read_text()
    assert arguments.startswith(f"--tool memcheck --error-exitcode {FOUND} --kernel-name regex=^(")
    assert str(SCRIPT) in arguments
    assert "adamw_many" in arguments
