"""Builds the driver without a device, and what a process needs to be run on it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from support import cache as files
from support.forks import Forks

from .compile import ARCHITECTURES, key, missing
from .emulator.library import FLAGS, HERE, Emulated, parts
from .kept import compiled

TESTS = Path(__file__).resolve().parents[1]
EMULATED_ARCHITECTURE = "sm_90a"
"""What the emulated device is unless ``OXIDION_EMULATED_CAPABILITY`` says otherwise."""
REQUIRED = os.environ.get("OXIDION_REQUIRE_EMULATOR") == "1"
"""Whether tests fail, not skip, where what the emulator is built with is missing."""


def unless(absent: str) -> pytest.MarkDecorator:
    """Skips tests that need what is absent, unless the emulator is required: they run then, and fail."""
    return pytest.mark.skipif(bool(absent) and not REQUIRED, reason=f"not installed: {absent}")


needs_nvrtc = unless(missing())
needs_compiler = unless("" if shutil.which("g++") else "g++")

PREAMBLE = """
import ctypes, logging, torch, oxidion
from oxidion._cuda import device
device.prepare(emulated=True)
driver = ctypes.CDLL("libcuda.so.1")
torch.manual_seed(0)
torch.set_num_threads(1)

def parameters(*shapes, dtype=torch.float32):
    made = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for param in made:
        param.grad = torch.randn(param.shape).to(dtype)
    return made
"""


def _compile(source: str, file: Path, *macros: str) -> None:
    command = ["g++", *FLAGS, *macros, f"-I{HERE}", str(HERE / source), "-ldl", "-o", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"g++ does not compile {source}:\n{done.stderr[:4000]}")


def _compile_driver(file: Path, *macros: str) -> None:
    _compile("driver.cpp", file, *macros)


def _compile_modes(file: Path) -> None:
    _compile("modes.cpp", file)


def build(folder: Path, sources: Sequence[str] = tuple(ARCHITECTURES)) -> dict[str, str]:
    """Driver, kernels and machine code in a folder; returns the environment of a process that uses them."""
    driver, cache = folder / "driver", folder / "cache"
    driver.mkdir(parents=True)
    cache.mkdir()
    own = parts((HERE / "driver.cpp").read_text())
    shutil.copyfile(files.kept("libcuda.so.1", own, _compile_driver), driver / "libcuda.so.1")
    modes = files.kept("modes.so", parts((HERE / "modes.cpp").read_text()), _compile_modes)
    shutil.copyfile(modes, driver / "modes.so")
    libraries = [str(Emulated(source, folder / source).path) for source in sources]
    for source in sources:
        if EMULATED_ARCHITECTURE in ARCHITECTURES[source]:
            name, code = key(source, EMULATED_ARCHITECTURE), compiled(source, EMULATED_ARCHITECTURE).code
            digest = hashlib.sha256(name.encode() + code).digest()
            (cache / f"{name}.cubin").write_bytes(code + digest)
    paths = [str(driver), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(paths),
        "LD_PRELOAD": str(driver / "modes.so"),
        "OXIDION_EMULATED_KERNELS": ":".join(libraries),
        "OXIDION_CACHE": str(cache),
        # A kernel that cannot be had fails a test, unless libtorch is what it is about.
        "OXIDION_CUDA": "kernels",
        # Checked are the kernels where a test asks for it.
        "OXIDION_SELF_CHECK": "0",
    }


def with_driver(environment: Mapping[str, str], folder: Path, *macros: str) -> dict[str, str]:
    """The environment of a process that has another driver, which these macros make."""
    folder.mkdir(parents=True, exist_ok=True)
    own = parts((HERE / "driver.cpp").read_text(), *macros)
    made = files.kept("libcuda.so.1", own, lambda file: _compile_driver(file, *macros))
    shutil.copyfile(made, folder / "libcuda.so.1")
    return {**environment, "LD_LIBRARY_PATH": f"{folder}:{environment['LD_LIBRARY_PATH']}"}


class Environment(dict[str, str]):
    """What processes on the emulated device need, and one that is forked for them."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__(variables)
        self.forks = Forks("ctypes", "logging", "torch", "oxidion", environment=variables)


def run(environment: Mapping[str, str], *code: str) -> str:
    """Runs Python code on the emulated device; returns what it prints."""
    text = PREAMBLE + "".join(map(textwrap.dedent, code))
    if isinstance(environment, Environment):
        (ended,) = environment.forks.run(text)
        outcome, said, complaints = ended.returncode, ended.stdout, ended.stderr
    else:
        done = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, check=False, env=environment
        )
        outcome, said, complaints = done.returncode, done.stdout, done.stderr
    assert outcome == 0, complaints[-3000:]
    return said


def on_the_device(
    environment: dict[str, str], chosen: str, *places: str, markers: str = "not slow"
) -> tuple[int, int]:
    """Runs tests on the emulated device; how many passed, and how many were skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", markers]
    done = subprocess.run(
        [*command, "-k", chosen, *(str(TESTS / place) for place in places)],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "OXIDION_TEST_DEVICE": "emulated"},
        cwd=TESTS.parent,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    counts = dict(re.findall(r"(\d+) (passed|skipped)", done.stdout)[::-1])
    by_outcome = {outcome: int(count) for count, outcome in counts.items()}
    return by_outcome.get("passed", 0), by_outcome.get("skipped", 0)
