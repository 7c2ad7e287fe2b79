"""Facts about a machine for a bug report."""

from __future__ import annotations

import os
import platform

import torch

from oxidion._core.abi import TORCH
from oxidion._oxidion import __version__, cpu_features


def env_report() -> str:
    """Versions, processor features and threads, one fact a line."""
    facts = {
        "oxidion": f"{__version__} (built for torch {TORCH})",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu kernels": " ".join(cpu_features()) or "portable",
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()}",
        "cuda": f"{torch.version.cuda or 'not in this torch'}, device found: {torch.cuda.is_available()}",
    }
    return "\n".join(f"{key + ':':<13}{value}" for key, value in facts.items())
