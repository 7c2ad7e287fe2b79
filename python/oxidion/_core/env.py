"""Facts about a machine for a bug report."""

from __future__ import annotations

import os
import platform

import torch

from oxidion._cuda import self_check
from oxidion._oxidion import __version__, cpu_features
from oxidion._torch import library


def env_report() -> str:
    """Versions, processor features and threads, one fact a line."""
    path, torch_version, shipped = library.serving()
    facts = {
        "oxidion": __version__,
        "library": f"for torch {torch_version}, {'shipped' if shipped else 'compiled here'}: {path}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu kernels": " ".join(cpu_features()) or "portable",
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()}",
        "cuda": f"{torch.version.cuda or 'not in this torch'}, device found: {torch.cuda.is_available()}, "
        f"OXIDION_CUDA={os.environ.get('OXIDION_CUDA') or 'auto'}",
    }
    lines = [f"{key + ':':<13}{value}" for key, value in facts.items()]
    own = [f"{name} {word}, in this process" for name, word in self_check.states_everywhere().items()]
    return "\n".join([*lines, *(f"{'kernels:':<13}{row}" for row in [*own, *self_check.records()])])
