"""Builds the driver without a device, and what a process needs to be run on it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .compile import LAUNCHED
from .emulator.library import FLAGS, HERE, Emulated


def build(folder: Path, sources: Sequence[str] = LAUNCHED) -> dict[str, str]:
    """Compiles driver and kernels into a folder; returns the environment of a process that is to use them."""
    driver = folder / "driver"
    driver.mkdir(parents=True)
    command = [
        "g++",
        *FLAGS,
        f"-I{HERE}",
        str(HERE / "driver.cpp"),
        "-ldl",
        "-o",
        str(driver / "libcuda.so.1"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"g++ does not compile the driver:\n{done.stderr[:4000]}")
    libraries = [str(Emulated(source, folder / source).path) for source in sources]
    paths = [str(driver), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(paths),
        "OXIDION_EMULATED_KERNELS": ":".join(libraries),
        "OXIDION_CACHE": str(folder / "cache"),
    }
