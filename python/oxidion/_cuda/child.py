"""Processes in which kernels are tried: what they do harms no other one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "OXIDION_SELF_CHECK"
"""Environment variable: "0" turns checks of kernels off; "child" is for the processes that they run in."""

END_WITH_PARENT = """
import ctypes, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
"""
"""Has Linux kill a process when its parent thread ends: in its own session it would outlive its parent."""

CODE = f"""{END_WITH_PARENT}
sys.path[:] = sys.argv.pop(1).split(":")
from oxidion.__main__ import main
sys.exit(main())
"""
"""A child imports what its parent does, whatever the working directory has."""


def command(number: str) -> list[str]:
    """The command of a child that is at a device.

    Raises:
        OSError: where there is no interpreter to start.
    """
    if not sys.executable:
        raise OSError("there is no sys.executable that another process could be started by")
    paths = ":".join(str(Path(path).absolute()) for path in sys.path)
    return [sys.executable, "-c", CODE, paths, "gpu-check", "--device", number]


def environment() -> dict[str, str]:
    """The variables of a child."""
    return {**os.environ, VARIABLE: "child", "OXIDION_CUDA": "auto"}
