"""The device that is checked."""

from __future__ import annotations

import os

import torch

from oxidion._cuda import device as core
from oxidion._oxidion import turn_source_off

EMULATED = core.EMULATED
OFF = "OXIDION_GPU_CHECK_OFF"
"""Environment variable: sources that libtorch computes instead of, separated by commas."""
ONLY_90 = "it is for devices of compute capability 9.0"


def lacks_groups(device: torch.device) -> bool:
    """Returns whether the products by warpgroups are not made for a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0)


def place(number: str) -> torch.device:
    """The device of that number, which becomes the current one; the host where it is emulated."""
    if number == EMULATED:
        core.prepare(emulated=True)
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", int(number))
        torch.cuda.set_device(device)
    for name in filter(None, os.environ.get(OFF, "").split(",")):
        turn_source_off(name, "it failed before", device.index or 0)
    return device
