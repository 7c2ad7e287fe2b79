"""The device that is checked."""

from __future__ import annotations

import torch

from oxidion._cuda import device as core

EMULATED = core.EMULATED


def place(number: str) -> torch.device:
    """The device of that number, which becomes the current one; the host where it is emulated."""
    if number == EMULATED:
        core.prepare(emulated=True)
        return torch.device("cpu")
    device = torch.device("cuda", int(number))
    torch.cuda.set_device(device)
    return device
